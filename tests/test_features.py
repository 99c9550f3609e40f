"""The table of features names a test for each feature that Slipstream has, and the test exists."""

from __future__ import annotations

import ast
import re

import pytest
from source_tree import ROOT

PAGE = ROOT / "docs" / "features.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text("utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| feature |")
]


def names_of_tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_the_table_is_read():
    assert len(ROWS) > 35
    assert {len(row) for row in ROWS} == {7}
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_feature_has_a_test(row):
    own, named = row[1], row[-1]
    if own == "no":
        assert named == "–"
        return
    assert own == "yes"
    path, _, name = (
        re.fullmatch(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", named).group(0).strip("`").partition("::")
    )
    assert (ROOT / path).is_file()
    assert not name or name in names_of_tests(path)

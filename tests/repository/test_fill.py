"""The grammar of fill_template, and its report of unused and unfilled variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.cli.commands import run_command
from slipstream.repository.fill import FillError, fill_text, parse_substitutions, report


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a:1,b:2", {"a": "1", "b": "2"}),
        ("max_tokens_in_paged_kv_cache:,x:y", {"max_tokens_in_paged_kv_cache": "", "x": "y"}),
        ("tokenizer_dir:http://host/x", {"tokenizer_dir": "http://host/x"}),
        (r"a:1\,2,b:x\:y,c:back\\slash", {"a": "1,2", "b": "x:y", "c": r"back\slash"}),
        (r"a:C\dir", {"a": r"C\dir"}),
    ],
)
def test_substitutions_are_parsed(text: str, values: dict[str, str]) -> None:
    assert parse_substitutions(text) == values


@pytest.mark.parametrize("text", ["a", "a:1,b", ":x"])
def test_a_piece_without_key_and_value_is_refused_by_name(text: str) -> None:
    with pytest.raises(FillError, match="is not key:value"):
        parse_substitutions(text)


def test_both_forms_of_a_variable_are_filled_and_other_text_is_kept() -> None:
    filled = fill_text('a: "${x}" b: $y c: $$z d: ${left}', {"x": "1", "y": "2", "surplus": "3"})
    assert filled.text == 'a: "1" b: 2 c: $z d: ${left}'
    assert (filled.unknown, filled.left) == (("surplus",), ("left",))


def test_a_misspelt_key_is_reported_with_the_nearest_one() -> None:
    text = "max_batch_size: ${triton_max_batch_size} q: ${max_queue_size}"
    lines = report("f", text, fill_text(text, {"triton_max_batch": "4"}))
    assert lines == [
        "f: no variable ${triton_max_batch} in it, 'triton_max_batch' was not used; "
        "did you mean 'triton_max_batch_size'?",
        "f: not filled, so their defaults are used: triton_max_batch_size",
    ]


def test_fill_writes_in_place_or_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("n: ${n}\n")
    assert run_command("fill", [str(file), "n:1"]) == 0
    assert capsys.readouterr().out == "n: 1\n\n"
    assert file.read_text() == "n: ${n}\n"
    assert run_command("fill", ["-i", str(file), "n:1"]) == 0
    assert file.read_text() == "n: 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["config.pbtxt"]

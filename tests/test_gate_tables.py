"""The parts of the gates that judge: slopes, pinned versions, and what a run ends with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gates.gates import run_gate
from gates.soak import quarters, slope
from gates.supply_chain import PINNED, read_pinned
from gates.table import Row, attempt, show, summary

ROOT = Path(__file__).parents[1]


def test_a_row_that_was_not_tried_is_no_success_and_no_failure() -> None:
    rows = [Row("a", "right", True), Row("b", "no nginx", None)]
    assert summary({"x": rows}) == "1 rows hold, 1 not tried (x: b)"
    assert "| b | no nginx | not tried |" in show("x", rows, 1.0)
    failed = summary({"x": rows, "y": [Row("c", "wrong", False)]})
    assert failed == "1 rows hold, 1 do NOT hold (y: c), 1 not tried (x: b)"


async def test_an_exception_in_a_gate_is_a_row_beside_those_before_it(tmp_path: Path) -> None:
    async def gate(folder: Path, long: bool, rows: list[Row]) -> None:
        rows.append(Row("first", "right", True))
        raise TimeoutError("too late")

    assert await run_gate(gate, tmp_path, False) == [
        Row("first", "right", True),
        Row("the gate itself", "TimeoutError: too late", False),
    ]


async def test_an_exception_in_a_case_is_a_row_beside_those_after_it() -> None:
    async def broken() -> Row:
        raise TimeoutError("too late")

    async def right() -> Row:
        return Row("b", "right", True)

    rows: list[Row] = []
    await attempt(rows, broken())
    await attempt(rows, right())
    assert [row.holds for row in rows] == [False, True]
    assert rows[0].found == "TimeoutError: too late"


def test_the_slope_ignores_single_peaks() -> None:
    rising = [(float(second), 100.0 + 2 * second) for second in range(20)]
    assert slope(rising) == pytest.approx(2.0)
    flat = [(float(second), 100.0) for second in range(20)]
    flat[7] = (7.0, 900.0)
    assert slope(flat) == 0.0


def test_quarters_show_growth_that_the_slope_of_a_late_step_does_not() -> None:
    late = [20.0] * 70 + [60.0] * 30
    assert slope(list(enumerate(late))) == 0.0
    assert quarters(late) == (20.0, 60.0)


def test_the_tested_environment_has_one_version_of_each_package() -> None:
    pinned = read_pinned(PINNED.read_text())
    assert {"torch", "grpcio", "llguidance", "pytest"} <= set(pinned)
    assert read_pinned("a-b==1.0  # why\n\nC_d==2\n") == {"a-b": "1.0", "c-d": "2"}
    with pytest.raises(ValueError, match="not a pinned version: torch>=2"):
        read_pinned("torch>=2")


def test_an_unknown_gate_is_named() -> None:
    command = [sys.executable, "-m", "tests.gates", "nothing"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2
    assert "there is no gate nothing; there are drain, chaos," in found.stderr

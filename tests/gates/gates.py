"""The gates by name."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from gates import (
    access,
    chaos,
    counts,
    drain,
    fuzz,
    overload,
    poisoned,
    races,
    smuggling,
    soak,
    starvation,
    supply_chain,
)
from gates.table import Row

# (folder for files, whether to run the long form, rows to append to)
Gate = Callable[[Path, bool, list[Row]], Awaitable[None]]

GATES: dict[str, Gate] = {
    "drain": drain.run,
    "chaos": chaos.run,
    "overload": overload.run,
    "soak": soak.run,
    "smuggling": smuggling.run,
    "poisoned": poisoned.run,
    "counts": counts.run,
    "access": access.run,
    "fuzz": fuzz.run,
    "races": races.run,
    "starvation": starvation.run,
    "supply_chain": supply_chain.run,
}


async def run_gate(gate: Gate, folder: Path, long: bool) -> list[Row]:
    """Return the rows of a gate. An exception in it is a row that does not hold."""
    rows: list[Row] = []
    try:
        await gate(folder, long, rows)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
        rows.append(Row("the gate itself", text, False))
    return rows

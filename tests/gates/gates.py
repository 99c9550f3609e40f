"""The gates by name."""

from __future__ import annotations

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

# (folder for files, whether to run the long form) → rows
Gate = Callable[[Path, bool], Awaitable[list[Row]]]

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

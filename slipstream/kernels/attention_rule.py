"""What a layer's queries may look at, and how a score becomes a weight. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """A query sees itself and the tokens before it: the last `window` of them, and the first
    `sinks` always.
    """

    scale: float  # scores are products of query and key times this
    window: int | None = None  # None: all
    sinks: int = 0  # counts only where there is a window
    softcap: float = 0.0  # scores are squeezed into (-softcap, softcap); 0: they are not

"""The error of ranks that cannot continue together. No torch here."""

from __future__ import annotations


class RanksDiffer(ValueError):
    """Two ranks of an engine run on different software or hardware."""


class RankLost(RuntimeError):
    """Another rank of the engine has ended or cannot be reached."""

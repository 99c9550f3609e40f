"""Digests of the rows of a rank, which show whether all ranks hold the same tokens."""

from __future__ import annotations

import hashlib

from slipstream.engine.plan import StepPlan
from slipstream.engine.rows import Rows

_DIGEST_BYTES = 7  # a number that every msgpack reader takes as a signed integer


class ChangedRows:
    """The rows that plans have changed since the last digest."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._tokens: dict[int, int] = {}  # row → tokens that may have changed, from the first on

    def note(self, plan: StepPlan) -> None:
        for start in plan.starts:
            self._grow(start.row, len(start.tokens))
        for fork in plan.forks:
            self._grow(fork.row, fork.tokens)
        for row, position, count in zip(plan.rows, plan.positions, plan.counts, strict=True):
            self._grow(row, position + count + 1)  # with the token that it samples

    def _grow(self, row: int, tokens: int) -> None:
        self._tokens[row] = max(tokens, self._tokens.get(row, 0))

    def take_digests(self) -> dict[int, int]:
        """Return row → digest of its tokens and its block table. It waits for the device."""
        found = {row: self._digest(row, tokens) for row, tokens in sorted(self._tokens.items())}
        self._tokens.clear()
        return found

    def _digest(self, row: int, tokens: int) -> int:
        download = self._rows.arrays.download
        known = download(self._rows.tokens[row, :tokens])
        table = download(self._rows.tables[row, : self._rows.blocks[row]])
        digest = hashlib.blake2b(known.tobytes(), digest_size=_DIGEST_BYTES)
        digest.update(table.tobytes())
        return int.from_bytes(digest.digest(), "big")

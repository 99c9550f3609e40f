"""Prompt tables of live rows: embeddings that stand where a prompt has tokens the model does not
know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.request import PromptTable
from slipstream.engine.transfer import to_device

_STAND_IN = 0  # the token that is looked up where the embedding comes from a table


class PromptRows:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # row → positions [n], embeddings [n, hidden] float32
        self._rows: dict[int, tuple[np.ndarray, Tensor]] = {}

    def start(self, row: int, tokens: list[int], table: PromptTable | None) -> list[int]:
        """A row begins: remember its table's embeddings; its tokens, all of them known to the
        model.
        """
        self._rows.pop(row, None)
        if table is None:
            return tokens
        ids = np.array(tokens)
        (positions,) = np.nonzero(ids >= table.first_token)
        embeddings = np.frombuffer(table.values, dtype=np.float32).reshape(table.rows, -1)
        chosen = embeddings[ids[positions] - table.first_token]
        self._rows[row] = (positions, to_device(chosen, self._device))
        return np.where(ids >= table.first_token, _STAND_IN, ids).tolist()

    def of_step(
        self, rows: Iterable[int], positions: Iterable[int], counts: Iterable[int]
    ) -> tuple[Tensor, Tensor] | None:
        """(tokens of the step [n], their embeddings [n, hidden]), where a row computes such tokens
        now.
        """
        if not self._rows:
            return None
        places, values, offset = [], [], 0
        for row, position, count in zip(rows, positions, counts, strict=True):
            if row in self._rows:
                where, embeddings = self._rows[row]
                first, last = np.searchsorted(where, [position, position + count])
                if first < last:
                    places.append(where[first:last] - position + offset)
                    values.append(embeddings[first:last])
            offset += count
        if not places:
            return None
        return to_device(np.concatenate(places), self._device), torch.cat(values)

    def touches(self, rows: Sequence[int], positions: Sequence[int]) -> bool:
        """Whether one of these single tokens is of a table."""
        return (
            any(
                row in self._rows and position in self._rows[row][0]
                for row, position in zip(rows, positions, strict=True)
            )
            if self._rows
            else False
        )

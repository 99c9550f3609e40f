"""The state that a runner keeps of each live request between steps: its tokens, its block table,
how it samples. Needs no torch.

A row belongs to one live request. Plans change it, and so do the tokens that the runner samples. So
a sampled token is the input of the next step without a round trip to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from slipstream.engine.blocks import NULL_BLOCK
from slipstream.engine.plan import RowStart, StepPlan
from slipstream.engine.request import PromptTable
from slipstream.engine.sampling_params import SamplingParams

# the token whose embedding is looked up, and then replaced, where a prompt has a table's token
_PLACEHOLDER = 0


class Arrays(Protocol):
    """The arrays of rows: numpy's in host memory, or torch's on a GPU."""

    def filled(self, shape: tuple[int, ...], value: int, dtype: type[np.integer[Any]]) -> Any:
        """Return a new array."""

    def upload(self, array: np.ndarray) -> Any:
        """Return an array with these values, without waiting for the device."""

    def download(self, array: Any) -> np.ndarray:
        """Return the values on the host. It waits for the device."""

    def put(self, array: Any, places: np.ndarray, values: np.ndarray | int) -> None:
        """Write values to places of the flattened array."""

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Return arrays one after the other."""


class HostArrays:
    """Arrays of numpy."""

    def filled(self, shape: tuple[int, ...], value: int, dtype: type[np.integer[Any]]) -> Any:
        # zeros take memory when they are first written to
        return np.full(shape, value, dtype) if value else np.zeros(shape, dtype)

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array

    def download(self, array: np.ndarray) -> np.ndarray:
        return array

    def put(self, array: np.ndarray, places: np.ndarray, values: np.ndarray | int) -> None:
        array.reshape(-1)[places] = values

    def concatenate(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)


class BadWords:
    """Token sequences that a row may not complete, laid out for one comparison with the end of its
    tokens.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], arrays: Arrays) -> None:
        self.reach = max(len(word) for word in words) - 1
        aligned = [[-1] * (self.reach - len(word) + 1) + list(word[:-1]) for word in words]
        # [words, reach], right-aligned; -1 matches any token
        prefixes = np.array(aligned, dtype=np.int64).reshape(len(words), self.reach)
        self.prefixes = arrays.upload(prefixes)
        self.last = arrays.upload(np.array([word[-1] for word in words], dtype=np.int64))

    def banned(self, tokens: Any, length: int) -> Any:
        """Return which of `last` may not come next in a row with these tokens [longest]. The first
        `length` of them are known.
        """
        reach = min(self.reach, length)
        prefixes = self.prefixes[:, self.reach - reach :]
        matches = ((prefixes == tokens[length - reach : length]) | (prefixes < 0)).all(axis=-1)
        if reach < self.reach:  # a word with more tokens than the row has cannot be completed
            matches &= (self.prefixes[:, : self.reach - reach] < 0).all(axis=-1)
        return matches


class PromptTableRows:
    """The prompt tables of live rows: embeddings for prompt tokens beyond the vocabulary."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        # row → positions [n], embeddings [n, hidden] float32
        self._rows: dict[int, tuple[np.ndarray, Any]] = {}

    def start(self, row: int, tokens: list[int], table: PromptTable | None) -> list[int]:
        """Store the embeddings of a row that starts; return its tokens with placeholders for those
        of the table.
        """
        self._rows.pop(row, None)
        if table is None:
            return tokens
        ids = np.array(tokens)
        (positions,) = np.nonzero(ids >= table.first_token)
        embeddings = np.frombuffer(table.values, dtype=np.float32).reshape(table.rows, -1)
        chosen = embeddings[ids[positions] - table.first_token]
        self._rows[row] = (positions, self._arrays.upload(chosen))
        replaced: list[int] = np.where(ids >= table.first_token, _PLACEHOLDER, ids).tolist()
        return replaced

    def find_embeddings(
        self, rows: Iterable[int], positions: Iterable[int], counts: Iterable[int]
    ) -> tuple[Any, Any] | None:
        """Return the tokens of a step [n] whose embeddings come from tables, and the embeddings
        [n, hidden]; None if there are none.
        """
        if not self._rows:
            return None
        places: list[np.ndarray] = []
        values: list[Any] = []
        offset = 0
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
        return self._arrays.upload(np.concatenate(places)), self._arrays.concatenate(values)

    def touches(self, rows: Sequence[int], positions: Sequence[int]) -> bool:
        """Return whether one of these positions holds a token of a table."""
        if not self._rows:
            return False
        return any(
            row in self._rows and position in self._rows[row][0]
            for row, position in zip(rows, positions, strict=True)
        )


class Rows:
    def __init__(
        self, max_rows: int, max_tokens: int, max_blocks: int, arrays: Arrays | None = None
    ) -> None:
        """arrays: where the tables lie; None: in host memory"""
        self.arrays: Arrays = arrays or HostArrays()
        # One row more than requests can hold: padding of a step is an ordinary row without a
        # request.
        self.padding_row = max_rows
        self.tokens = self.arrays.filled((max_rows + 1, max_tokens), 0, np.int64)
        self.tables = self.arrays.filled((max_rows + 1, max_blocks), NULL_BLOCK, np.int32)
        self.blocks = [0] * max_rows  # number of table entries in use
        self.prompt_tokens = [0] * max_rows
        self.sampling = [SamplingParams()] * max_rows
        self.plain = [True] * max_rows  # sampling is an argmax
        self.end_ids: list[Any | None] = [None] * max_rows
        self.bad_words: list[BadWords | None] = [None] * max_rows
        # of each row, tokens and what is added to their logits
        self.bias: list[tuple[Any, Any] | None] = [None] * max_rows
        self.allowed: list[Any | None] = [None] * max_rows  # tokens that a row may sample
        self.prompts = PromptTableRows(self.arrays)
        self.scoring: set[int] = set()  # rows whose prompt is scored at every position
        self.pooling: set[int] = set()  # rows whose prompt's states are pooled
        # row → weighted sum of its prompt's states so far, float32 [hidden]
        self.pooled_sums: dict[int, Any] = {}
        # the pages of the row's adapter; () without one
        self.pages: list[tuple[int, ...]] = [()] * max_rows
        # row → one bit for each token that it may sample in this step
        self.masks: dict[int, bytes] = {}

    def in_prompt(self, plan: StepPlan) -> bool:
        """Return whether a row computes a prompt token that has scores, is pooled or comes from a
        table.
        """
        if self.prompts.touches(plan.rows, plan.positions):
            return True
        if not self.scoring and not self.pooling:
            return False
        return any(
            (row in self.scoring or row in self.pooling) and position < self.prompt_tokens[row]
            for row, position in zip(plan.rows, plan.positions, strict=True)
        )

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's differences, with one write to the tokens and one to the tables for all
        rows that start.
        """
        self.masks = plan.masks
        for start in plan.starts:
            self._start(start)
        self._write_tokens(plan.starts)
        for fork in plan.forks:  # a fork's source is never another fork's target
            self.tokens[fork.row, : fork.tokens] = self.tokens[fork.source, : fork.tokens]
            self.blocks[fork.row] = len(fork.blocks)
        self._write_tables(plan)
        if plan.released:
            rows, entries = np.array(plan.released, dtype=np.int64).T
            # Kernels may read the null block, which is finite, and mask it.
            self.arrays.put(self.tables, rows * self.tables.shape[1] + entries, NULL_BLOCK)
        if plan.written:
            rows, positions, tokens = np.array(plan.written, dtype=np.int64).T
            places = rows * self.tokens.shape[1] + positions
            self.arrays.put(self.tokens, places, np.ascontiguousarray(tokens))

    def _write_tokens(self, starts: list[RowStart]) -> None:
        if starts:
            width = self.tokens.shape[1]
            places = np.concatenate(
                [start.row * width + np.arange(len(start.tokens)) for start in starts]
            )
            tokens = [
                self.prompts.start(start.row, start.tokens, start.prompt_table) for start in starts
            ]
            values = np.concatenate([np.array(known, dtype=np.int64) for known in tokens])
            self.arrays.put(self.tokens, places, values)

    def _write_tables(self, plan: StepPlan) -> None:
        """Write the tables of started rows and append blocks.

        Entries behind a table's end keep their old values. They may be read as padding, and are
        masked.
        """
        width = self.tables.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        tables = [(start.row, start.blocks) for start in plan.starts]
        tables += [(fork.row, fork.blocks) for fork in plan.forks]
        for row, table in tables:
            places += [row * width + index for index in range(len(table))]
            blocks += table
        for row, block in zip(plan.appended_rows, plan.appended_blocks, strict=True):
            places.append(row * width + self.blocks[row])
            blocks.append(block)
            self.blocks[row] += 1
        if places:
            self.arrays.put(
                self.tables, np.array(places, dtype=np.int64), np.array(blocks, dtype=np.int32)
            )

    def _start(self, start: RowStart) -> None:
        row = start.row
        sampling = start.sampling
        self.blocks[row] = len(start.blocks)
        self.prompt_tokens[row] = start.prompt_tokens
        self.sampling[row] = sampling
        self.plain[row] = sampling.plain
        self.pages[row] = start.pages
        if sampling.scores_prompt:
            self.scoring.add(row)
        else:
            self.scoring.discard(row)
        self.pooled_sums.pop(row, None)
        if sampling.pooling:
            self.pooling.add(row)
        else:
            self.pooling.discard(row)
        self.end_ids[row] = self._ids(sampling.end_ids) if sampling.min_tokens > 0 else None
        self.bad_words[row] = (
            BadWords(sampling.bad_words, self.arrays) if sampling.bad_words else None
        )
        self.allowed[row] = self._ids(sampling.allowed_tokens) if sampling.allowed_tokens else None
        self.bias[row] = None
        if sampling.logit_bias:
            tokens, weights = zip(*sampling.logit_bias, strict=True)
            self.bias[row] = (
                self._ids(tokens),
                self.arrays.upload(np.array(weights, dtype=np.float32)),
            )

    def _ids(self, ids: tuple[int, ...]) -> Any:
        return self.arrays.upload(np.array(ids, dtype=np.int64))

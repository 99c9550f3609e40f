"""What a rank keeps of each live request between steps: its tokens, its block table, how it
samples.

A row belongs to one live request. It changes by plans and by the tokens the rank itself samples, so
a sampled token feeds the next step without passing through the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.blocks import NULL_BLOCK
from slipstream.engine.plan import RowStart, StepPlan
from slipstream.engine.prompt_rows import PromptRows
from slipstream.engine.request import SamplingParams
from slipstream.engine.transfer import to_device


class BadWords:
    """Token sequences a row may not complete, laid out to be compared with the end of its tokens at
    once.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self.reach = max(len(word) for word in words) - 1
        aligned = [[-1] * (self.reach - len(word) + 1) + list(word[:-1]) for word in words]
        prefixes = np.array(aligned, dtype=np.int64).reshape(len(words), self.reach)  # -1: anything
        self.prefixes = to_device(prefixes, device)
        self.last = to_device(np.array([word[-1] for word in words], dtype=np.int64), device)

    def banned(self, tokens: Tensor, length: int) -> Tensor:
        """tokens: [longest] of a row that knows `length` → which of `last` may not come next."""
        reach = min(self.reach, length)
        prefixes = self.prefixes[:, self.reach - reach :]
        matches = ((prefixes == tokens[length - reach : length]) | (prefixes < 0)).all(dim=-1)
        if reach < self.reach:  # a word longer than all there is cannot be completed
            matches &= (self.prefixes[:, : self.reach - reach] < 0).all(dim=-1)
        return matches


class Rows:
    def __init__(
        self, max_rows: int, max_tokens: int, max_blocks: int, device: torch.device
    ) -> None:
        self.device = device
        # One row more than requests can hold: padding of a step is an ordinary row that nobody
        # owns.
        self.padding_row = max_rows
        self.tokens = torch.zeros(max_rows + 1, max_tokens, dtype=torch.int64, device=device)
        self.tables = torch.full(
            (max_rows + 1, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device
        )
        self.blocks = [0] * max_rows  # how many of a table's entries are in use
        self.prompt_tokens = [0] * max_rows
        self.sampling = [SamplingParams()] * max_rows
        self.plain = [True] * max_rows  # nothing to do but take the likeliest token
        self.end_ids: list[Tensor | None] = [None] * max_rows
        self.bad_words: list[BadWords | None] = [None] * max_rows
        self.bias: list[tuple[Tensor, Tensor] | None] = [None] * max_rows
        self.prompts = PromptRows(device)
        self.scoring: set[int] = set()  # rows whose prompt is scored at every position
        # where the row's adapter lies; () without one
        self.pages: list[tuple[int, ...]] = [()] * max_rows
        # of the step: row → a bit for each token that it may sample
        self.masks: dict[int, bytes] = {}

    def in_prompt(self, plan: StepPlan) -> bool:
        """Whether a row computes a token of its prompt that is more than a token: one with scores,
        or of a table.
        """
        if self.prompts.touches(plan.rows, plan.positions):
            return True
        return (
            any(
                row in self.scoring and position < self.prompt_tokens[row]
                for row, position in zip(plan.rows, plan.positions, strict=True)
            )
            if self.scoring
            else False
        )

    def apply(self, plan: StepPlan) -> None:
        """Take over a plan's differences: one write to the tokens and one to the tables, however
        many rows start.
        """
        self.masks = plan.masks
        for start in plan.starts:
            self._start(start)
        self._write_tokens(plan.starts)
        for fork in plan.forks:  # never from a row that is itself a fork's target
            self.tokens[fork.row, : fork.tokens] = self.tokens[fork.source, : fork.tokens]
            self.blocks[fork.row] = len(fork.blocks)
        self._write_tables(plan)
        if plan.passed:
            rows, passed = np.array(plan.passed, dtype=np.int64).T
            where = to_device(rows * self.tables.shape[1] + passed, self.device)
            # kernels may read it, finite, and mask it
            self.tables.view(-1).index_fill_(0, where, NULL_BLOCK)
        if plan.written:
            rows, positions, tokens = np.array(plan.written, dtype=np.int64).T
            places = to_device(rows * self.tokens.shape[1] + positions, self.device)
            self.tokens.view(-1)[places] = to_device(np.ascontiguousarray(tokens), self.device)

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
            self.tokens.view(-1)[to_device(places, self.device)] = to_device(values, self.device)

    def _write_tables(self, plan: StepPlan) -> None:
        """What lies behind a table's end stays as it was: it may be gathered as padding, and is
        masked.
        """
        width, places, blocks = self.tables.shape[1], [], []
        tables = [(start.row, start.blocks) for start in plan.starts] + [
            (fork.row, fork.blocks) for fork in plan.forks
        ]
        for row, table in tables:
            places += [row * width + index for index in range(len(table))]
            blocks += table
        for row, block in zip(plan.appended_rows, plan.appended_blocks, strict=True):
            places.append(row * width + self.blocks[row])
            blocks.append(block)
            self.blocks[row] += 1
        if places:
            where = to_device(np.array(places, dtype=np.int64), self.device)
            self.tables.view(-1)[where] = to_device(np.array(blocks, dtype=np.int32), self.device)

    def _start(self, start: RowStart) -> None:
        row, sampling = start.row, start.sampling
        self.blocks[row] = len(start.blocks)
        self.prompt_tokens[row] = start.prompt_tokens
        self.sampling[row] = sampling
        self.plain[row] = sampling.plain
        self.pages[row] = start.pages
        (self.scoring.add if sampling.scores_prompt else self.scoring.discard)(row)
        self.end_ids[row] = self._ids(sampling.end_ids) if sampling.min_tokens > 0 else None
        self.bad_words[row] = (
            BadWords(sampling.bad_words, self.device) if sampling.bad_words else None
        )
        self.bias[row] = None
        if sampling.logit_bias:
            tokens, weights = zip(*sampling.logit_bias, strict=True)
            self.bias[row] = (
                self._ids(tokens),
                to_device(np.array(weights, dtype=np.float32), self.device),
            )

    def _ids(self, ids: tuple[int, ...]) -> Tensor:
        return to_device(np.array(ids, dtype=np.int64), self.device)

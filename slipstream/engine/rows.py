"""What a rank keeps of each live request between steps: its tokens, its block table, how it samples.

A row belongs to one live request. It changes by plans and by the tokens the rank itself samples, so a
sampled token feeds the next step without passing through the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.engine.blocks import NULL_BLOCK
from slipstream.engine.plan import RowStart, StepPlan
from slipstream.engine.request import SamplingParams


class BadWords:
    """Token sequences a row may not complete, laid out to be compared with the end of its tokens at once."""

    def __init__(self, words: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self.reach = max(len(word) for word in words) - 1
        aligned = [[-1] * (self.reach - len(word) + 1) + list(word[:-1]) for word in words]
        self.prefixes = torch.tensor(aligned, device=device).view(len(words), self.reach)  # -1: anything
        self.last = torch.tensor([word[-1] for word in words], device=device)

    def banned(self, tokens: Tensor, length: int) -> Tensor:
        """tokens: [longest] of a row that knows `length` → the tokens that may not come next."""
        reach = min(self.reach, length)
        prefixes = self.prefixes[:, self.reach - reach :]
        matches = ((prefixes == tokens[length - reach : length]) | (prefixes < 0)).all(dim=-1)
        if reach < self.reach:  # a word longer than all there is cannot be completed
            matches &= (self.prefixes[:, : self.reach - reach] < 0).all(dim=-1)
        return self.last[matches]


class Rows:
    def __init__(self, max_rows: int, max_tokens: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.tokens = torch.zeros(max_rows, max_tokens, dtype=torch.int64, device=device)
        self.tables = torch.full((max_rows, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device)
        self.blocks = [0] * max_rows  # how many of a table's entries are in use
        self.prompt_tokens = [0] * max_rows
        self.sampling = [SamplingParams()] * max_rows
        self.end_ids: list[Tensor | None] = [None] * max_rows
        self.bad_words: list[BadWords | None] = [None] * max_rows
        self.bias: list[tuple[Tensor, Tensor] | None] = [None] * max_rows

    def apply(self, plan: StepPlan) -> None:
        for start in plan.starts:
            self._start(start)
        for row, block in zip(plan.appended_rows, plan.appended_blocks, strict=True):
            self.tables[row, self.blocks[row]] = block
            self.blocks[row] += 1

    def _start(self, start: RowStart) -> None:
        row, sampling = start.row, start.sampling
        self.tokens[row, : len(start.tokens)] = torch.tensor(start.tokens, dtype=torch.int64)
        self.tables[row] = NULL_BLOCK  # what lies behind a table's end is gathered as padding
        self.tables[row, : len(start.blocks)] = torch.tensor(start.blocks, dtype=torch.int32)
        self.blocks[row] = len(start.blocks)
        self.prompt_tokens[row] = start.prompt_tokens
        self.sampling[row] = sampling
        self.end_ids[row] = self._ids(sampling.end_ids) if sampling.min_tokens > 0 else None
        self.bad_words[row] = BadWords(sampling.bad_words, self.device) if sampling.bad_words else None
        self.bias[row] = None
        if sampling.logit_bias:
            tokens, weights = zip(*sampling.logit_bias, strict=True)
            self.bias[row] = (self._ids(tokens), torch.tensor(weights, dtype=torch.float32, device=self.device))

    def _ids(self, ids: tuple[int, ...]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

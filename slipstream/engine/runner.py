"""Carries plans out on a CPU: rows from differences, one forward pass, one sampling, results in launch order."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.engine import sampler
from slipstream.engine.plan import StepPlan, StepResult
from slipstream.engine.rows import Rows
from slipstream.kernels.attention import plan_attention
from slipstream.model.transformer import Step, Transformer


class Handle:
    """A launched plan. `result` waits for it."""

    def __init__(self, sampled: sampler.Sampled | None) -> None:
        self._sampled = sampled

    def result(self) -> StepResult:
        return StepResult(tokens=[]) if self._sampled is None else sampler.to_result(self._sampled)


class Runner:
    def __init__(
        self, model: Transformer, total_blocks: int, block_tokens: int, max_rows: int, max_tokens: int
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.rows = Rows(max_rows, max_tokens + 1, -(-max_tokens // block_tokens), model.device)
        slots = (total_blocks + 1) * block_tokens  # with the null block
        self.cache = model.new_cache(slots)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        self.rows.apply(plan)
        logits = self.model(self._step(plan), self.cache)
        rows = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
        if not rows:
            return Handle(None)
        lengths = [
            position + count
            for position, count, samples in zip(plan.positions, plan.counts, plan.samples, strict=True)
            if samples
        ]
        sampled = sampler.sample(logits, rows, lengths, self.rows)
        self.rows.tokens[rows, lengths] = sampled.tokens  # what the next step reads
        return Handle(sampled)

    def _step(self, plan: StepPlan) -> Step:
        rows, counts = np.array(plan.rows), np.array(plan.counts)
        positions = np.array(plan.positions)
        row_of_token = np.repeat(rows, counts)
        ends = np.cumsum(counts)
        position_of_token = np.arange(ends[-1]) + np.repeat(positions - (ends - counts), counts)
        tables = self.rows.tables.numpy()
        blocks = tables[row_of_token, position_of_token // self.block_tokens].astype(np.int64)
        slots = torch.from_numpy(blocks * self.block_tokens + position_of_token % self.block_tokens)
        token_positions = torch.from_numpy(position_of_token)
        return Step(
            token_ids=self.rows.tokens[torch.from_numpy(row_of_token), token_positions],
            positions=token_positions,
            slots=slots,
            attention=plan_attention(tables[rows], positions, counts, self.block_tokens, self.cache),
            samples=torch.from_numpy((ends - 1)[np.array(plan.samples)]),
        )

"""Carries out plans on a CPU with torch: updates the rows, runs the model once, samples."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.engine import pooling, sampler, scores
from slipstream.engine.cache.host_cache import HostCache, view_blocks
from slipstream.engine.handle import Handle
from slipstream.engine.plan import StepPlan, sampling_places
from slipstream.engine.rows import Rows
from slipstream.engine.with_torch.transfer import to_device
from slipstream.kernels import invariant_attention
from slipstream.kernels.adapters import AdapterPages, CpuStepAdapters
from slipstream.kernels.attention import plan_attention
from slipstream.model.transformer import Step, Transformer


class Runner:
    def __init__(
        self,
        model: Transformer,
        total_blocks: int,
        block_tokens: int,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.rows = Rows(max_rows, max_tokens + 1, -(-max_tokens // block_tokens))
        slots = (total_blocks + 1) * block_tokens  # with the null block
        self.cache = model.new_cache(slots)
        self.host: HostCache | None = None  # host memory for evicted blocks
        self.adapters: AdapterPages | None = None  # None until the first adapter is loaded

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        if self.host is not None:
            self.host.move(plan)
        copy_blocks(self.cache, plan.copies, self.block_tokens)
        clear_blocks(self.cache, plan.appended_blocks, self.block_tokens)
        self.rows.apply(plan)
        selection = scores.select_logits(
            plan.rows,
            np.array(plan.positions),
            np.array(plan.counts),
            np.array(plan.samples),
            self.rows,
            range(len(plan.rows)),
            plan.drafts,
        )
        rows, lengths = sampling_places(plan, range(len(plan.rows)))
        if self._exchanges_best(rows, selection):
            return self._launch_best(plan, selection, rows, lengths)
        logits, pooled = self._forward(plan, selection)
        prompts = scores.prompt_logits(logits, selection, self.rows)
        if selection.samples is not None:
            logits = logits[selection.samples]
        if not rows:
            return Handle(None, self.rows, prompts, pooled)
        sampled = sampler.sample(logits, rows, lengths, self.rows)
        self.rows.tokens[rows, lengths] = sampled.tokens  # the next step reads them
        return Handle(sampled, self.rows, prompts, pooled)

    def _exchanges_best(self, rows: list[int], selection: scores.LogitSelection) -> bool:
        """Return whether the ranks need no logits of each other but the largest of each row."""
        if self.model.ranks.size == 1 or not rows or selection.prompts or self.rows.pooling:
            return False
        return sampler.all_plain(rows, self.rows)

    def _launch_best(
        self,
        plan: StepPlan,
        selection: scores.LogitSelection,
        rows: list[int],
        lengths: list[int],
    ) -> Handle:
        """Carry out a step in which every row takes its likeliest token."""
        step = self._step(plan, selection.tokens)
        best, tokens = (found.numpy() for found in self.model.best_tokens(step, self.cache))
        if selection.samples is not None:
            best = best[selection.samples]
            tokens = tokens[selection.samples]
        self.rows.tokens[rows, lengths] = tokens
        return Handle(sampler.Sampled(tokens, best, None, []), self.rows, [], [])

    def _forward(
        self, plan: StepPlan, selection: scores.LogitSelection
    ) -> tuple[np.ndarray, list[pooling.Pooled]]:
        """Run the model. Return the selected logits, float32 [selected, vocab], and the pooled
        states of complete prompts.
        """
        pools = None
        if self.rows.pooling:
            pools = pooling.select_pooled(
                plan.rows,
                np.array(plan.positions),
                np.array(plan.counts),
                self.rows,
                range(len(plan.rows)),
                scores_first=not self.model.spec.causal,
            )
        if pools is None:
            return self.model(self._step(plan, selection.tokens), self.cache).numpy(), []
        step = self._step(plan, np.concatenate([selection.tokens, pools.tokens]))
        logits, states = self.model.logits_and_states(step, self.cache, len(selection.tokens))
        found = pooling.pool_states(states.float().numpy(), pools, self.rows, self._score)
        return logits.numpy(), found

    def _score(self, state: np.ndarray) -> np.ndarray:
        """Return the output of a classifier for one state [hidden]."""
        assert self.model.score is not None
        return self.model.score(torch.from_numpy(state)).numpy()

    def _step(self, plan: StepPlan, logit_tokens: np.ndarray) -> Step:
        rows = np.array(plan.rows)
        counts = np.array(plan.counts)
        positions = np.array(plan.positions)
        row_of_token = np.repeat(rows, counts)
        ends = np.cumsum(counts)
        position_of_token = np.arange(ends[-1]) + np.repeat(positions - (ends - counts), counts)
        tables = self.rows.tables
        deterministic = self.model.options.deterministic
        plan_rows = invariant_attention.plan_attention if deterministic else plan_attention
        blocks = tables[row_of_token, position_of_token // self.block_tokens].astype(np.int64)
        slots = blocks * self.block_tokens + position_of_token % self.block_tokens
        embeddings = self.rows.prompts.find_embeddings(plan.rows, plan.positions, plan.counts)
        if embeddings is not None:
            places, values = embeddings
            embeddings = torch.from_numpy(places), torch.from_numpy(values)
        return Step(
            token_ids=torch.from_numpy(self.rows.tokens[row_of_token, position_of_token]),
            positions=torch.from_numpy(position_of_token),
            slots=torch.from_numpy(slots),
            attention=plan_rows(tables[rows], positions, counts, self.block_tokens, self.cache),
            samples=torch.from_numpy(logit_tokens),
            adapters=self._step_adapters(plan),
            embeddings=embeddings,
        )

    def _step_adapters(self, plan: StepPlan) -> CpuStepAdapters | None:
        if self.adapters is None:
            return None
        pages = [self.rows.pages[row] for row in plan.rows]
        return self.adapters.on_cpu(pages, plan.counts, self.model.options.deterministic)


def clear_blocks(cache: Tensor, blocks: list[int], block_tokens: int) -> None:
    """Fill blocks with zeros.

    Attention pads a row to whole blocks. The padding is masked, but must be finite.
    """
    if blocks:
        view_blocks(cache, block_tokens).index_fill_(3, torch.tensor(blocks), 0.0)


def copy_blocks(cache: Tensor, copies: list[tuple[int, int]], block_tokens: int) -> None:
    """Copy blocks (source, target). No block is both a source and a target.

    cache: [layers, 2, kv_heads, slots, head_size]
    """
    if copies:
        blocks = view_blocks(cache, block_tokens)
        sources, targets = (
            to_device(np.array(numbers), cache.device) for numbers in zip(*copies, strict=True)
        )
        blocks[:, :, :, targets] = blocks[:, :, :, sources]

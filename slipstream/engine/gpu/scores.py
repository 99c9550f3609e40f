"""Scores of prompts on a GPU: see `engine/scores.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from slipstream.engine.rows import Rows
from slipstream.engine.scores import LogitSelection, PromptLogits


def prompt_logits(logits: Tensor, selection: LogitSelection, state: Rows) -> list[PromptLogits]:
    """Return the scores of prompts. `logits` [selected, vocab] may be overwritten afterwards."""
    found = []
    for part in selection.prompts:
        values = logits[part.start : part.stop].float()
        sampling = state.sampling[part.row]
        log_probs = None
        top = None
        ranks = None
        if sampling.prompt_log_probs:
            stop = min(part.position + len(values) + 1, state.prompt_tokens[part.row])
            # No prompt token follows the last one.
            following = state.tokens[part.row, part.position + 1 : stop]
            likelihood = values[: len(following)].log_softmax(dim=-1)
            chosen = likelihood.gather(-1, following[:, None])
            log_probs = chosen[:, 0]
            if count := min(sampling.top_prompt_log_probs, likelihood.shape[-1]):
                likeliest, ids = likelihood.topk(count)
                top = (ids, likeliest)
            if sampling.prompt_ranks:
                ranks = (likelihood >= chosen).sum(dim=-1)
        copied = values.clone() if sampling.context_logits else None
        found.append(PromptLogits(part.entry, copied, log_probs, top, ranks))
    return found


def to_host(found: Sequence[PromptLogits]) -> list[PromptLogits]:
    """Copy scores to the host. Waits for the device."""
    return [
        PromptLogits(
            prompt.entry,
            _to_numpy(prompt.logits),
            _to_numpy(prompt.log_probs),
            None if prompt.top is None else (_to_numpy(prompt.top[0]), _to_numpy(prompt.top[1])),
            _to_numpy(prompt.ranks),
        )
        for prompt in found
    ]


def _to_numpy(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.cpu().numpy()

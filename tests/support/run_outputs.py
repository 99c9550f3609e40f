"""Runs requests to their end and collects all their outputs."""

from __future__ import annotations

import numpy as np
import torch
from tiny_models import VOCABULARY

from slipstream.engine.messages import Scores, Timing
from slipstream.engine.request import GenerateRequest

ALL = {
    "context_logits": True,
    "generation_logits": True,
    "prompt_log_probs": True,
    "top_prompt_log_probs": 3,
    "prompt_ranks": True,
    "log_probs": True,
}


class RunOutputs:
    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.scores: dict[int, Scores] = {}
        self.timings: dict[int, Timing] = {}
        self.reasons: dict[int, str] = {}
        self.errors: dict[int, str] = {}


def run(loop, requests: list[GenerateRequest]) -> RunOutputs:
    collected = RunOutputs()
    for request in requests:
        loop.submit(request)
    while loop.has_work():
        outputs = loop.step()
        if outputs is None:
            continue
        tokens = iter(outputs.tokens)
        for request_id, count, reason in zip(
            outputs.request_ids, outputs.token_counts, outputs.finish_reasons, strict=True
        ):
            collected.tokens.setdefault(request_id, []).extend(next(tokens) for _ in range(count))
            collected.reasons[request_id] = reason
        for request_id, scores in outputs.scores.items():
            collected.scores.setdefault(request_id, Scores()).merge(scores)
        collected.timings |= outputs.timings
        collected.errors |= outputs.errors
    loop.check_integrity()
    return collected


def matrix(raw: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(raw, dtype=np.float32).reshape(-1, VOCABULARY).copy())

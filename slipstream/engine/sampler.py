"""From logits to tokens, row by row of parameters.

A token is a function of its row's logits, parameters, seed and position alone: the same whatever
else is in the batch, and again after preemption. Rows that ask for nothing special cost one argmax
for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.plan import StepResult
from slipstream.engine.request import SamplingParams
from slipstream.engine.rows import Rows
from slipstream.engine.transfer import numbers, to_device
from slipstream.kernels import sampling


class Sampled(NamedTuple):
    tokens: Tensor  # [samples] int64
    # [samples] the largest logit a row could choose from; not finite when there was none
    best: Tensor
    log_probs: Tensor | None  # [samples]
    top: list[tuple[int, Tensor, Tensor]]  # (index, tokens [n], log-probabilities [n])
    # (index, the model's own logits [vocab]) where they were asked for
    raw: Sequence[tuple[int, Tensor]] = ()


def sample(logits: Tensor, rows: list[int], lengths: list[int], state: Rows) -> Sampled:
    """logits: [samples, vocab], may be overwritten; lengths: how many tokens each row knows."""
    parameters = [state.sampling[row] for row in rows]
    if all_plain(rows, state):
        best, tokens = sampling.likeliest(logits)
        return Sampled(tokens, best, None, [])
    logits = logits.float()
    asked = [
        (index, logits[index].clone()) for index, p in enumerate(parameters) if p.generation_logits
    ]
    raw = None
    searching = [index for index, p in enumerate(parameters) if p.beams]
    for index in searching:  # beams are scored by log-probabilities, which parameters then change
        logits[index] = (logits[index] / (parameters[index].temperature or 1.0)).log_softmax(dim=-1)
    if any(p.log_probs or p.top_log_probs for p in parameters):
        # of the model's own logits, before any parameter changes them
        raw = logits.log_softmax(dim=-1)
    for index, (row, p) in enumerate(zip(rows, parameters, strict=True)):
        _adjust(logits[index], p, row, lengths[index], state)
    _penalise(logits, rows, lengths, parameters, state)
    _constrain(logits, rows, state)
    best, tokens = logits.max(dim=-1)
    _draw(logits, tokens, parameters, lengths, _top_p(rows, lengths, parameters, state))
    chosen, top = _log_probs(raw, tokens, parameters)
    for index in searching:
        values, ids = logits[index].topk(parameters[index].candidates)
        top.append((index, ids, values))
    return Sampled(tokens, best, chosen, top, asked)


def all_plain(rows: list[int], state: Rows) -> bool:
    return not state.masks and all(state.plain[row] for row in rows)


def to_result(sampled: Sampled) -> StepResult:
    """The one place where the device is waited for."""
    result = StepResult(tokens=sampled.tokens.tolist())
    if sampled.log_probs is not None:
        result.log_probs = sampled.log_probs.tolist()
    for index, tokens, log_probs in sampled.top:
        result.top_log_probs[index] = list(zip(tokens.tolist(), log_probs.tolist(), strict=True))
    for index, logits in sampled.raw:
        result.generation_logits[index] = logits.cpu().numpy().tobytes()
    for index, value in enumerate(sampled.best.tolist()):
        if not math.isfinite(value):
            result.errors[index] = (
                "the request's parameters leave no token to choose"
                if value == -math.inf
                else "the model produced logits that are not finite"
            )
    return result


def _adjust(logits: Tensor, p: SamplingParams, row: int, length: int, state: Rows) -> None:
    """What concerns single tokens of one row: bias, bad words, the minimum length. logits: [vocab]"""
    bias, bad_words, end_ids = state.bias[row], state.bad_words[row], state.end_ids[row]
    if bias is not None:
        logits.index_add_(0, *bias)
    if p.no_repeat_ngram:
        _ban(logits, *repeats(state.tokens[row, :length], p.no_repeat_ngram))
    if bad_words is not None:
        _ban(logits, bad_words.last, bad_words.banned(state.tokens[row], length))
    if end_ids is not None and length - state.prompt_tokens[row] < p.min_tokens:
        logits[end_ids] = -math.inf


def _penalise(
    logits: Tensor,
    rows: list[int],
    lengths: list[int],
    parameters: list[SamplingParams],
    state: Rows,
) -> None:
    chosen = [index for index, p in enumerate(parameters) if p.penalised]
    if not chosen:
        return
    longest = max(lengths[i] for i in chosen)
    where = numbers(chosen, logits.device)
    # [chosen, longest]
    history = state.tokens[numbers([rows[i] for i in chosen], logits.device), :longest]
    position = torch.arange(longest, device=logits.device)
    column = _column(logits.device)
    known = position < column([lengths[i] for i in chosen])
    output = known & (position >= column([state.prompt_tokens[rows[i]] for i in chosen]))
    values = logits[where]
    seen = torch.zeros_like(values).scatter_add_(1, history, known.float()) > 0
    counts = torch.zeros_like(values).scatter_add_(1, history, output.float())
    repetition = column([parameters[i].repetition_penalty for i in chosen])
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen, repeated, values)
    values -= column([parameters[i].frequency_penalty for i in chosen]) * counts
    values -= column([parameters[i].presence_penalty for i in chosen]) * (counts > 0)
    logits[where] = values


def _ban(logits: Tensor, tokens: Tensor, banned: Tensor) -> None:
    """Take those of the tokens [n] that are banned [n] out of the choice, without asking the device
    which.
    """
    logits.index_add_(0, tokens, torch.where(banned, -math.inf, 0.0))


def repeats(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """tokens: [length] → how runs of `size` tokens end [n], and which of them the last tokens begin
    again [n].
    """
    if len(tokens) < size:
        return tokens[:0], tokens[:0].bool()
    runs = tokens.unfold(0, size, 1)  # [n, size]
    return runs[:, size - 1], (runs[:, : size - 1] == tokens[len(tokens) - size + 1 :]).all(dim=-1)


def _constrain(logits: Tensor, rows: list[int], state: Rows) -> None:
    """Only what a row's mask allows stays in its choice: one operation for all rows that have one."""
    chosen = [index for index, row in enumerate(rows) if row in state.masks]
    if not chosen:
        return
    words = np.stack([np.frombuffer(state.masks[rows[index]], dtype=np.int32) for index in chosen])
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (to_device(words, logits.device)[:, :, None] >> bits & 1).view(len(chosen), -1)[
        :, : logits.shape[-1]
    ]
    where = numbers(chosen, logits.device)
    logits[where] = logits[where].masked_fill(allowed == 0, -math.inf)


def _top_p(
    rows: list[int], lengths: list[int], parameters: list[SamplingParams], state: Rows
) -> Tensor | None:
    """top_p of each row at its position [samples, 1], where one of them shrinks; None: as the
    parameters say.
    """
    if all(p.top_p_decay == 1.0 for p in parameters):
        return None
    column, longest = _column(state.device), max(lengths)
    history = state.tokens[numbers(rows, state.device), :longest]  # [samples, longest]
    position = torch.arange(longest, device=state.device)
    begun = column([state.prompt_tokens[row] for row in rows])
    resets = (history == column([p.top_p_reset_id for p in parameters])) & (
        position < column(lengths)
    )
    since = (
        torch.where(resets & (position >= begun), position + 1, begun)
        .max(dim=-1, keepdim=True)
        .values
    )
    steps = column(lengths) - since  # tokens of the answer since the last reset
    initial = column([p.top_p for p in parameters])
    shrunk = initial * column([p.top_p_decay for p in parameters]) ** steps
    shrunk = torch.maximum(shrunk, column([p.top_p_min for p in parameters]))
    decays = column([p.top_p_decay < 1.0 for p in parameters])
    return torch.where(decays & (steps > 0), shrunk, initial)


def _draw(
    logits: Tensor,
    tokens: Tensor,
    parameters: list[SamplingParams],
    lengths: list[int],
    top_p: Tensor | None,
) -> None:
    """Replace the likeliest tokens of the rows that sample. Who narrows the choice is known on the
    host.
    """
    drawn = [index for index, p in enumerate(parameters) if not p.greedy]
    narrowed = [index for index in drawn if parameters[index].narrows]
    free = [index for index in drawn if not parameters[index].narrows]
    column = _column(logits.device)
    for chosen in (narrowed, free):
        if not chosen:
            continue
        some, where = [parameters[i] for i in chosen], numbers(chosen, logits.device)
        values = logits if len(chosen) == len(logits) else logits[where]
        temperature, min_p = column([p.temperature for p in some]), column([p.min_p for p in some])
        keys = column(
            [sampling.noise_key(p.seed, lengths[i]) for i, p in zip(chosen, some, strict=True)]
        )
        if chosen is free:
            floor = min_p if any(p.min_p > 0 for p in some) else None
            tokens[where] = sampling.draw_from_all(values, temperature, floor, keys)
        else:
            widest = 0 if any(p.top_k == 0 for p in some) else max(p.top_k for p in some)
            mass = column([p.top_p for p in some]) if top_p is None else top_p[where]
            tokens[where] = sampling.draw_narrowed(
                values, temperature, column([p.top_k for p in some]), mass, min_p, keys, widest
            )


def _log_probs(
    raw: Tensor | None, tokens: Tensor, parameters: list[SamplingParams]
) -> tuple[Tensor | None, list[tuple[int, Tensor, Tensor]]]:
    if raw is None:
        return None, []
    chosen = raw.gather(-1, tokens[:, None]).flatten()
    top = []
    for index, p in enumerate(parameters):
        if p.top_log_probs and not p.beams:
            values, ids = raw[index].topk(min(p.top_log_probs, raw.shape[-1]))
            top.append((index, ids, values))
    return chosen, top


def _column(device: torch.device):
    def column(values: list[int] | list[float] | list[bool]) -> Tensor:
        return numbers(values, device)[:, None]

    return column

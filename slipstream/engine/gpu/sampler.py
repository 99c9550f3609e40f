"""Samples tokens from logits with torch, by the sampling parameters of each row: for rows whose
parameters the GPU's kernels lack, and as their reference. `engine/sampler.py` is the CPU's.

Rows with default parameters share a single argmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.gpu.device_arrays import DeviceArrays
from slipstream.engine.rows import Rows
from slipstream.engine.sampler import Sampled, TopTokens, all_plain
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.with_torch.transfer import list_to_device
from slipstream.kernels.gpu.sampling import in_torch as sampling
from slipstream.kernels.sampling import noise_key


class Likeliest(NamedTuple):
    """The likeliest tokens of many samples, as the GPU's kernels report them."""

    # index of a result → (sample, number of tokens to report)
    samples: dict[int, tuple[int, int]]
    # float32 [samples, 2, n]: tokens by their bits, and their log-probabilities. As many as the
    # sample reports come first, in no order.
    top: Tensor

    def to_lists(self) -> dict[int, list[tuple[int, float]]]:
        """Return the tokens with their log-probabilities of each result, the likeliest first."""
        most = max(count for _, count in self.samples.values())
        found = self.top.numpy()[[sample for sample, _ in self.samples.values()], :, :most]
        order = np.argsort(-found[:, 1], axis=1, kind="stable")
        tokens = np.take_along_axis(found[:, 0].view(np.int32), order, axis=1).tolist()
        values = np.take_along_axis(found[:, 1], order, axis=1).tolist()
        lists = {}
        for row, scores, (index, (_, count)) in zip(
            tokens, values, self.samples.items(), strict=True
        ):
            pairs = list(zip(row, scores, strict=True))
            lists[index] = pairs if count == most else pairs[:count]
        return lists


def sample(
    logits: Tensor,
    rows: list[int],
    lengths: list[int],
    state: Rows,
    batch_invariant: bool = False,
) -> Sampled:
    """Sample a token for each of `rows`. `lengths`: the number of tokens that each row knows.

    logits: [samples, vocab], may be overwritten
    batch_invariant: draw for each row by itself. Which of equal logits are among the top k or the
    top p depends on the shape of the call.
    """
    if all_plain(rows, state):
        best, tokens = sampling.likeliest(logits)
        return Sampled(tokens, best, None, [])
    parameters = [state.sampling[row] for row in rows]
    logits = logits.float()
    raw = [
        (index, logits[index].clone()) for index, p in enumerate(parameters) if p.generation_logits
    ]
    searching = [index for index, p in enumerate(parameters) if p.beams]
    for index in searching:  # beams are scored by log-probabilities, which parameters then change
        logits[index] = (logits[index] / (parameters[index].temperature or 1.0)).log_softmax(dim=-1)
    raw_log_probs = None
    if any(p.log_probs or p.top_log_probs for p in parameters):
        # of the model's own logits, before any parameter changes them
        raw_log_probs = logits.log_softmax(dim=-1)
    for index, (row, p) in enumerate(zip(rows, parameters, strict=True)):
        _adjust(logits[index], p, row, lengths[index], state)
    _penalise(logits, rows, lengths, parameters, state)
    _apply_masks(logits, rows, state)
    best, tokens = logits.max(dim=-1)
    top_p = _top_p(rows, lengths, parameters, state)
    _draw(logits, tokens, parameters, lengths, top_p, batch_invariant)
    log_probs, top = _log_probs(raw_log_probs, tokens, parameters)
    for index in searching:
        values, ids = logits[index].topk(parameters[index].candidates)
        top.append((index, ids, values))
    return Sampled(tokens, best, log_probs, top, raw)


def _adjust(logits: Tensor, p: SamplingParams, row: int, length: int, state: Rows) -> None:
    """Apply bias, allowed tokens, bans and the minimum length to one row's logits [vocab]."""
    bias = state.bias[row]
    bad_words = state.bad_words[row]
    end_ids = state.end_ids[row]
    if bias is not None:
        logits.index_add_(0, *bias)
    if (allowed := state.allowed[row]) is not None:
        kept = logits[allowed]
        logits.fill_(-math.inf)
        logits[allowed] = kept
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
    """Apply the repetition, presence and frequency penalties."""
    chosen = [index for index, p in enumerate(parameters) if p.penalised]
    if not chosen:
        return
    longest = max(lengths[i] for i in chosen)
    where = list_to_device(chosen, logits.device)
    # [chosen, longest]
    history = state.tokens[list_to_device([rows[i] for i in chosen], logits.device), :longest]
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
    """Set the logits of `banned` tokens to -inf, without a synchronisation; both are [n]."""
    logits.index_add_(0, tokens, torch.where(banned, -math.inf, 0.0))


def repeats(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the last token of each n-gram of `size` tokens in `tokens` [length], and which of the
    n-grams the next token could repeat. Both are [n].
    """
    if len(tokens) < size:
        return tokens[:0], tokens[:0].bool()
    runs = tokens.unfold(0, size, 1)  # [n, size]
    return runs[:, size - 1], (runs[:, : size - 1] == tokens[len(tokens) - size + 1 :]).all(dim=-1)


def _apply_masks(logits: Tensor, rows: list[int], state: Rows) -> None:
    """Set the logits of tokens that a row's mask excludes to -inf, for all masked rows at once."""
    chosen = [index for index, row in enumerate(rows) if row in state.masks]
    if not chosen:
        return
    masks = _split_masks([rows[index] for index in chosen], state, logits.shape[-1])
    words = np.empty((len(chosen), 1 + len(masks[0])), dtype=np.int32)
    words[:, 0] = chosen
    np.stack(masks, out=words[:, 1:])
    assert isinstance(state.arrays, DeviceArrays)
    copied = state.arrays.buffers.to_device(words, logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (copied[:, 1:, None] >> shifts & 1).view(len(chosen), -1)[:, : logits.shape[-1]]
    where = copied[:, 0].long()
    logits[where] = logits[where].masked_fill(allowed == 0, -math.inf)


def _split_masks(rows: list[int], state: Rows, vocab: int) -> list[np.ndarray]:
    """Return the mask of each sample: int32 [words]. A row with several samples has a mask for each
    of them.
    """
    words = -(-vocab // 32)
    masks: list[np.ndarray] = []
    samples: dict[int, int] = {}  # row → samples before this one
    for row in rows:
        place = samples.get(row, 0)
        samples[row] = place + 1
        mask = np.frombuffer(state.masks[row], dtype=np.int32)
        masks.append(mask[place * words : (place + 1) * words])
    return masks


def _top_p(
    rows: list[int], lengths: list[int], parameters: list[SamplingParams], state: Rows
) -> Tensor | None:
    """Return top_p of each row at its position [samples, 1], where a row's top_p decays; None where
    none does.
    """
    if all(p.top_p_decay == 1.0 for p in parameters):
        return None
    device = state.tokens.device
    column = _column(device)
    longest = max(lengths)
    history = state.tokens[list_to_device(rows, device), :longest]  # [samples, longest]
    position = torch.arange(longest, device=device)
    output_start = column([state.prompt_tokens[row] for row in rows])
    resets = (history == column([p.top_p_reset_id for p in parameters])) & (
        position < column(lengths)
    )
    since = (
        torch.where(resets & (position >= output_start), position + 1, output_start)
        .max(dim=-1, keepdim=True)
        .values
    )
    steps = column(lengths) - since  # output tokens since the last reset
    initial = column([p.top_p for p in parameters])
    decayed = initial * column([p.top_p_decay for p in parameters]) ** steps
    decayed = torch.maximum(decayed, column([p.top_p_min for p in parameters]))
    decays = column([p.top_p_decay < 1.0 for p in parameters])
    return torch.where(decays & (steps > 0), decayed, initial)


def _draw(
    logits: Tensor,
    tokens: Tensor,
    parameters: list[SamplingParams],
    lengths: list[int],
    top_p: Tensor | None,
    batch_invariant: bool,
) -> None:
    """Replace the likeliest tokens of the rows that sample by drawn ones."""
    drawn = [index for index, p in enumerate(parameters) if not p.greedy]
    narrowed = [index for index in drawn if parameters[index].narrows]
    free = [index for index in drawn if not parameters[index].narrows]
    for chosen in [[index] for index in narrowed] if batch_invariant else [narrowed]:
        if chosen:
            _draw_narrowed(logits, tokens, chosen, parameters, lengths, top_p)
    if free:
        _draw_from_all(logits, tokens, free, parameters, lengths)


def _draw_narrowed(
    logits: Tensor,
    tokens: Tensor,
    chosen: list[int],
    parameters: list[SamplingParams],
    lengths: list[int],
    top_p: Tensor | None,
) -> None:
    """Draw tokens of rows with top-k or top-p."""
    column = _column(logits.device)
    some = [parameters[index] for index in chosen]
    where = list_to_device(chosen, logits.device)
    widest = 0 if any(p.top_k == 0 for p in some) else max(p.top_k for p in some)
    tokens[where] = sampling.draw_narrowed(
        _select(logits, chosen, where),
        column([p.temperature for p in some]),
        column([p.top_k for p in some]),
        column([p.top_p for p in some]) if top_p is None else top_p[where],
        column([p.min_p for p in some]),
        column(_noise_keys(chosen, parameters, lengths)),
        widest,
        _typical_p(some, logits.device),
    )


def _draw_from_all(
    logits: Tensor,
    tokens: Tensor,
    chosen: list[int],
    parameters: list[SamplingParams],
    lengths: list[int],
) -> None:
    """Draw tokens of rows without top-k and top-p."""
    column = _column(logits.device)
    some = [parameters[index] for index in chosen]
    where = list_to_device(chosen, logits.device)
    min_p = column([p.min_p for p in some]) if any(p.min_p > 0 for p in some) else None
    tokens[where] = sampling.draw_from_all(
        _select(logits, chosen, where),
        column([p.temperature for p in some]),
        min_p,
        column(_noise_keys(chosen, parameters, lengths)),
        _typical_p(some, logits.device),
    )


def _typical_p(parameters: list[SamplingParams], device: torch.device) -> Tensor | None:
    """Return typical_p of each row [rows, 1], None if no row uses it."""
    if all(p.typical_p >= 1.0 for p in parameters):
        return None
    return _column(device)([p.typical_p for p in parameters])


def _select(logits: Tensor, chosen: list[int], where: Tensor) -> Tensor:
    """Return the chosen rows of the logits, without a copy if they are all rows."""
    return logits if len(chosen) == len(logits) else logits[where]


def _noise_keys(
    chosen: list[int], parameters: list[SamplingParams], lengths: list[int]
) -> list[int]:
    return [noise_key(parameters[index].seed, lengths[index]) for index in chosen]


def _log_probs(
    raw: Tensor | None, tokens: Tensor, parameters: list[SamplingParams]
) -> tuple[Tensor | None, list[TopTokens]]:
    """Return the log-probabilities of the sampled tokens and of the likeliest ones.

    raw: [samples, vocab] log-probabilities; None when no row asks for them
    """
    if raw is None:
        return None, []
    sampled = raw.gather(-1, tokens[:, None]).flatten()
    top: list[TopTokens] = []
    for index, p in enumerate(parameters):
        if p.top_log_probs and not p.beams:
            values, ids = raw[index].topk(min(p.top_log_probs, raw.shape[-1]))
            top.append((index, ids, values))
    return sampled, top


def _column(
    device: torch.device,
) -> Callable[[list[int] | list[float] | list[bool]], Tensor]:
    """Return a function that copies a list [n] to the device as a column [n, 1]."""

    def column(values: list[int] | list[float] | list[bool]) -> Tensor:
        return list_to_device(values, device)[:, None]

    return column

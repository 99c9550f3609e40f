"""The sampling kernels against the torch sampler: the same tokens for the same seeds. Without a GPU
they run in Triton's interpreter, on a small vocabulary.
"""

import math

import numpy as np
import pytest
import torch
from attention_steps import DEVICE, GPU
from sampling_sets import SETS

from slipstream.engine.gpu import sampler
from slipstream.engine.gpu.device_arrays import DeviceArrays
from slipstream.engine.gpu.sampling_rows import SamplingRows, needs_torch_sampler
from slipstream.engine.plan import RowStart
from slipstream.engine.rows import Rows
from slipstream.engine.sampling_params import SamplingParams

VOCAB = 3000
ROWS = 8
PROMPT = 5
LENGTH = 9


def prepared(parameters: list[SamplingParams]) -> tuple[Rows, SamplingRows]:
    """Return rows that know LENGTH tokens each, and their tables."""
    state = Rows(ROWS, 64, 4, DeviceArrays(torch.device(DEVICE)))
    generator = torch.Generator().manual_seed(3)
    # Few tokens, so that they repeat; with the pair that ends each row in its middle.
    tokens = torch.randint(0, 12, (ROWS, LENGTH), generator=generator)
    tokens[:, 2:4] = tokens[:, -1:]
    state.tokens[:ROWS, :LENGTH] = tokens.to(DEVICE)
    starts = [RowStart(row, [], PROMPT, [], p) for row, p in enumerate(parameters)]
    for start in starts:
        state._start(start)
    table = SamplingRows(ROWS + 1, VOCAB, torch.device(DEVICE))
    table._start(starts)
    return state, table


def some_logits(sharpness: float) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(5)) * sharpness


@pytest.mark.gpu  # minutes in the interpreter, which runs all sets in a few batches below
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
@pytest.mark.parametrize("name", SETS)
def test_kernels_draw_the_tokens_of_the_torch_sampler(name, sharpness):
    parameters = [SamplingParams(**SETS[name], seed=2**63 + 977 * row) for row in range(ROWS)]
    check(parameters, some_logits(sharpness))


@pytest.mark.parametrize("first", range(0, len(SETS), ROWS))
def test_rows_of_all_kinds_in_one_batch(first):
    names = list(SETS)
    names += names[:ROWS]  # the last batch is filled up with the first sets
    parameters = [
        SamplingParams(**SETS[name], seed=2**63 + 977 * row)
        for row, name in enumerate(names[first : first + ROWS])
    ]
    check(parameters, some_logits(1.0 if first % 16 else 4.0))


def check(parameters: list[SamplingParams], logits: torch.Tensor) -> None:
    state, table = prepared(parameters)
    assert not table._external
    expected = sampler.sample(
        logits.clone(), list(range(ROWS)), [LENGTH] * ROWS, state_on_cpu(state)
    )
    rows = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((ROWS,), LENGTH, dtype=torch.int32, device=DEVICE)

    got = table.sample(logits.clone().to(DEVICE), rows, lengths, state.tokens)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert torch.allclose(got.best.cpu(), expected.best, atol=1e-5)
    assert not table.scratch.seen.any(), "no bits are left behind"
    for row, p in enumerate(parameters):
        if p.log_probs:
            assert got.log_probs[row].item() == pytest.approx(
                expected.log_probs[row].item(), abs=1e-4
            )
        else:
            assert math.isnan(got.log_probs[row].item())
    for row, ids, values in expected.top:
        found = sorted_top(got.top[row], parameters[row].top_log_probs)
        assert [token for token, _ in found] == ids.tolist()
        assert [value for _, value in found] == pytest.approx(values.tolist(), abs=1e-4)


def sorted_top(top: torch.Tensor, count: int) -> list[tuple[int, float]]:
    tokens = top[0].view(torch.int32).tolist()
    pairs = zip(tokens, top[1].tolist(), strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])[:count]


def state_on_cpu(state: Rows) -> Rows:
    """Return the rows with their tensors on the CPU, where the torch sampler runs."""
    if not GPU:
        return state
    moved = Rows(ROWS, 64, 4, DeviceArrays(torch.device("cpu")))
    moved.tokens[:] = state.tokens.cpu()
    for row, p in enumerate(state.sampling):
        moved._start(RowStart(row, [], PROMPT, [], p))
    return moved


def few_rows(count: int, parameters: SamplingParams, logits: torch.Tensor):
    """Return the tables of some rows with these parameters, and a function that samples them."""
    state, table = prepared([parameters] * ROWS)
    rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((count,), LENGTH, dtype=torch.int32, device=DEVICE)
    some = logits[:count]
    return table, lambda: table.sample(some.clone().to(DEVICE), rows, lengths, state.tokens)


def test_masks_of_a_step_exclude_tokens_in_that_step_only():
    logits = some_logits(1.0)
    table, sample = few_rows(2, SamplingParams(temperature=1.0, seed=7), logits)
    free = sample().tokens.tolist()
    mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    mask[10] = 0b101
    table._write_masks({1: mask.tobytes()})
    masked = sample().tokens.tolist()
    assert masked[1] in (320, 322)
    assert masked[0] == free[0]
    table._write_masks({})
    assert sample().tokens.tolist() == free


def test_the_best_logit_shows_rows_without_a_token():
    logits = some_logits(4.0)
    logits[1] = -math.inf
    logits[2, 77] = math.nan
    _, sample = few_rows(3, SamplingParams(temperature=1.0, top_p=0.9), logits)
    best = sample().best.tolist()
    assert best[1] == -math.inf
    assert math.isnan(best[2])
    assert math.isfinite(best[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"beam_width": 2},
        {"generation_logits": True},
        {"top_log_probs": 33},
        {"top_log_probs": 3, "repetition_penalty": 1.1},
        {"top_log_probs": 3, "allowed_tokens": (1, 2)},
        {"bad_words": ((1, 2),)},
        {"temperature": 1.0, "top_p_decay": 0.9},
        {"temperature": 1.0, "top_k": 2000},
        {"temperature": 1.0, "top_p": 0.9, "typical_p": 0.9},
    ],
)
def test_other_parameters_are_left_to_the_torch_sampler(fields):
    assert needs_torch_sampler(SamplingParams(**fields), VOCAB)


def test_of_equal_logits_the_first_tokens_are_among_the_top_k():
    logits = torch.full((1, VOCAB), -5.0, device=DEVICE)
    logits[0, :100] = 0.0
    logits[0, 200] = 3.0
    _, sample = few_rows(1, SamplingParams(log_probs=True, top_log_probs=5), logits)
    found = sampler.Likeliest({0: (0, 5)}, sample().top.cpu()).to_lists()[0]
    assert [token for token, _ in found] == [200, 0, 1, 2, 3]
    logits[0, 200] = 0.0
    for seed in range(8):
        _, sample = few_rows(1, SamplingParams(temperature=1.0, top_k=3, seed=seed), logits)
        assert sample().tokens.tolist()[0] in (0, 1, 2)


def test_log_probabilities_with_a_large_bias_are_left_to_the_torch_sampler():
    bias = ((3, 5000.0),)
    assert needs_torch_sampler(SamplingParams(log_probs=True, logit_bias=bias), VOCAB)
    assert not needs_torch_sampler(SamplingParams(logit_bias=bias), VOCAB)
    assert not needs_torch_sampler(SamplingParams(log_probs=True, logit_bias=((3, 100.0),)), VOCAB)

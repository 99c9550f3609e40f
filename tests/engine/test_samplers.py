"""The sampler of a CPU and that of a GPU's rows, which runs with torch: the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_sets import SETS

from slipstream.engine import sampler
from slipstream.engine.gpu import sampler as gpu_sampler
from slipstream.engine.gpu.device_arrays import DeviceArrays
from slipstream.engine.gpu.scores import prompt_logits as torch_prompt_logits
from slipstream.engine.gpu.scores import to_host
from slipstream.engine.plan import RowStart, StepPlan
from slipstream.engine.rows import Rows
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scores import prompt_logits, select_logits, to_scores

VOCAB = 3000
ROWS = 6
PROMPT = 5
LENGTH = 12
# beyond what the kernels of a GPU know
MORE = {
    "bad words": {"bad_words": ((4,), (1, 2), (3, 1, 7)), "temperature": 1.0},
    "decay": {
        "temperature": 1.2,
        "top_p": 0.9,
        "top_p_decay": 0.7,
        "top_p_min": 0.1,
        "top_p_reset_id": 3,
    },
    "raw logits": {"generation_logits": True, "temperature": 0.8},
    "beams": {"beam_width": 3, "temperature": 0.9, "log_probs": True},
    "typical, top-p and min-p": {
        "temperature": 1.1,
        "typical_p": 0.6,
        "top_p": 0.9,
        "min_p": 0.02,
    },
}


def prepared(parameters: list[SamplingParams], on_device: bool) -> Rows:
    """Return rows that know LENGTH tokens each: few tokens, so that they repeat."""
    arrays = DeviceArrays(torch.device("cpu")) if on_device else None
    state = Rows(ROWS, 64, 4, arrays)
    chance = np.random.default_rng(3)
    starts = []
    for row, p in enumerate(parameters):
        tokens = chance.integers(0, 12, LENGTH).tolist()
        tokens[2:4] = tokens[-2:]
        starts.append(RowStart(row, tokens, PROMPT, [], p))
    state.apply(StepPlan(step=1, starts=starts))
    return state


def mask_of(row: int) -> bytes:
    bits = np.random.default_rng(row).random(-(-VOCAB // 32) * 32) < 0.3
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [*SETS, *MORE])
def test_both_sample_the_same(name, masked):
    parameters = [
        SamplingParams(**{**SETS, **MORE}[name], seed=2**63 + 977 * row) for row in range(ROWS)
    ]
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    results = []
    for on_device in (False, True):
        state = prepared(parameters, on_device)
        if masked:
            state.masks = {row: mask_of(row) for row in range(0, ROWS, 2)}
        rows = list(range(ROWS))
        if on_device:
            found = gpu_sampler.sample(logits.clone(), rows, [LENGTH] * ROWS, state)
            found = found._replace(raw=[(index, one.numpy()) for index, one in found.raw])
        else:
            found = sampler.sample(logits.clone().numpy(), rows, [LENGTH] * ROWS, state)
        results.append(sampler.to_result(found))
    ours, theirs = results
    assert ours.tokens == theirs.tokens
    assert ours.errors == theirs.errors
    assert ours.generation_logits == theirs.generation_logits
    asked = any(p.log_probs for p in parameters)
    assert bool(ours.log_probs) == asked
    if asked:
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=2e-5)
    assert ours.top_log_probs.keys() == theirs.top_log_probs.keys()
    for index, pairs in theirs.top_log_probs.items():
        assert [token for token, _ in ours.top_log_probs[index]] == [token for token, _ in pairs]
        values = [value for _, value in ours.top_log_probs[index]]
        assert values == pytest.approx([value for _, value in pairs], abs=2e-5)


@pytest.mark.parametrize(
    ("values", "error"),
    [(float("nan"), "not finite"), (float("inf"), "not finite"), (float("-inf"), "no token")],
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0}])
def test_logits_that_are_not_finite_are_reported(values, error, sampling):
    state = prepared([SamplingParams(**sampling)] * ROWS, on_device=False)
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    logits[1] = values
    found = sampler.to_result(sampler.sample(logits, [0, 1], [LENGTH] * 2, state))
    assert found.errors.keys() == {1}
    assert error in found.errors[1]


def test_a_row_with_drafts_has_a_mask_for_each_sample():
    state = prepared([SamplingParams()] * ROWS, on_device=False)
    state.masks = {4: mask_of(1) + mask_of(2)}
    logits = np.random.default_rng(1).standard_normal((3, VOCAB)).astype(np.float32)
    found = sampler.sample(logits.copy(), [4, 0, 4], [LENGTH] * 3, state).tokens.tolist()
    expected = []
    for line, row in ((0, 1), (2, 2)):
        bits = np.unpackbits(np.frombuffer(mask_of(row), np.uint8), bitorder="little")[:VOCAB]
        expected.append(int(np.where(bits, logits[line], -np.inf).argmax()))
    assert [found[0], found[2]] == expected
    assert found[1] == logits[1].argmax()


def test_prompt_scores_are_those_of_torch():
    p = SamplingParams(
        prompt_log_probs=True, top_prompt_log_probs=4, prompt_ranks=True, context_logits=True
    )
    logits = torch.randn(PROMPT, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    scores = []
    for on_device in (False, True):
        state = prepared([p] * ROWS, on_device)
        counts = np.array([PROMPT])
        selection = select_logits([2], np.array([0]), counts, np.array([False]), state, [0])
        if on_device:
            found = to_host(torch_prompt_logits(logits, selection, state))
        else:
            found = prompt_logits(logits.numpy(), selection, state)
        scores.append(to_scores(found)[0])
    ours, theirs = scores
    assert ours.context_logits == theirs.context_logits
    assert ours.prompt_ranks == theirs.prompt_ranks
    assert len(ours.prompt_ranks) == PROMPT - 1
    assert ours.prompt_log_probs == pytest.approx(theirs.prompt_log_probs, abs=2e-5)
    for mine, other in zip(ours.top_prompt_log_probs, theirs.top_prompt_log_probs, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in other]
        assert [value for _, value in mine] == pytest.approx([v for _, v in other], abs=2e-5)

"""Draws from candidates that compiled code found, compared with draws from the whole vocabulary."""

import numpy as np
import pytest
from cpu_steps import best_level, new_team

from slipstream.engine import sampler
from slipstream.engine.cpu import candidates
from slipstream.engine.cpu.candidates import CandidateFinder
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.cpu.compiler.instruction_levels import possible_levels
from slipstream.kernels.cpu.machine import read_cpu
from slipstream.kernels.sampling import noise_key

PARAMETERS = [
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 0.9, "top_k": 1},
    {"temperature": 0.9, "top_k": 40},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "typical_p": 0.5},
    {"temperature": 1.0, "top_k": 50, "typical_p": 0.5},
]


@pytest.fixture(scope="module", params=possible_levels(read_cpu()[1]), ids=lambda level: level.name)
def finder(request):
    team = new_team(2, request.param)
    yield CandidateFinder(team)
    team.close()


@pytest.fixture(scope="module")
def best():
    team = new_team(3, best_level())
    yield CandidateFinder(team)
    team.close()


def draws_of(parameters, rows):
    p = SamplingParams(max_tokens=1, **parameters)
    return [sampler.Draw(row, p, p.top_p, noise_key(row, 7)) for row in range(rows)]


def logits_like_those_of_a_model(rows, vocabulary, sharpness=3.0):
    chance = np.random.default_rng(vocabulary)
    logits = sharpness * chance.standard_normal((rows, vocabulary), dtype=np.float32)
    logits[:, chance.integers(0, vocabulary, 5)] += 12
    return logits


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("vocabulary", [49152, 1003])
def test_the_tokens_are_those_of_numpy(finder, parameters, vocabulary):
    logits = logits_like_those_of_a_model(24, vocabulary)
    logits[3, 10:] = -np.inf  # a grammar leaves few tokens
    logits[4, 5:50] = logits[4].max()  # equal ones
    draws = draws_of(parameters, len(logits))
    expected = [sampler._draw(logits[draw.sample], draw, None) for draw in draws]
    found = finder(logits, draws)
    tokens = [
        sampler._draw(logits[draw.sample], draw, one)
        for draw, one in zip(draws, found, strict=True)
    ]
    assert tokens == expected
    sizes = [len(one.tokens) for one in found if one is not None]
    if parameters["temperature"] <= 1 and ("typical_p" not in parameters or "top_k" in parameters):
        assert len(sizes) > 12
        assert min(sizes) < 60


def test_a_flat_distribution_is_left_to_numpy(best):
    logits = np.zeros((2, 40_000), dtype=np.float32)
    assert best(logits, draws_of({"temperature": 1.0, "top_p": 0.9}, 2)) == [None, None]
    assert best(logits, draws_of({"temperature": 1.0}, 2)) == [None, None]


def test_rows_of_a_wider_array_are_read_in_place(best):
    wide = np.full((6, 520), 1e9, dtype=np.float32)
    wide[:, :500] = logits_like_those_of_a_model(6, 500)
    draws = draws_of({"temperature": 0.8, "top_k": 5}, 6)[::2]  # not all rows are drawn
    for draw, found in zip(draws, best(wide[:, :500], draws), strict=True):
        row = wide[draw.sample, :500]
        places = np.argsort(-row, kind="stable")[:5]
        assert set(places) <= set(found.tokens)
        scaled = row[found.tokens] / np.float32(0.8)
        assert np.array_equal(found.scaled, scaled)
        total = np.exp((row / 0.8).astype(np.float64)).sum()
        assert found.mass == pytest.approx(np.log(total), abs=1e-5)


def test_many_rows_grow_the_memory(best):
    logits = logits_like_those_of_a_model(70, 300)
    draws = draws_of({"temperature": 0.9, "top_p": 0.6}, 70)
    assert all(one is not None for one in best(logits, draws))
    assert len(best(logits[:1], draws[:1])) == 1
    assert candidates._MOST > 300

"""The likeliest tokens of ranks that exchange one logit each, against an argmax of all logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from thread_ranks import ThreadRanks, on_ranks

from slipstream.model.head import Head
from slipstream.model.linear import Tensors
from slipstream.model.spec import ModelSpec

VOCABULARY = 515  # the last rank has fewer tokens
HIDDEN = 64
SPEC = ModelSpec("LlamaForCausalLM", VOCABULARY, HIDDEN, 2, 8, 4, 16, 96, 256)


def head_of(weight: torch.Tensor, ranks: ThreadRanks) -> Head:
    own = SPEC.vocabulary_of(ranks.rank, ranks.size)
    tensors = {"lm_head.weight": weight[own.start : own.stop].clone()}
    source = Tensors(tensors, torch.float32, torch.device("cpu"))
    return Head(SPEC, source, torch.zeros(VOCABULARY, HIDDEN), ranks)


def best_of(weight: torch.Tensor, x: torch.Tensor, size: int) -> list[tuple[np.ndarray, ...]]:
    """Return each rank's tokens and logits, and the logits of all tokens."""

    def run(ranks: ThreadRanks) -> tuple[np.ndarray, ...]:
        head = head_of(weight, ranks)
        best, tokens = head.best_tokens(x)
        return tokens.numpy(), best.numpy(), head(x).numpy()

    return on_ranks(size, run)


def check(found: list[tuple[np.ndarray, ...]]) -> None:
    for tokens, best, logits in found:
        # as the sampler takes them
        expected = np.array([line.argmax() for line in logits])
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_array_equal(best, logits[np.arange(len(expected)), expected])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tokens_are_those_of_all_logits(size):
    torch.manual_seed(size)
    check(best_of(torch.randn(VOCABULARY, HIDDEN), torch.randn(7, HIDDEN), size))


@pytest.mark.parametrize("size", [2, 4])
def test_of_equal_logits_the_lowest_token_is_taken(size):
    weight = torch.zeros(VOCABULARY, HIDDEN)
    weight[[130, 300, 514]] = 1.0
    x = torch.stack((torch.ones(HIDDEN), -torch.ones(HIDDEN), torch.zeros(HIDDEN)))
    found = best_of(weight, x, size)
    check(found)
    assert found[0][0].tolist() == [130, 0, 0]


@pytest.mark.parametrize("token", [3, 300, 514])
def test_a_row_that_is_not_finite_is_reported_by_every_rank(token):
    weight = torch.ones(VOCABULARY, HIDDEN)
    weight[token] = float("nan")
    found = best_of(weight, torch.ones(2, HIDDEN), 2)
    check(found)
    for tokens, best, _ in found:
        assert np.isnan(best).all()
        assert tokens.tolist() == [token, token]


def test_logits_of_minus_infinity_give_the_first_token():
    weight = torch.full((VOCABULARY, HIDDEN), float("-inf"))
    check(best_of(weight, torch.ones(1, HIDDEN), 2))

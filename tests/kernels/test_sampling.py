"""Drawing tokens: the right distribution, the same draw in any batch, filters as in transformers."""

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from slipstream.engine.gpu.sampler import Likeliest
from slipstream.kernels import sampling as in_numpy
from slipstream.kernels.gpu.sampling import in_torch

VOCAB = 300


class RowByRow:
    """The draws of a CPU, called as those of torch are."""

    @staticmethod
    def draw_from_all(logits, temperature, min_p, keys, typical_p=None):
        rows = len(logits)
        least = torch.zeros(rows, 1) if min_p is None else min_p
        typical = torch.ones(rows, 1) if typical_p is None else typical_p
        parameters = torch.cat([temperature, least, typical], dim=1).tolist()
        return torch.tensor(
            [
                in_numpy.draw_from_all(line, warmth, minimum, key, mass)
                for line, (warmth, minimum, mass), [key] in zip(
                    logits.numpy(), parameters, keys.tolist(), strict=True
                )
            ]
        )

    @staticmethod
    def draw_narrowed(logits, temperature, top_k, top_p, min_p, keys, widest, typical_p=None):
        typical = torch.ones(len(logits), 1) if typical_p is None else typical_p
        parameters = torch.cat([temperature, top_p, min_p, typical], dim=1).tolist()
        return torch.tensor(
            [
                in_numpy.draw_narrowed(line, warmth, count, mass, minimum, key, typical_mass)
                for line, (warmth, mass, minimum, typical_mass), [count], [key] in zip(
                    logits.numpy(), parameters, top_k.tolist(), keys.tolist(), strict=True
                )
            ]
        )

    @staticmethod
    def keep_typical(scaled, typical_p):
        return torch.tensor(
            [
                in_numpy.keep_typical(line, mass).tolist() if mass < 1 else [True] * len(line)
                for line, [mass] in zip(scaled.numpy(), typical_p.tolist(), strict=True)
            ]
        )

    @staticmethod
    def gumbel(tokens, keys):
        return torch.stack(
            [torch.from_numpy(in_numpy.gumbel(tokens.numpy(), key)) for [key] in keys.tolist()]
        )


sampling = in_torch


@pytest.fixture(autouse=True, params=[RowByRow, in_torch], ids=["numpy", "torch"])
def implementation(request, monkeypatch):
    monkeypatch.setattr(f"{__name__}.sampling", request.param)


def test_both_implementations_draw_the_same_tokens():
    generator = torch.Generator().manual_seed(11)
    rows = 600
    logits = torch.randn(rows, 5000, generator=generator) * 2.5
    logits[::7, :300] = logits[::7, :1]  # equal logits
    chosen = torch.rand(rows, 4, generator=generator)
    temperature = 0.3 + 1.5 * chosen[:, :1]
    top_k = (chosen[:, 1:2] * 80).long()
    top_p = (0.2 + chosen[:, 2:3]).clamp(max=1.0)
    min_p = (chosen[:, 3:] - 0.5).clamp(min=0.0) * 0.2
    noise = keys(range(rows))
    for typical_p in (None, torch.full((rows, 1), 0.7)):
        arguments = (temperature, top_k, top_p, min_p, noise, 0, typical_p)
        expected = in_torch.draw_narrowed(logits, *arguments)
        assert RowByRow.draw_narrowed(logits, *arguments).tolist() == expected.tolist()
        expected = in_torch.draw_from_all(logits, temperature, min_p, noise, typical_p)
        found = RowByRow.draw_from_all(logits, temperature, min_p, noise, typical_p)
        assert found.tolist() == expected.tolist()
        assert len(set(expected.tolist())) > 300


def columns(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return (
        torch.full((rows, 1), temperature),
        torch.full((rows, 1), top_k),
        torch.full((rows, 1), top_p),
        torch.full((rows, 1), min_p),
    )


def draw(logits, temperature, top_k, top_p, min_p, keys):
    """Draw as the sampler does: rows with top-k or top-p, and rows without."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    filtered = ((top_k > 0) | (top_p < 1)).flatten()
    if filtered.any():
        widest = 0 if (top_k[filtered] == 0).any() else int(top_k[filtered].max())
        tokens[filtered] = sampling.draw_narrowed(
            logits[filtered],
            temperature[filtered],
            top_k[filtered],
            top_p[filtered],
            min_p[filtered],
            keys[filtered],
            widest,
        )
    if not filtered.all():
        tokens[~filtered] = sampling.draw_from_all(
            logits[~filtered], temperature[~filtered], min_p[~filtered], keys[~filtered]
        )
    return tokens


def keys(seeds, position=5):
    return torch.tensor([in_numpy.noise_key(seed, position) for seed in seeds])[:, None]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    expected = probabilities * counts.sum()
    kept = expected >= 5
    return float(((counts - expected) ** 2 / expected)[kept].sum()), int(kept.sum()) - 1


def test_draws_follow_the_softmax():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 2
    draws = 20000
    tokens = draw(logits.expand(draws, -1), *columns(draws, temperature=0.7), keys(range(draws)))
    statistic, freedom = chi_square(
        torch.bincount(tokens, minlength=40).double(), (logits[0] / 0.7).softmax(-1).double()
    )
    # Five standard deviations of the chi-square distribution: a wrong scale or noise is far
    # outside.
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_consecutive_positions_of_one_seed_are_independent():
    draws = 20000
    uniform = torch.zeros(1, 16)
    position_keys = torch.tensor([in_numpy.noise_key(123, p) for p in range(draws)])[:, None]
    tokens = draw(uniform.expand(draws, -1), *columns(draws), position_keys)
    pairs = torch.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256).double()
    statistic, freedom = chi_square(pairs, torch.full((256,), 1 / 256, dtype=torch.double))
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_draw_does_not_depend_on_the_batch():
    torch.manual_seed(2)
    logits = torch.randn(6, VOCAB) * 3
    settings = [
        torch.tensor(v)[:, None]
        for v in (
            [1.0, 0.5, 2.0, 1.0, 0.9, 1.3],
            [0, 5, 0, 20, 1, 0],
            [1.0, 1.0, 0.6, 0.9, 0.5, 1.0],
            [0.0, 0.0, 0.0, 0.1, 0.0, 0.2],
        )
    ]
    together = draw(logits, *settings, keys(range(6)))
    for row in range(6):
        alone = draw(logits[row : row + 1], *(s[row : row + 1] for s in settings), keys([row]))
        assert alone.tolist() == together[row : row + 1].tolist()


def test_filters_keep_the_tokens_that_transformers_keeps():
    torch.manual_seed(3)
    logits = torch.randn(1, VOCAB) * 3
    for temperature, top_k, top_p, min_p in [
        (1.0, 7, 1.0, 0.0),
        (0.8, 0, 0.6, 0.0),
        (1.5, 20, 0.7, 0.0),
        (1.0, 0, 0.95, 0.0),
        (1.0, 0, 1.0, 0.3),
        (0.7, 30, 0.9, 0.05),
    ]:
        warped = TemperatureLogitsWarper(temperature)(None, logits)
        if top_k:
            warped = TopKLogitsWarper(top_k)(None, warped)
        if top_p < 1:
            warped = TopPLogitsWarper(top_p)(None, warped)
        if min_p:
            warped = MinPLogitsWarper(min_p)(None, warped)
        probabilities = warped.softmax(-1)[0]
        draws = 4000
        tokens = draw(
            logits.expand(draws, -1),
            *columns(draws, temperature, top_k, top_p, min_p),
            keys(range(draws)),
        )
        assert set(tokens.tolist()) <= set(probabilities.nonzero().flatten().tolist())
        statistic, freedom = chi_square(
            torch.bincount(tokens, minlength=VOCAB).double(), probabilities.double()
        )
        assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1)) + 1e-9


def test_top_p_beyond_the_first_tokens_sorts_the_whole_vocabulary():
    vocab = 5000  # flat: the likeliest 1024 hold a fifth of the mass
    logits = torch.linspace(0, 0.1, vocab)[None]
    draws = 2000
    tokens = draw(logits.expand(draws, -1), *columns(draws, top_p=0.9), keys(range(draws)))
    kept = TopPLogitsWarper(0.9)(None, logits)[0].isfinite()
    assert kept[tokens].all()
    assert (tokens < vocab - 1024).float().mean() > 0.7


@pytest.mark.parametrize("mass", [1e-6, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_typical_p_keeps_the_tokens_that_transformers_keeps(mass, scale):
    torch.manual_seed(8)
    logits = torch.randn(64, VOCAB) * scale
    logits[:, :40] = -math.inf  # excluded before
    warped = TypicalLogitsWarper(mass)(None, logits)
    kept = sampling.keep_typical(logits, torch.full((64, 1), mass))
    assert (kept & logits.isfinite()).tolist() == warped.isfinite().tolist()
    own = logits.masked_fill(~kept, -math.inf).softmax(-1)
    assert torch.equal(own, warped.softmax(-1))


def test_typical_p_of_one_keeps_all_tokens_beside_rows_that_have_another():
    logits = torch.randn(2, VOCAB) * 3
    kept = sampling.keep_typical(logits, torch.tensor([[1.0], [0.3]]))
    assert kept[0].all()
    assert kept[1].sum() < VOCAB


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (40, 0.9, 0.0), (0, 1.0, 0.02)]
)
def test_draws_with_typical_p_follow_transformers(top_k, top_p, min_p):
    torch.manual_seed(4)
    logits = torch.randn(1, VOCAB) * 2
    warped = TemperatureLogitsWarper(1.3)(None, logits)
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    if min_p:
        warped = MinPLogitsWarper(min_p)(None, warped)
    probabilities = TypicalLogitsWarper(0.6)(None, warped).softmax(-1)[0]
    draws = 4000
    rows = logits.expand(draws, -1)
    temperature, k, p, least = columns(draws, 1.3, top_k, top_p, min_p)
    typical_p = torch.full((draws, 1), 0.6)
    if top_k:
        tokens = sampling.draw_narrowed(
            rows, temperature, k, p, least, keys(range(draws)), top_k, typical_p
        )
    else:
        tokens = sampling.draw_from_all(rows, temperature, least, keys(range(draws)), typical_p)
    assert set(tokens.tolist()) <= set(probabilities.nonzero().flatten().tolist())
    statistic, freedom = chi_square(
        torch.bincount(tokens, minlength=VOCAB).double(), probabilities.double()
    )
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1)) + 1e-9


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.4), (200, 0.5)])
def test_other_rows_do_not_change_which_of_equal_logits_are_kept(top_k, top_p):
    logits = torch.zeros(40, 3000)
    logits[:, 700:1300] = 4.0  # 600 equal logits; a part of them is kept
    alone = [
        draw(logits[:1], *columns(1, top_k=top_k, top_p=top_p), keys([seed])).item()
        for seed in range(40)
    ]
    _, k, p, _ = parameters = columns(40, top_k=top_k, top_p=top_p)
    for neighbour in ((900, 1.0), (0, 0.99)):
        k[1::2], p[1::2] = neighbour
        together = draw(logits, *parameters, keys([seed // 2 for seed in range(40)]))
        assert together[::2].tolist() == alone[:20]
    assert max(alone) < 700 + 300  # those with the lowest ids


def test_noise_is_finite_for_every_token_of_a_large_vocabulary():
    """One hash in 2**24 used to give infinite noise, so that a token was drawn at random."""
    tokens = torch.arange(50_000)
    keys = torch.tensor([[in_numpy.noise_key(7, position)] for position in range(40)])
    for some in keys.split(10):
        assert sampling.gumbel(tokens, some).isfinite().all()
    # the key whose hash of token 0 has all bits set
    largest = torch.tensor([[_key_of_largest_noise()]])
    noise = sampling.gumbel(torch.tensor([0]), largest)
    assert noise.item() == pytest.approx(16.6, abs=0.1)
    logits = torch.tensor([[-math.inf, 1.0]])
    assert sampling.draw_from_all(logits, torch.ones(1, 1), None, largest).tolist() == [1]


def _key_of_largest_noise() -> int:
    """Return the key for which the hash of token 0 is 2**32 - 1; token 0 hashes to 0."""

    def unshift(value: int, bits: int) -> int:
        found = value
        for _ in range(32 // bits + 1):
            found = value ^ (found >> bits)
        return found

    value = unshift(0xFFFFFFFF, 16)
    value = unshift(value * pow(0x846CA68B, -1, 2**32) % 2**32, 15)
    return unshift(value * pow(0x7FEB352D, -1, 2**32) % 2**32, 16)


def test_the_likeliest_tokens_of_many_rows_are_listed_in_order():
    values = [[-1.0, -0.5, -3.0, -math.inf], [-2.0, -2.0, -0.1, -4.0], [-9.0, -9.0, -9.0, -9.0]]
    tokens = torch.tensor([[5, 6, 7, 0], [1, 2, 3, 4], [8, 8, 8, 8]], dtype=torch.int32)
    top = torch.stack([tokens.view(torch.float32), torch.tensor(values)], dim=1)
    # results 4 and 0 are of samples 0 and 1; sample 2 reports nothing
    found = Likeliest({4: (0, 2), 0: (1, 3)}, top).to_lists()
    rounded = {index: [(t, round(v, 3)) for t, v in pairs] for index, pairs in found.items()}
    assert rounded == {4: [(6, -0.5), (5, -1.0)], 0: [(3, -0.1), (1, -2.0), (2, -2.0)]}

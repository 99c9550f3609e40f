"""Norms in 16 bits: computed in float32, rounded once."""

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from slipstream.kernels.normalisation import Norm, normalise
from slipstream.kernels.rotary import rotate_write


def half_a_step(exact):
    """Return half a step of bfloat16 at this magnitude, plus float32's own error."""
    return torch.exp2(torch.frexp(exact).exponent - 9.0) + 1e-6


@pytest.mark.parametrize("layer_norm", [False, True])
def test_a_norm_in_16_bits_is_off_by_one_rounding_only(layer_norm):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 576) * 3, torch.randn(576)
    bias = torch.randn(576) if layer_norm else None
    got = normalise(x, Norm(weight, bias, 1e-5, dtype=torch.bfloat16))
    assert got.dtype == torch.bfloat16
    centred = x.double() - (x.double().mean(-1, keepdim=True) if layer_norm else 0)
    exact = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + (
        0 if bias is None else bias
    )
    assert bool(((got - exact).abs() <= half_a_step(exact)).all())


def test_gemmas_norm_adds_one_to_its_weight_in_float32():
    torch.manual_seed(0)
    oracle = GemmaRMSNorm(256, eps=1e-6).bfloat16()
    torch.nn.init.normal_(oracle.weight, std=0.02)
    x = torch.randn(200, 256).bfloat16()
    expected = oracle(x)
    weight = oracle.weight.detach().float() + 1.0
    got = normalise(x.float(), Norm(weight, None, 1e-6, dtype=torch.bfloat16))
    # the others are close to the middle between two bfloat16 numbers
    assert (got == expected).float().mean() > 0.999
    rounded = normalise(
        x.float(), Norm(weight.bfloat16().float(), None, 1e-6, dtype=torch.bfloat16)
    )
    assert (rounded == expected).float().mean() < 0.9


def test_queries_and_keys_keep_their_type_with_float32_norm_weights():
    torch.manual_seed(0)
    heads, cache = torch.randn(3, 4, 16).bfloat16(), torch.zeros(2, 1, 8, 16, dtype=torch.bfloat16)
    at = torch.arange(3)
    weight = torch.rand(16) + 0.5
    queries = rotate_write(heads, at, at, None, weight, weight, 1e-6, *cache)
    exact = (
        heads[:, :2].double()
        / (heads[:, :2].double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        * weight
    )
    assert queries.dtype == torch.bfloat16
    assert bool(((queries - exact).abs() <= half_a_step(exact)).all())

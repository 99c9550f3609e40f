"""The private operations of torch exist and compute what their adapter says."""

import torch
from torch.nn import functional

from slipstream.kernels.torch_private import (
    int4_linear,
    int8_linear,
    pack_int4_weight,
    pack_linear_weight,
    packed_linear,
)

TOKENS = 3
OUT = 64
IN = 128
GROUP = 32


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def test_packed_bf16_linear_equals_the_public_one():
    x = draw(TOKENS, IN)
    weight = draw(OUT, IN)
    bias = draw(OUT)
    found = packed_linear(x, pack_linear_weight(weight), bias)
    torch.testing.assert_close(found, functional.linear(x, weight, bias), rtol=0.02, atol=0.1)


def test_int8_linear_multiplies_rows_by_their_scales():
    x = draw(TOKENS, IN)
    weight = torch.arange(OUT * IN).reshape(OUT, IN).remainder(255).sub(127).to(torch.int8)
    scales = draw(OUT).abs() / 100
    expected = x.float() @ (weight.float() * scales.float()[:, None]).T
    found = int8_linear(x, weight, scales)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.5)


def test_int4_linear_scales_and_shifts_groups_of_inputs():
    x = draw(TOKENS, IN)
    values = torch.arange(OUT * IN).reshape(OUT, IN).remainder(16).to(torch.int32)
    pairs = draw(IN // GROUP, OUT, 2)
    scales = pairs[..., 0].T.float().repeat_interleave(GROUP, 1)
    offsets = pairs[..., 1].T.float().repeat_interleave(GROUP, 1)
    expected = x.float() @ ((values.float() - 8) * scales + offsets).T
    found = int4_linear(x, pack_int4_weight(values), GROUP, pairs)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=4.0)


def test_the_fp8_operation_exists():
    assert callable(torch._scaled_mm)

"""Stored weights in the types that a CPU computes in, compared with torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.blocks import matrix_of
from slipstream.kernels.stored import StoredArray, round_to_bfloat16, to_bfloat16, to_float32


def test_bfloat16_is_rounded_as_torch_rounds():
    bits = np.random.default_rng(1).integers(0, 2**32, 300_000, dtype=np.uint32)
    # ties, infinities, the largest numbers, zeros
    bits[:8] = [0x3F808000, 0x3F818000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0, 1 << 31, 0x7FC00001]
    values = bits.view(np.float32)
    found = torch.from_numpy(round_to_bfloat16(values)).view(torch.bfloat16)
    expected = torch.from_numpy(values.copy()).bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    both = ~expected.isnan()
    assert torch.equal(found.view(torch.int16)[both], expected.view(torch.int16)[both])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (1000, 33)])
def test_numbers_are_converted_as_torch_converts(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    code = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    array = tensor.view(torch.uint16).numpy() if code == "BF16" else tensor.numpy()
    weight = StoredArray(code, array)
    assert torch.equal(torch.from_numpy(to_float32(weight)), tensor.float())
    halved = torch.from_numpy(to_bfloat16(weight)).view(torch.bfloat16)
    assert torch.equal(halved, tensor.bfloat16())
    assert np.shares_memory(to_bfloat16(weight), array) == (code == "BF16")
    assert np.shares_memory(to_float32(weight), array) == (code == "F32")


def test_blocks_are_expanded():
    raw = np.random.default_rng(1).integers(0, 60, (90, 2 * 34), dtype=np.uint8)
    matrix = matrix_of([("Q8_0", raw[:40]), ("Q8_0", raw[40:])])
    expected = torch.from_numpy(np.concatenate(list(matrix.expand())))
    assert torch.equal(torch.from_numpy(to_float32(matrix)), expected)
    halved = torch.from_numpy(to_bfloat16(matrix)).view(torch.bfloat16)
    assert torch.equal(halved, expected.bfloat16())


def test_quantised_numbers_are_refused():
    with pytest.raises(ValueError, match="weights of type I8 have no values"):
        to_float32(StoredArray("I8", np.zeros((2, 2), np.int8)))

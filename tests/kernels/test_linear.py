"""Products with stored weights against the plain product with the weights they stand for."""

import pytest
import torch

from slipstream.kernels import linear
from slipstream.model.linear import Tensors

SHAPES = [(64, 64), (96, 128), (160, 192), (50, 64)]
TOKENS = [1, 3, 8, 100]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_dense(outputs, inputs, tokens, bias, dtype, tolerance):
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(tokens, inputs).to(dtype)
    offset = torch.randn(outputs).to(dtype) if bias else None
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    )
    assert relative_error(linear.dense(weight, offset)(x), expected) < tolerance


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8(outputs, inputs, tokens, dtype):
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scales, bias = torch.rand(outputs) / 100, torch.randn(outputs).to(dtype)
    x = torch.randn(tokens, inputs).to(dtype)
    expected = x.double() @ (weight.double() * scales.double()[:, None]).t() + bias.double()
    assert relative_error(linear.int8(weight, scales, bias, dtype)(x), expected) < 1e-2


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4(outputs, inputs, tokens, dtype):
    torch.manual_seed(0)
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    weight = values[:, ::2] | (values[:, 1::2] << 4)
    scales = torch.rand(outputs, inputs // 32, 2).bfloat16().float() / 8
    scale, offset = scales.double().repeat_interleave(32, dim=1).unbind(-1)
    meant = (values.double() - 8) * scale + offset
    assert torch.allclose(
        linear.expand_int4(weight, scales, torch.float32).double(), meant, atol=1e-5
    )
    x = torch.randn(tokens, inputs).to(dtype)
    assert (
        relative_error(linear.int4(weight, scales, None, dtype)(x), x.double() @ meant.t()) < 1e-2
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "capability", "expected"),
    [
        ((64, 32), torch.bfloat16, "cuda", (9, 0), True),
        ((64, 32), torch.bfloat16, "cuda", (8, 9), False),  # the library takes no scale a row there
        ((64, 32), torch.float16, "cuda", (9, 0), False),
        ((64, 32), torch.bfloat16, "cpu", (9, 0), False),
        ((72, 32), torch.bfloat16, "cuda", (9, 0), False),  # nor sizes that are no multiples of 16
        ((64, 40), torch.bfloat16, "cuda", (10, 0), False),
    ],
)
def test_products_in_eight_bits_need_sizes_and_devices_that_take_them(
    monkeypatch, shape, dtype, device, capability, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    weight = torch.zeros(shape).to(torch.float8_e4m3fn)
    assert linear.multiplies_eight_bits(weight, dtype, torch.device(device)) is expected
    source = Tensors(
        {"fc.weight": weight, "proj.weight": weight.to(dtype)}, dtype, torch.device(device)
    )
    assert source.takes_eight_bits("fc") is expected
    assert not source.takes_eight_bits("proj")
    in_16_bits = Tensors({"fc.weight": weight}, dtype, torch.device(device), eight_bit_inputs=False)
    assert not in_16_bits.takes_eight_bits("fc")


def test_a_quantised_weight_is_not_shown_as_a_dense_one():
    weight = torch.randn(4, 8)
    for stored in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        source = Tensors({"head.weight": weight.to(stored)}, torch.float32, torch.device("cpu"))
        assert source.peek("head.weight", (4, 8)) is None
    source = Tensors({"head.weight": weight.bfloat16()}, torch.float32, torch.device("cpu"))
    assert torch.equal(source.peek("head.weight", (4, 8)), weight.bfloat16().float())

"""Linear layers with stored weights, against a plain GEMM with the weights they stand for."""

import pytest
import torch

from slipstream.kernels import linear, linear_dispatch
from slipstream.model.linear import Tensors

SHAPES = [(64, 64), (96, 128), (160, 192), (50, 64)]
TOKENS = [1, 3, 8, 100]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_unquantised_layer_matches_float64(outputs, inputs, tokens, bias, dtype, tolerance):
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(tokens, inputs).to(dtype)
    offset = torch.randn(outputs).to(dtype) if bias else None
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    )
    assert relative_error(linear_dispatch.unquantised(weight, offset)(x), expected) < tolerance


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_layer_matches_float64(outputs, inputs, tokens, dtype):
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scales, bias = torch.rand(outputs) / 100, torch.randn(outputs).to(dtype)
    x = torch.randn(tokens, inputs).to(dtype)
    expected = x.double() @ (weight.double() * scales.double()[:, None]).t() + bias.double()
    assert relative_error(linear_dispatch.int8(weight, scales, bias, dtype)(x), expected) < 1e-2


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_layer_matches_float64(outputs, inputs, tokens, dtype):
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
        relative_error(linear_dispatch.int4(weight, scales, None, dtype)(x), x.double() @ meant.t())
        < 1e-2
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "capability", "expected"),
    [
        ((64, 32), torch.bfloat16, "cuda", (9, 0), True),
        ((64, 32), torch.bfloat16, "cuda", (8, 9), False),  # its library takes no scale per row
        ((64, 32), torch.float16, "cuda", (9, 0), False),
        ((64, 32), torch.bfloat16, "cpu", (9, 0), False),
        ((72, 32), torch.bfloat16, "cuda", (9, 0), False),  # not a multiple of 16
        ((64, 40), torch.bfloat16, "cuda", (10, 0), False),
    ],
)
def test_fp8_gemm_needs_bf16_multiples_of_16_and_hopper(
    monkeypatch, shape, dtype, device, capability, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    weight = torch.zeros(shape).to(torch.float8_e4m3fn)
    assert linear_dispatch.supports_fp8_gemm(weight, dtype, torch.device(device)) is expected
    source = Tensors(
        {"fc.weight": weight, "proj.weight": weight.to(dtype)}, dtype, torch.device(device)
    )
    assert source.takes_fp8_inputs("fc") is expected
    assert not source.takes_fp8_inputs("proj")
    in_16_bits = Tensors({"fc.weight": weight}, dtype, torch.device(device), fp8_inputs=False)
    assert not in_16_bits.takes_fp8_inputs("fc")


def test_peek_returns_unquantised_weights_only():
    weight = torch.randn(4, 8)
    for stored in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        source = Tensors({"head.weight": weight.to(stored)}, torch.float32, torch.device("cpu"))
        assert source.peek("head.weight", (4, 8)) is None
    source = Tensors({"head.weight": weight.bfloat16()}, torch.float32, torch.device("cpu"))
    assert torch.equal(source.peek("head.weight", (4, 8)), weight.bfloat16().float())


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 40])
def test_batch_invariant_layer_runs_a_fixed_number_of_tokens_at_a_time(tokens):
    torch.manual_seed(0)
    plain = linear.UnquantisedLinear(torch.randn(24, 64), torch.randn(24))
    called: list[int] = []

    class Recorded(linear.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            called.append(len(x))
            return plain(x)

    x = torch.randn(tokens, 64)
    got = Recorded().batch_invariant()(x)
    assert got.shape == (tokens, 24)
    assert set(called) <= ({16} if tokens else {0})
    assert torch.allclose(got, plain(x), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_layer_gives_a_token_the_same_bits_among_any_others(dtype):
    torch.manual_seed(0)
    layer = linear_dispatch.unquantised(torch.randn(96, 576).to(dtype), None).batch_invariant()
    x = torch.randn(40, 576).to(dtype)
    whole = layer(x)
    for first, last in [(0, 1), (7, 9), (3, 20), (39, 40)]:
        assert torch.equal(layer(x[first:last]), whole[first:last])

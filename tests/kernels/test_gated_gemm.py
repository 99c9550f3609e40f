"""The fused gated GEMM: against its torch reference, which weights it takes, and when it is used."""

import math
from types import SimpleNamespace

import pytest
import torch
from attention_steps import DEVICE, GPU

from slipstream.kernels import activation
from slipstream.kernels.gpu import activation as gpu_activation
from slipstream.kernels.gpu import gated_gemm as module
from slipstream.kernels.gpu import launch, linear
from slipstream.kernels.gpu.gated_gemm import gated_gemm
from slipstream.kernels.gpu.linear import GpuLinear
from slipstream.kernels.linear import Linear

DTYPE = torch.bfloat16 if GPU else torch.float16  # the interpreter does not know bfloat16


@pytest.mark.parametrize(
    ("tokens", "size", "columns"),
    [(1, 128, 64), (130, 256, 128), (300, 384, 64)]
    + ([(1500, 14336, 4096), (8192, 3072, 1024)] if GPU else []),
)
def test_gated_gemm_matches_gemm_then_gate(tokens, size, columns):
    """Tokens beyond the last are not a number: the last tiles must not read them."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(tokens, columns).to(DTYPE),
        (torch.randn(2 * size, columns) / columns**0.5).to(DTYPE),
    )
    around = torch.full((tokens + 128, columns), math.nan, dtype=DTYPE, device=DEVICE)
    around[:tokens] = x
    exact = activation.silu_gated(
        torch.nn.functional.linear(x.to(DEVICE).float(), weight.to(DEVICE).float())
    )
    got = gated_gemm(around[:tokens], weight.to(DEVICE))
    assert got.shape == (tokens, size)
    assert (got.float() - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize("sm_count", [1, 3])
def test_tiles_beyond_a_band_and_several_ctas(monkeypatch, sm_count):
    """The sums are exact, so the results equal the gate's bit by bit."""
    monkeypatch.setattr(module, "sm_count", lambda device: sm_count)
    torch.manual_seed(0)
    x, weight = torch.randint(-8, 9, (1100, 64)) / 8, torch.randint(-8, 9, (512, 64)) / 8
    got = gated_gemm(x.to(DEVICE, DTYPE), weight.to(DEVICE, DTYPE))
    assert torch.equal(got, gpu_activation.silu_gated((x @ weight.t()).to(DEVICE, DTYPE)))


def test_no_more_ctas_than_tiles(monkeypatch):
    launched = []

    class Launched:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: launched.append((grid, arguments[3:]))

    monkeypatch.setattr(module, "sm_count", lambda device: 4)
    monkeypatch.setattr(module, "_gated_gemm", Launched())
    gated_gemm(torch.empty(130, 64), torch.empty(256, 64))
    assert launched == [((2,), (130, 128, 64, 2))]


@pytest.mark.parametrize(
    ("tokens", "rows", "worth"),
    [
        (1024, 28672, True),
        (896, 28672, True),
        (832, 28672, False),
        (1280, 28672, False),
        (2047, 22016, False),
        (2048, 22016, True),
        (768, 22016, True),
        (766, 22016, True),
        (740, 22016, False),
        (0, 28672, False),
        (2048, 3072, False),
        (8192, 3072, True),
    ],
)
def test_gated_gemm_is_used_where_tiles_fill_132_sms(monkeypatch, tokens, rows, worth):
    monkeypatch.setattr(module, "sm_count", lambda device: 132)
    assert module.is_faster(tokens, torch.empty(rows, 1)) is worth


@pytest.mark.parametrize(
    ("shape", "dtype", "major", "shared", "address", "takes"),
    [
        ((512, 128), torch.bfloat16, 9, 232_448, 64, True),
        ((384, 128), torch.bfloat16, 9, 232_448, 64, False),
        ((512, 96), torch.bfloat16, 9, 232_448, 64, False),
        ((512, 128), torch.float32, 9, 232_448, 64, False),
        ((512, 128), torch.bfloat16, 10, 232_448, 64, False),
        ((512, 128), torch.bfloat16, 8, 232_448, 64, False),
        ((512, 128), torch.bfloat16, 9, 166_912, 64, False),
        ((512, 128), torch.bfloat16, 9, 232_448, 8, False),
    ],
)
def test_supported_weights(monkeypatch, shape, dtype, major, shared, address, takes):
    weight = SimpleNamespace(
        shape=shape,
        is_cuda=True,
        device="cuda",
        element_size=lambda: dtype.itemsize,
        is_contiguous=lambda: True,
        data_ptr=lambda: address,
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(module, "shared_memory", lambda device: shared)
    assert module.supports_gated_gemm(weight) is takes
    weight.is_contiguous = lambda: False
    assert not module.supports_gated_gemm(weight)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_without_bias_uses_gated_gemm(monkeypatch, bias):
    torch.manual_seed(0)
    monkeypatch.setattr(linear, "supports_gated_gemm", lambda weight: True)
    monkeypatch.setattr(linear, "is_faster", lambda tokens, weight: tokens >= 100)
    monkeypatch.setattr(linear, "silu_gated", lambda y: "two kernels")
    x = torch.randn(64, 100, dtype=DTYPE, device=DEVICE).t()
    weight = torch.randn(256, 64, dtype=DTYPE, device=DEVICE)
    layer = GpuLinear(weight, torch.zeros(256, dtype=DTYPE, device=DEVICE) if bias else None)
    if bias:
        assert layer.gated(x) == "two kernels"
    else:
        assert torch.equal(layer.gated(x), gated_gemm(x.contiguous(), weight))
    assert layer.gated(x[:99]) == "two kernels"


@pytest.mark.parametrize(
    ("takes", "bias", "calls"), [(True, False, [1]), (True, True, []), (False, False, [])]
)
def test_prepare_gate_compiles_supported_weights_only(monkeypatch, takes, bias, calls):
    called = []
    monkeypatch.setattr(linear, "supports_gated_gemm", lambda weight: takes)
    monkeypatch.setattr(linear, "gated_gemm", lambda x, weight: called.append(x.shape[0]))
    GpuLinear(torch.zeros(256, 64), torch.zeros(256) if bias else None).prepare_gate()
    Linear().prepare_gate()  # a CPU layer compiles nothing
    assert called == calls


def test_launch_cache_tells_descriptors_apart_by_type_and_block():
    from triton.tools.tensor_descriptor import TensorDescriptor

    kinds = {
        launch._kind(TensorDescriptor.from_tensor(torch.empty(256, 64, dtype=dtype), block))
        for dtype in (torch.float16, torch.bfloat16)
        for block in ([128, 64], [64, 64])
    }
    assert len(kinds) == 4

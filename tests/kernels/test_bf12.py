"""bfloat16 weights in 12 bits: the same numbers, and GEMMs with them. Without a GPU the kernels run
in Triton's interpreter.
"""

import math
import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are defined

pytest.importorskip(
    "triton", reason="the kernels need Triton, which a CPU installation of torch does not bring"
)

from slipstream.kernels import bf12, linear  # noqa: E402
from slipstream.kernels.gpu import linear as gpu_linear  # noqa: E402
from slipstream.kernels.gpu.gemv import fused_gemv, gemv  # noqa: E402
from slipstream.kernels.gpu.linear import Fp32OutputLinear, GpuLinear  # noqa: E402
from slipstream.kernels.gpu.skinny_gemm import _tiling, skinny_gemm  # noqa: E402
from slipstream.kernels.normalisation import Norm  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32  # the interpreter does not know bfloat16


def trained(rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(rows, columns) * 0.02).bfloat16()


def test_pack_and_unpack_keep_the_numbers():
    weight = trained(300, 1024)
    weight[3], weight[4, 5], weight[9, 0] = 0, 0, -0.0
    weight[5] *= 1e-30
    weight[8] *= 1e36
    weight[10] = 1e-40  # below float's normal numbers
    packed = bf12.pack(weight)
    assert packed.words.dtype == torch.int16
    assert packed.words.shape == (300, 768)
    assert packed.words.nbytes * 4 == weight.nbytes * 3
    exact, got = weight.float(), bf12.unpack(packed)
    largest = exact.abs().amax(1, keepdim=True)
    assert torch.equal(got[exact.abs() >= largest * 2**-14], exact[exact.abs() >= largest * 2**-14])
    assert bool(((got - exact).abs() <= largest * 2**-22).all())
    assert (got != exact).float().mean() < 1e-3
    assert not got[3].any()


def test_smallest_numbers_are_rounded_to_the_nearest():
    weight = torch.full((1, 256), 2.0**-20).bfloat16()
    weight[0, :4] = torch.tensor([1.0, 2**-14, 2**-14 * 1.5, 2**-21 * 1.5])
    weight[0, 4:250] = 0.5
    got = bf12.unpack(bf12.pack(weight))[0]
    # a multiple of 2^-21, three quarters of it up
    assert got[:4].tolist() == [1.0, 2**-14, 2**-14 * 1.5, 2**-20]
    assert got[250].item() == 2**-20


@pytest.mark.parametrize("largest", [0, 1, 14, 15, 16, 127, 254])
def test_every_bfloat16_number_below_a_largest(largest, monkeypatch):
    """All of bfloat16's numbers up to an exponent: exact from 2^-14 of the largest on, the others
    to the nearest.
    """
    monkeypatch.setattr(bf12, "_MAX_LOSING", 1.0)
    bits = torch.arange(65536)
    bits = bits[(bits >> 7 & 0xFF) <= largest][None].short()  # those from 2^15 on wrap around
    exact = bits.view(torch.bfloat16).double()
    packed = bf12.pack(bits.view(torch.bfloat16))
    got, most = bf12.unpack(packed).double(), exact.abs().amax()
    assert packed.scales.tolist() == [2.0 ** (max(largest, 15) - 127)]
    assert torch.equal(got[exact.abs() >= most * 2**-14], exact[exact.abs() >= most * 2**-14])
    assert torch.equal(torch.signbit(got), torch.signbit(exact))
    assert bool(((got - exact).abs() <= 2.0 ** (largest - 127 - 22)).all())


@pytest.mark.parametrize(("losing", "packed"), [(8, True), (9, False)])
def test_one_number_in_32_may_lose_bits(losing, packed):
    weight = torch.ones(2, 256).bfloat16()
    weight[1, :losing] = 2**-15 * 1.0078125  # its last bit is lost
    weight[1, losing:20] = 2**-15  # these lose none
    assert (bf12.pack(weight) is not None) == packed


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_infinity_and_nan_are_not_packed_even_among_zeros(number):
    weight = torch.zeros(3, 256).bfloat16()
    weight[2, 5] = number
    assert bf12.pack(weight) is None


@pytest.mark.parametrize("number", [1e4, math.inf, -math.inf, math.nan])
def test_a_row_far_from_its_largest_number_is_not_packed(number):
    weight = trained(256, 1024)
    weight[7, 3] = number
    assert bf12.pack(weight) is None


def test_pieces_are_packed_as_the_whole(monkeypatch):
    weight = trained(70, 512)
    whole = bf12.pack(weight)
    monkeypatch.setattr(bf12, "_SLICE", 512 * 16)
    pieces = bf12.pack(weight)
    assert torch.equal(pieces.words, whole.words)
    assert torch.equal(pieces.scales, whole.scales)
    weight[69, 0] = math.nan  # in the last piece, which is smaller
    assert bf12.pack(weight) is None


@pytest.mark.parametrize(
    ("dtype", "columns"), [(torch.float16, 256), (torch.float32, 256), (torch.bfloat16, 320)]
)
def test_packs_bfloat16_with_multiples_of_256_columns(dtype, columns):
    assert not bf12.can_pack(torch.zeros(128, columns, dtype=dtype))
    assert bf12.can_pack(torch.zeros(1, 256, dtype=torch.bfloat16))


def case(tokens: int, rows: int, size: int, bias: bool):
    """Return activations, a packed weight and a bias on the device, the exact result, and the sum
    of its terms' magnitudes.
    """
    weight = trained(rows, size)
    weight[rows // 2] *= 2.0**9  # rows have scales of their own
    packed = bf12.pack(weight)
    x = torch.randn(tokens, size).to(DTYPE)
    offset = torch.randn(rows).to(DTYPE) if bias else None
    expected = (
        exact_linear(x, weight, offset),
        exact_linear(x.abs(), weight.abs(), None if offset is None else offset.abs()),
    )
    return (
        x.to(DEVICE),
        *(t.to(DEVICE) for t in packed),
        offset.to(DEVICE) if bias else None,
        expected,
    )


def exact_linear(
    x: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor | None
) -> torch.Tensor:
    return torch.nn.functional.linear(
        x.double(), weight.double(), None if offset is None else offset.double()
    )


def close(got: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    tolerance = 2**-9 if got.dtype == torch.bfloat16 else 1e-6
    return bool(((got.double().cpu() - expected[0]).abs() <= tolerance * expected[1]).all())


@pytest.mark.parametrize(("rows", "size"), [(128, 256), (130, 768), (40, 1280)])
@pytest.mark.parametrize("bias", [False, True])
def test_gemv(rows, size, bias):
    x, words, scales, offset, expected = case(1, rows, size, bias)
    assert close(gemv(x, words, offset, scales=scales), expected)


@pytest.mark.parametrize(
    ("tokens", "rows", "size", "bias"),
    [
        (2, 128, 256, True),
        (17, 256, 1280, False),
        (32, 256, 768, True),
        (33, 256, 1280, False),
        (64, 128, 512, True),
        (5, 128, 8704, False),
    ],
)
def test_skinny_gemm(tokens, rows, size, bias):
    """One tile and several, with and without shared columns."""
    x, words, scales, offset, expected = case(tokens, rows, size, bias)
    for _ in range(2):  # the second finds the counters as the first left them
        assert close(skinny_gemm(x, words, offset, weight_scales=scales), expected)


@pytest.mark.parametrize("tokens", [3, 33])
def test_skinny_gemm_with_gate(tokens):
    """Bit by bit what the GEMM and then the gate give."""
    x, words, scales, offset, _ = case(tokens, 256, 512, True)
    apart = skinny_gemm(x, words, offset, weight_scales=scales)
    gated = skinny_gemm(x, words, offset, weight_scales=scales, gated=True)
    assert gated.shape == (tokens, 128)
    assert torch.equal(gated, gpu_linear.silu_gated(apart))


def test_unit_activations_give_columns_of_the_weight():
    """Bit by bit, for activations that are 1 in one column and 0 elsewhere."""
    weight = trained(128, 512)
    words, scales = (t.to(DEVICE) for t in bf12.pack(weight))
    exact = bf12.unpack(bf12.pack(weight))
    units = torch.eye(512, dtype=DTYPE, device=DEVICE)
    for begin in (0, 32, 192, 256, 480):
        got = skinny_gemm(units[begin : begin + 32].contiguous(), words, None, weight_scales=scales)
        assert torch.equal(got.float().cpu(), exact[:, begin : begin + 32].t().to(DTYPE).float())
    for column in (0, 63, 64, 255, 256, 511):
        got = gemv(units[column : column + 1].contiguous(), words, None, scales=scales)
        assert torch.equal(got[0].float().cpu(), exact[:, column].to(DTYPE).float())


def test_subnormal_weights_are_not_flushed_to_zero(monkeypatch):
    """Although hardware may treat subnormal numbers as zero."""
    monkeypatch.setattr(bf12, "_MAX_LOSING", 1.0)
    weight = (torch.arange(64 * 256).view(64, 256) % 128 * 2.0**-21).bfloat16()
    weight[:, 3], weight[:, 70] = 1.0, -1.5
    packed = bf12.pack(weight)
    assert torch.equal(bf12.unpack(packed), weight.float())
    words, scales = (t.to(DEVICE) for t in packed)
    units = torch.eye(256, dtype=DTYPE, device=DEVICE)
    for begin in range(0, 256, 64):
        got = skinny_gemm(units[begin : begin + 64].contiguous(), words, None, weight_scales=scales)
        assert torch.equal(got.float().cpu(), weight[:, begin : begin + 64].t().float())
    for column in (0, 64, 128, 192, 255):
        got = gemv(units[column : column + 1].contiguous(), words, None, scales=scales)
        assert torch.equal(got[0].float().cpu(), weight[:, column].float())


@pytest.mark.parametrize("exponent", [-120, 0, 100])
def test_rows_of_any_magnitude(exponent):
    torch.manual_seed(0)
    weight, x = (
        (torch.randn(64, 256).double() * 2.0**exponent).bfloat16(),
        torch.randn(1, 256).to(DTYPE),
    )
    words, scales = (t.to(DEVICE) for t in bf12.pack(weight))
    expected = exact_linear(x, weight, None), exact_linear(x.abs(), weight.abs(), None)
    assert close(gemv(x.to(DEVICE), words, None, scales=scales), expected)
    assert close(skinny_gemm(x.to(DEVICE), words, None, weight_scales=scales), expected)


@pytest.mark.parametrize("exponent", [-50, 50])
def test_activations_of_any_magnitude(exponent):
    weight = torch.ones(64, 256).bfloat16()
    weight[:, 1:] = 2.0**-14
    words, scales = (t.to(DEVICE) for t in bf12.pack(weight))
    x = torch.zeros(1, 256)
    x[0, 1:] = 1.0078125 * 2.0**exponent  # all its bits count
    got = gemv(
        x.to(DTYPE).to(DEVICE), words, None, out=torch.empty(1, 64, device=DEVICE), scales=scales
    )
    assert got[0].tolist() == pytest.approx(
        [255 * 1.0078125 * 2.0 ** (exponent - 14)] * 64, rel=1e-6, abs=0
    )


@pytest.mark.parametrize(
    ("rows", "size", "parts"),
    [
        (6144, 4096, 2),
        (12288, 4096, 2),
        (4096, 4096, 4),
        (28672, 4096, 1),
        (22016, 4096, 1),
        (4096, 14336, 4),
        (128256, 4096, 1),
        (128256, 16384, 2),
    ],
)
def test_ctas_that_share_the_columns_of_a_tile(rows, size, parts):
    x, words = torch.empty(1, 1), torch.empty(1, 1, dtype=torch.int16)
    assert _tiling(rows, size, 32, x, words).parts == parts


def test_fused_gemv_adds_to_the_residual_stream():
    x, words, scales, _, expected = case(1, 256, 512, False)
    hidden = torch.randn(1, 256)
    stream = hidden.clone().to(DEVICE)
    norm = Norm((torch.rand(256) + 0.5).to(DEVICE), None, 1e-5, dtype=DTYPE)
    between = fused_gemv(x, words, None, stream, norm, scales)
    assert torch.allclose(
        stream.cpu().double(), hidden.double() + expected[0], rtol=1e-4, atol=1e-4
    )
    total = (stream * norm.weight).cpu()
    assert torch.allclose(
        between.values.float().cpu(), total, rtol=1e-2 if GPU else 1e-5, atol=1e-5
    )


class CountedWeight:
    def __init__(self, copy_bytes: int) -> None:
        self.copy_bytes = copy_bytes
        self.compressed = False

    def compress(self) -> int:
        self.compressed = True
        return self.copy_bytes


def test_copies_are_made_if_all_fit():
    weights = [CountedWeight(60), CountedWeight(40), None]
    linears = [linear.Linear() for _ in weights]
    for layer, weight in zip(linears, weights, strict=True):
        layer.stored = weight
    assert linear.compress_weights(linears, 99) == 0
    assert not any(weight.compressed for weight in weights[:2])
    assert linear.compress_weights(linears, 100) == 100
    assert all(weight.compressed for weight in weights[:2])


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(40, 256, torch.bfloat16), (128, 320, torch.bfloat16), (128, 256, torch.float16)],
)
def test_sizes_and_types_that_have_no_copy(rows, columns, dtype, monkeypatch):
    monkeypatch.setattr(gpu_linear, "_SMALL_WEIGHT", 0)
    monkeypatch.setattr(gpu_linear, "_FEW_COLUMNS", 0)
    layer = GpuLinear(torch.zeros(rows, columns, dtype=dtype), None)
    assert layer.stored.copy_bytes == layer.stored.compress() == 0
    assert layer.stored.read()[0] is layer.stored.weight


def test_a_copy_is_read_by_few_tokens(monkeypatch):
    monkeypatch.setattr(gpu_linear, "_SMALL_WEIGHT", 0)
    monkeypatch.setattr(gpu_linear, "_FEW_COLUMNS", 0)
    weight = trained(256, 512)
    layer = GpuLinear(weight, None)
    assert layer.stored.skinny_tokens == 32
    assert layer.stored.read()[1] is None
    assert layer.stored.copy_bytes == layer.stored.compress() == 256 * 512 * 3 // 2
    words, scales = layer.stored.read()
    assert words.dtype == torch.int16
    assert scales.shape == (256,)
    assert Fp32OutputLinear(weight).stored.compress() == layer.stored.copy_bytes
    weight[3, 4] = math.nan
    unsafe = GpuLinear(weight, None)
    assert unsafe.stored.compress() == 0
    assert unsafe.stored.read()[1] is None


def test_large_weights_with_many_columns_have_copies():
    def copy_bytes(rows: int, columns: int) -> int:
        return GpuLinear(
            torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), None
        ).stored.copy_bytes

    assert copy_bytes(4096, 2048) == 0  # 2^23 elements are few
    assert copy_bytes(4160, 2048) == 4160 * 2048 * 3 // 2
    assert copy_bytes(2**16, 1024) == 0  # few columns
    assert copy_bytes(2**16, 1280) == 2**16 * 1280 * 3 // 2


@pytest.mark.parametrize("tokens", [1, 2, 32, 33])
def test_few_tokens_read_the_copy(tokens, monkeypatch):
    """The weight is zeroed once its copy is made, which shows what is read."""
    monkeypatch.setattr(gpu_linear, "_SMALL_WEIGHT", 0)
    monkeypatch.setattr(gpu_linear, "_FEW_COLUMNS", 0)
    kept = trained(128, 256)
    x = torch.randn(tokens, 256).to(DTYPE)

    layer = GpuLinear(kept.clone().to(DEVICE), None)
    fp32_output = Fp32OutputLinear(kept.clone().to(DEVICE))
    for made in (layer, fp32_output):
        assert made.stored.compress() > 0
        made.stored.weight.zero_()
    if tokens > 32:
        if GPU:  # the library multiplies numbers of one type only
            assert not layer(x.to(DEVICE)).any()
            assert not fp32_output(x.to(DEVICE)).any()
        return
    exact = exact_linear(x, kept, None).float()
    tolerance = {"atol": 2e-2 if GPU else 1e-5}
    results = [layer(x.to(DEVICE))]
    if GPU or tokens == 1:  # with more float32 tokens the library is used
        results.append(fp32_output(x.to(DEVICE)))
    assert all(torch.allclose(got.float().cpu(), exact, **tolerance) for got in results)
    gated = torch.nn.functional.silu(exact[:, :64]) * exact[:, 64:]
    assert torch.allclose(layer.gated(x.to(DEVICE)).float().cpu(), gated, **tolerance)
    if tokens == 1:
        stream = torch.zeros(1, 128, device=DEVICE)
        norm = Norm(torch.ones(128, device=DEVICE), None, 1e-5, dtype=DTYPE)
        layer.residual_norm(x.to(DEVICE), stream, norm)
        assert torch.allclose(stream.cpu(), exact, **tolerance)


@pytest.mark.gpu
def test_a_gpu_packs_as_a_cpu_does():
    weight = trained(256, 1024)
    weight[7] *= 2.0**100
    here, there = bf12.pack(weight), bf12.pack(weight.cuda())
    assert torch.equal(there.words.cpu(), here.words)
    assert torch.equal(there.scales.cpu(), here.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 32, 33, 64, 65])
def test_results_are_the_same_with_a_copy(tokens, monkeypatch):
    monkeypatch.setattr(gpu_linear, "_SMALL_WEIGHT", 0)
    monkeypatch.setattr(gpu_linear, "_FEW_COLUMNS", 0)
    weight, x = trained(512, 1024).cuda(), torch.randn(tokens, 1024).bfloat16().cuda()
    for kind in (lambda: GpuLinear(weight, None), lambda: Fp32OutputLinear(weight)):
        before, after = kind(), kind()
        assert after.stored.compress() > 0
        assert torch.allclose(after(x).float(), before(x).float(), rtol=2**-7, atol=1e-3)
        if isinstance(after, GpuLinear):
            assert torch.allclose(
                after.gated(x).float(), before.gated(x).float(), rtol=2**-6, atol=1e-3
            )

"""Each Triton kernel against its torch reference. Without a GPU they run in Triton's interpreter,
on small shapes.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from attention_steps import DEVICE, GPU, MIXES, gpu_plan, slots_of, tables_of
from dequantised import dequantise

from slipstream.engine.cache.window import Window
from slipstream.kernels import activation, normalisation, rotary
from slipstream.kernels.attention import plan_attention
from slipstream.kernels.attention_rule import AttentionRule, cache_shape
from slipstream.kernels.gpu import activation as gpu_activation
from slipstream.kernels.gpu import normalisation as gpu_normalisation
from slipstream.kernels.gpu import quantised as gpu_quantised
from slipstream.kernels.gpu import rotary as gpu_rotary
from slipstream.kernels.gpu import step as gpu_step
from slipstream.kernels.gpu.gemv import gemv
from slipstream.kernels.gpu.linear import Fp32OutputLinear, GpuLinear, WeightOnlyLinear
from slipstream.kernels.gpu.skinny_gemm import skinny_gemm
from slipstream.kernels.inputs import Quantised, plain, quantise
from slipstream.weights.quantise import quantise_fp8, quantise_rows

DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> bool:
    error = (
        got.double().cpu() - expected.double().cpu()
    ).norm() / expected.double().cpu().norm().clamp(min=1e-9)
    return bool(error < max(tolerance, TOLERANCE[got.dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 96, 576])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_add_norm(dtype, size, bias, add):
    torch.manual_seed(0)
    hidden = torch.randn(5, size)
    delta = torch.randn(5, size).to(dtype) if add else None
    norm = normalisation.Norm(
        torch.randn(size).to(dtype), torch.randn(size).to(dtype) if bias else None, 1e-5
    )
    ours = hidden.clone().to(DEVICE)
    on_device = normalisation.Norm(
        norm.weight.to(DEVICE), None if norm.bias is None else norm.bias.to(DEVICE), 1e-5
    )
    got = gpu_normalisation.add_norm(ours, None if delta is None else delta.to(DEVICE), on_device)
    expected = normalisation.add_norm(hidden, delta, norm)
    assert close(got, expected)
    assert torch.equal(ours.cpu(), hidden), "the residual stream is changed alike"
    assert close(
        gpu_normalisation.normalise(ours, on_device), normalisation.normalise(hidden, norm)
    )


def quantised_close(got: Quantised, expected: torch.Tensor) -> bool:
    """Within half a step of e4m3: 1/16 of a number's size."""
    scales, expected = got.scales.cpu(), expected.float().cpu()
    values = got.values.cpu().float() * scales
    right = (values - expected).abs() <= (expected.abs() / 16 + scales * 2**-9) * 1.01
    # Triton's interpreter loses the carry where a number is rounded up to a power of two
    if not GPU:
        right |= torch.frexp(quantise(expected).values.float()).mantissa.abs() == 0.5
    return bool(right.all())


@pytest.mark.parametrize("size", [64, 1500])
def test_fp8_activations_match_their_reference(size):
    """From the norm, from the gate, and alone: each equals its torch reference rounded to e4m3."""
    torch.manual_seed(0)
    dtype = DTYPES[-1]
    hidden, delta, weight = (
        torch.randn(5, size),
        torch.randn(5, size).to(dtype),
        torch.randn(size).to(dtype),
    )
    expected = normalisation.add_norm(hidden.clone(), delta, normalisation.Norm(weight, None, 1e-5))
    norm = normalisation.Norm(weight.to(DEVICE), None, 1e-5, quantise=True)
    got = gpu_normalisation.add_norm(hidden.to(DEVICE), delta.to(DEVICE), norm)
    assert quantised_close(got, expected)
    x = torch.randn(3, 2 * size).to(dtype)
    assert quantised_close(
        gpu_activation.silu_gated_quantised(x.to(DEVICE)), activation.silu_gated(x)
    )
    got, reference = gpu_quantised.quantise(x.to(DEVICE)), quantise(x)
    assert quantised_close(got, x)
    assert quantised_close(reference, x)
    assert torch.allclose(got.scales.cpu(), reference.scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 1024, 1500])
def test_silu_gated(dtype, size):
    torch.manual_seed(0)
    x = torch.randn(3, 2 * size).to(dtype)
    assert close(gpu_activation.silu_gated(x.to(DEVICE)), activation.silu_gated(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "size", "rotary_size"),
    [(4, 2, 16, 16), (6, 2, 20, 20), (2, 2, 16, 8), (9, 3, 16, 16), (4, 4, 16, 0)],
)
@pytest.mark.parametrize("norm", [False, True])
def test_rotate_write(dtype, q_heads, kv_heads, size, rotary_size, norm):
    torch.manual_seed(0)
    tokens, slots_total = 5, 32
    heads = torch.randn(tokens, q_heads + 2 * kv_heads, size).to(dtype)
    positions, slots = torch.tensor([0, 3, 17, 4, 31]), torch.tensor([9, 1, 30, 2, 17])
    rope = None
    if rotary_size:
        angles = torch.rand(40, rotary_size) * 6
        rope = (angles.cos(), angles.sin())
    q_norm, k_norm = (
        (torch.randn(size).to(dtype), torch.randn(size).to(dtype)) if norm else (None, None)
    )
    expected_cache = torch.zeros(2, kv_heads, slots_total, size, dtype=dtype)
    cache = expected_cache.clone().to(DEVICE)
    expected_rope = None if rope is None else rotary.rope_at(*rope, positions, dtype)
    expected = rotary.rotate_write(
        heads.clone(), positions, slots, expected_rope, q_norm, k_norm, 1e-6, *expected_cache
    )

    def move(tensor):
        return None if tensor is None else tensor.to(DEVICE)

    got = gpu_rotary.rotate_write(
        heads.to(DEVICE),
        move(positions),
        move(slots),
        None if rope is None else tuple(map(move, rope)),
        move(q_norm),
        move(k_norm),
        1e-6,
        *cache,
    )
    assert close(got[:, :q_heads], expected)
    assert close(
        got[:, q_heads:].transpose(0, 1).reshape(2, kv_heads, tokens, size),
        expected_cache[:, :, slots],
    )
    assert close(cache, expected_cache)
    untouched = [s for s in range(slots_total) if s not in slots.tolist()]
    assert not cache[:, :, untouched].any(), "nothing is written beside the slots"


@pytest.mark.parametrize(
    ("dtype", "stored"), [(d, d) for d in DTYPES] + [(DTYPES[-1], torch.float8_e4m3fn)]
)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(4, 2, 16), (2, 2, 20)]
    if not GPU
    else [
        (4, 2, 64),
        (32, 8, 128),
        (8, 8, 80),
        (6, 2, 96),
        (4, 1, 256),
        (2, 2, 20),
        (4, 2, 8),
        (4, 2, 16),
    ],
)
@pytest.mark.parametrize(
    "rule", [AttentionRule(0.2), AttentionRule(0.2, 24), AttentionRule(0.3, 24, 5, 2.0)]
)
def test_attention(dtype, stored, mix, heads, kv_heads, size, rule):
    torch.manual_seed(0)
    block = 32
    positions = np.array([p for p, _ in MIXES[mix]])
    counts = np.array([c for _, c in MIXES[mix]])
    if (positions + counts).sum() * size * kv_heads > 2**29:
        pytest.skip("larger than the check needs")
    tables = tables_of(positions, counts, block)
    cache = torch.randn(cache_shape(1, (int(tables.max()) + 1) * block, kv_heads, size)).to(stored)
    order, plan = gpu_plan(tables, positions, counts, block, kv_heads, dtype, size)
    step = torch.randn(int(counts.sum()), heads + 2 * kv_heads, size).to(dtype)
    # the cache holds the step's own keys and values as exactly
    step[:, heads:] = step[:, heads:].to(stored).to(dtype)
    slots = slots_of(order, positions, counts, tables, block)
    readable = cache[0].float()
    readable[:, :, slots] = step[:, heads:].float().unflatten(1, (2, kv_heads)).permute(1, 2, 0, 3)
    got = plan.attend(step.to(DEVICE), *readable.to(stored).to(DEVICE), rule)
    reference = plan_attention(
        tables[order], positions[order], counts[order], block, readable[None]
    )
    expected = reference.attend(step[:, :heads].float(), *readable, rule)
    assert got.isfinite().all()
    # eight bits are read as float16
    assert close(got, expected, 2e-3 if stored == torch.float8_e4m3fn else 0.0)


# more and fewer than 16 query heads per KV head
@pytest.mark.parametrize(("heads", "kv_heads"), [(40, 2), (4, 2)])
def test_attention_of_many_rows(heads, kv_heads):
    torch.manual_seed(0)
    block, size, rows = 32, 32, 14 if not GPU else 1200
    positions, counts = np.arange(rows) * 7 % 200, np.ones(rows, dtype=np.int64)
    tables = np.arange(1, 1 + rows * 7, dtype=np.int32).reshape(rows, 7)
    cache = torch.randn(cache_shape(1, (1 + rows * 7) * block, kv_heads, size)).half()
    step = torch.randn(rows, heads + 2 * kv_heads, size).half()
    slots = torch.from_numpy(
        tables[np.arange(rows), positions // block] * block + positions % block
    ).long()
    cache[0][:, :, slots] = step[:, heads:].unflatten(1, (2, kv_heads)).permute(1, 2, 0, 3)
    _, plan = gpu_plan(tables, positions, counts, block, kv_heads, step.dtype, size)
    got = plan.attend(step.to(DEVICE), *cache[0].to(DEVICE), AttentionRule(0.2))
    reference = plan_attention(tables, positions, counts, block, cache.float())
    assert close(
        got.float(),
        reference.attend(step[:, :heads].float(), *cache[0].float(), AttentionRule(0.2)),
        3e-3,
    )


def test_nan_in_a_prompt_does_not_reach_the_prompt_before_it():
    torch.manual_seed(0)
    block, heads, kv_heads, size = 32, 4, 2, 16
    positions, counts = np.array([0, 0]), np.array([70, 40])
    tables = np.arange(1, 9, dtype=np.int32).reshape(2, 4)
    cache = torch.zeros(cache_shape(1, 9 * block, kv_heads, size), dtype=torch.float16)
    step = torch.randn(int(counts.sum()), heads + 2 * kv_heads, size).half()

    def attend() -> torch.Tensor:
        _, plan = gpu_plan(tables, positions, counts, block, kv_heads, step.dtype, size)
        return plan.attend(step.to(DEVICE), *cache[0].to(DEVICE), AttentionRule(0.2)).cpu()

    expected = attend()
    step[70:] = float("nan")
    got = attend()
    assert torch.equal(got[:70], expected[:70])
    assert got[70:].isnan().all()


@pytest.mark.parametrize("sinks", [0, 5])
def test_blocks_outside_the_window_are_not_read(sinks):
    """Tables hold the null block in their place, and the old blocks hold nan."""
    torch.manual_seed(0)
    block, heads, kv_heads, size = 32, 4, 2, 16
    positions, counts, rule = (
        np.array([200, 100, 170, 90]),
        np.array([1, 1, 3, 130]),
        AttentionRule(0.2, 40, sinks),
    )
    tables = np.arange(1, 33, dtype=np.int32).reshape(4, 8)
    cache = torch.randn(cache_shape(1, 33 * block, kv_heads, size))
    cache[..., :block, :] = 0.0
    step = torch.randn(int(counts.sum()), heads + 2 * kv_heads, size)

    def attend() -> torch.Tensor:
        _, plan = gpu_plan(tables, positions, counts, block, kv_heads, step.dtype, size)
        return plan.attend(step.to(DEVICE), *cache[0].to(DEVICE), rule).cpu()

    expected = attend()
    for row, position in enumerate(positions):
        for index in Window(40, sinks).blocks_outside(int(position), block):
            cache[..., tables[row, index] * block : (tables[row, index] + 1) * block, :] = math.nan
            tables[row, index] = 0
    assert (tables == 0).sum() == (7 if sinks else 11)
    assert torch.equal(attend(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(40, 64), (7, 600), (300, 512)])
@pytest.mark.parametrize("bias", [False, True])
def test_gemv(dtype, rows, size, bias):
    torch.manual_seed(0)
    x, weight = torch.randn(1, size).to(dtype), torch.randn(rows, size).to(dtype)
    offset = torch.randn(rows).to(dtype) if bias else None
    got = gemv(x.to(DEVICE), weight.to(DEVICE), None if offset is None else offset.to(DEVICE))
    assert close(
        got,
        torch.nn.functional.linear(
            x.float(), weight.float(), None if offset is None else offset.float()
        ),
    )


@pytest.mark.parametrize(
    ("rows", "size", "after"), [(64, 128, 64), (130, 600, 40), (300, 512, 128)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_fused_gemv_matches_separate_steps(rows, size, after, bias):
    """GEMV, residual addition, norm and the next GEMV: as when each is computed by itself."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if GPU else torch.float16  # the interpreter does not know bfloat16
    x, hidden = torch.randn(1, size).to(dtype), torch.randn(1, rows) * 3
    weights = [
        (torch.randn(shape) / shape[1] ** 0.5).to(dtype) for shape in ((rows, size), (after, rows))
    ]
    offsets = [torch.randn(len(weight)).to(dtype) if bias else None for weight in weights]
    norm = normalisation.Norm(torch.rand(rows) + 0.5, None, 1e-5, dtype=dtype)
    first, second = (
        GpuLinear(weight.to(DEVICE), None if offset is None else offset.to(DEVICE))
        for weight, offset in zip(weights, offsets, strict=True)
    )
    stream = hidden.clone().to(DEVICE)
    between = first.residual_norm(
        x.to(DEVICE), stream, dataclasses.replace(norm, weight=norm.weight.to(DEVICE))
    )
    hidden += torch.nn.functional.linear(
        x.float(), weights[0].float(), offsets[0].float() if bias else None
    )
    normal = normalisation.normalise(hidden, norm).float()
    expected = torch.nn.functional.linear(
        normal, weights[1].float(), offsets[1].float() if bias else None
    )
    assert close(stream, hidden)
    assert close(plain(between).float(), normal, 5e-3)
    assert close(second(between).float(), expected, 5e-3)
    assert close(second.gated(between).float(), activation.silu_gated(expected), 1e-2)
    assert close(
        Fp32OutputLinear(weights[1].to(DEVICE))(between), normal @ weights[1].float().T, 5e-3
    )


@pytest.mark.parametrize("kind", ["plain", "int8", "fp8 weights", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "rows", "size"), [(3, 64, 128), (16, 40, 600), (33, 130, 1024), (64, 128, 512)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_skinny_gemm(kind, tokens, rows, size, bias):
    """Sizes that tiles divide and that they do not, with and without shared columns."""
    torch.manual_seed(0)
    dtype = DTYPES[-1]
    x, weight = torch.randn(tokens, size).to(dtype), (torch.randn(rows, size) / size**0.5).to(dtype)
    offset = torch.randn(rows).to(dtype) if bias else None
    x_scales = weight_scales = None
    exact, exact_weight = x.float(), weight.float()
    if kind == "int8":
        weight, weight_scales = quantise_rows(weight, 8, 0)
        exact_weight = dequantise(weight, weight_scales)
    if kind == "fp8 weights":
        weight, weight_scales = quantise_fp8(weight)
        exact_weight = dequantise(weight, weight_scales)
    if kind == "fp8":
        if not GPU:
            pytest.skip("the interpreter has no GEMM of 8-bit numbers")
        weight, weight_scales = quantise_fp8(weight)
        x, x_scales = quantise(x)
        exact, exact_weight = x.float() * x_scales, dequantise(weight, weight_scales)
    on_device = [
        None if t is None else t.to(DEVICE) for t in (x, weight, offset, x_scales, weight_scales)
    ]
    expected = torch.nn.functional.linear(
        exact, exact_weight, None if offset is None else offset.float()
    )
    for _ in range(2):  # the second finds the counters as the first left them
        assert close(skinny_gemm(*on_device), expected)


@pytest.mark.parametrize("tokens", [3, 33])
@pytest.mark.parametrize(("rows", "size"), [(64, 128), (128, 600), (192, 1024)])
@pytest.mark.parametrize("bias", [False, True])
def test_skinny_gemm_with_gate(tokens, rows, size, bias):
    """Bit by bit what the GEMM and then the gate give."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if GPU else torch.float16  # the interpreter does not know bfloat16
    x, weight = torch.randn(tokens, size).to(dtype), (torch.randn(rows, size) / size**0.5).to(dtype)
    offset = torch.randn(rows).to(dtype).to(DEVICE) if bias else None
    apart = skinny_gemm(x.to(DEVICE), weight.to(DEVICE), offset)
    gated = skinny_gemm(x.to(DEVICE), weight.to(DEVICE), offset, gated=True)
    assert torch.equal(gated, gpu_activation.silu_gated(apart))


@pytest.mark.parametrize(
    "quantised", [quantise_fp8, lambda weight: quantise_rows(weight, 8, 0)], ids=["fp8", "int8"]
)
@pytest.mark.parametrize("tokens", [3, 100])
def test_8_bit_weights_with_16_bit_activations(quantised, tokens):
    """Read as they are for 3 tokens, expanded for 100."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if GPU else torch.float16  # the interpreter does not know bfloat16
    x, bias = torch.randn(tokens, 200).to(dtype), torch.randn(50).to(dtype)
    stored, scales = quantised(torch.randn(50, 200))
    layer = WeightOnlyLinear(stored.to(DEVICE), scales.to(DEVICE), bias.to(DEVICE))
    got = layer(x.to(DEVICE))
    assert got.dtype == dtype
    expected = torch.nn.functional.linear(x.float(), dequantise(stored, scales), bias.float())
    assert close(got.float(), expected, 5e-3)


def test_step_inputs_and_write_back():
    tokens = torch.arange(40).view(4, 10).clone()
    tables = torch.tensor([[0, 0], [5, 6], [7, 8], [9, 3]], dtype=torch.int32)
    rows = torch.tensor([3, 1, 1], dtype=torch.int32)
    positions = torch.tensor([2, 4, 5], dtype=torch.int32)
    on_device = tokens.to(DEVICE)
    ids, slots = gpu_step.step_inputs(
        rows.to(DEVICE), positions.to(DEVICE), on_device, tables.to(DEVICE), 4
    )
    assert ids.tolist() == [32, 14, 15]
    assert slots.tolist() == [9 * 4 + 2, 6 * 4 + 0, 6 * 4 + 1]
    gpu_step.write_back(
        rows[:2].to(DEVICE),
        positions[:2].to(DEVICE),
        torch.tensor([100, 200]).to(DEVICE),
        on_device,
    )
    tokens[3, 2], tokens[1, 4] = 100, 200
    assert torch.equal(on_device.cpu(), tokens)

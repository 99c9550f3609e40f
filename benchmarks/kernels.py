"""Measure each GPU kernel's time and its share of what the hardware allows. Needs torch and Triton.

    python benchmarks/kernels.py

Times are of graph replays over more data than the cache holds. Times "over seconds" are of kernels
that alternate for long enough that power is the limit. "of bound": reads at 4.30 TB/s, or
arithmetic at 782 TFLOP/s in bfloat16, both measured on one H200, and twice that in 8 bits.
"""

# ruff: noqa: B023  (what is timed is called before its loop goes on)
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a bare box has no installed package

import numpy as np
import torch
from torch.nn import functional

from slipstream.engine.gpu.sampling_rows import SamplingRows
from slipstream.engine.plan import RowStart, StepPlan
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels import packed_cache
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.bf12 import pack
from slipstream.kernels.gpu.activation import silu_gated
from slipstream.kernels.gpu.attention import GpuAttention
from slipstream.kernels.gpu.decode_chunks import DecodePlan, count_resident_ctas, cut_chunks
from slipstream.kernels.gpu.gated_gemm import gated_gemm, supports_gated_gemm
from slipstream.kernels.gpu.gemv import gemv
from slipstream.kernels.gpu.normalisation import add_norm
from slipstream.kernels.gpu.prefill_tiles import PrefillPlan, cut_tiles, use_large_tiles
from slipstream.kernels.gpu.quantised import quantise
from slipstream.kernels.gpu.rotary import rotate_write
from slipstream.kernels.gpu.skinny_gemm import skinny_gemm
from slipstream.kernels.gpu.unpacked_kv import UnpackedKv, plan_unpacking, unpacking_pays
from slipstream.kernels.normalisation import Norm

READ_BYTES_PER_SECOND = 4.30e12
FLOPS = 782e12
BLOCK = 32
DEVICE = torch.device("cuda")


def microseconds(call: Callable[[int], object], copies: int) -> float:
    """Return the time of one call; copy i of the data is used by calls i, i + copies, …"""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = max(copies, 8)
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index % copies)
    graph.replay()
    times = []
    for _ in range(7):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[3] / calls * 1e3


def show(
    name: str,
    shape: str,
    time: float,
    nbytes: float = 0.0,
    flops: float = 0.0,
    most_flops: float = FLOPS,
) -> None:
    bound = max(nbytes / READ_BYTES_PER_SECOND, flops / most_flops) * 1e6
    rate = f"{flops / time / 1e6:7.0f} TFLOP/s" if flops else f"{nbytes / time / 1e6:7.2f} TB/s"
    print(
        f"{name:18} {shape:34} {time:9.1f} us {rate:>16} {bound / time:6.0%} of bound", flush=True
    )


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(DEVICE)


def tables_for(lengths: np.ndarray) -> tuple[torch.Tensor, int]:
    """Return scattered blocks for rows of these lengths, and the number of all blocks."""
    blocks = -(-lengths // BLOCK)
    free = np.random.default_rng(0).permutation(blocks.sum()) + 1
    tables = np.zeros((len(lengths), blocks.max()), dtype=np.int32)
    for row, count in enumerate(blocks):
        tables[row, :count] = free[:count]
        free = free[count:]
    return on_device(tables), int(blocks.sum()) + 1


LINEAR_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
COPIES = 8


def linears() -> None:
    for rows, size in LINEAR_SHAPES:
        weights = random(COPIES, rows, size) * 0.02
        bf16_linears(weights)
        bf12_linears(weights)
        fp8_linears(weights)


def bf16_linears(weights: torch.Tensor) -> None:
    _, rows, size = weights.shape
    nbytes = rows * size * 2
    for tokens in (1, 8, 32, 64, 256):
        x = random(tokens, size)
        shape = f"[{tokens}, {size}] × [{rows}, {size}]"
        if tokens == 1:
            time = microseconds(lambda i: gemv(x, weights[i], None), COPIES)
            show("gemv", shape, time, nbytes)
        elif tokens <= 64:
            time = microseconds(lambda i: skinny_gemm(x, weights[i], None), COPIES)
            show("skinny_gemm", shape, time, nbytes)
        time = microseconds(lambda i: functional.linear(x, weights[i]), COPIES)
        show("library", shape, time, nbytes, 2 * rows * size * tokens if tokens > 64 else 0)


def bf12_linears(weights: torch.Tensor) -> None:
    _, rows, size = weights.shape
    packed = [pack(weight) for weight in weights]
    for tokens in (1, 8, 32):
        x = random(tokens, size)
        shape = f"12-bit [{tokens}, {size}] × [{rows}, {size}]"
        if tokens == 1:
            time = microseconds(
                lambda i: gemv(x, packed[i].words, None, scales=packed[i].scales), COPIES
            )
        else:
            time = microseconds(
                lambda i: skinny_gemm(x, packed[i].words, None, None, packed[i].scales), COPIES
            )
        show("gemv" if tokens == 1 else "skinny_gemm", shape, time, rows * size * 1.5)


def fp8_linears(weights: torch.Tensor) -> None:
    _, rows, size = weights.shape
    stored = weights.to(torch.float8_e4m3fn)
    scales = torch.ones(rows, device=DEVICE)
    nbytes = rows * size
    for tokens in (1, 32, 64, 1024):
        x, by_token = quantise(random(tokens, size))
        shape = f"fp8 [{tokens}, {size}] × [{rows}, {size}]"
        if tokens <= 64:
            time = microseconds(lambda i: skinny_gemm(x, stored[i], None, by_token, scales), COPIES)
            show("skinny_gemm", shape, time, nbytes)
        time = microseconds(
            lambda i: torch._scaled_mm(
                x,
                stored[i].t(),
                by_token,
                scales[None, :],
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            ),
            COPIES,
        )
        flops = 2 * rows * size * tokens if tokens > 64 else 0
        show("library", shape, time, nbytes, flops, 2 * FLOPS)


def gated_linears() -> None:
    """The fused gated GEMM where the GPU supports it, and the library's GEMM with a gate kernel."""
    for size, columns in ((14336, 4096), (11008, 4096), (3072, 1024)):
        weights = random(4, 2 * size, columns) * 0.02
        for tokens in (1024, 2048, 8192):
            x = random(tokens, columns)
            flops = 4 * tokens * size * columns
            shape = f"gated [{tokens}, {columns}] × [{2 * size}, {columns}]"
            if supports_gated_gemm(weights[0]):
                show(
                    "gated_gemm",
                    shape,
                    microseconds(lambda i: gated_gemm(x, weights[i]), 4),
                    flops=flops,
                )
            time = microseconds(lambda i: silu_gated(functional.linear(x, weights[i])), 4)
            show("library", shape, time, flops=flops)


def layers_over_seconds() -> None:
    """A layer's four GEMMs and the gate: the gate fused, and in a kernel of its own."""
    for name, tokens, hidden, size, qkv, heads in (
        ("llama3-8b", 8192, 4096, 14336, 6144, 4096),
        ("llama2-7b", 8192, 4096, 11008, 12288, 4096),
        ("qwen3-0.6b", 8192, 1024, 3072, 4096, 2048),
        ("llama3-8b", 1024, 4096, 14336, 6144, 4096),
    ):
        shapes = ((qkv, hidden), (hidden, heads), (2 * size, hidden), (hidden, size))
        weights = [random(*shape) * 0.02 for shape in shapes]
        if not supports_gated_gemm(weights[2]):
            continue
        x = random(tokens, hidden)
        attended = random(tokens, heads)

        def layer(gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
            functional.linear(x, weights[0])
            functional.linear(attended, weights[1])
            functional.linear(gated(x, weights[2]), weights[3])

        apart, fused = alternating(
            lambda: layer(lambda x, weight: silu_gated(functional.linear(x, weight))),
            lambda: layer(gated_gemm),
        )
        print(
            f"a layer's GEMMs {name} × {tokens}, over seconds: {apart:.3f} ms with a gate kernel, "
            f"{fused:.3f} with the fused gate: {apart / fused - 1:+.1%}",
            flush=True,
        )


def alternating(*calls: Callable[[], None], rounds: int = 5, seconds: float = 0.2) -> list[float]:
    """Return the milliseconds of one call of each; the first round and the first third of each
    later one warm up.
    """
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, found, strict=True):
            measured: list[float] = []
            round_end = perf_counter() + seconds
            while perf_counter() < round_end:
                begin = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(4):
                    call()
                end.record()
                end.synchronize()
                measured.append(begin.elapsed_time(end) / 4)
            times.append(sum(measured[len(measured) // 3 :]) / len(measured[len(measured) // 3 :]))
    return [sum(times[1:]) / (rounds - 1) for times in found]


def decode_attention(
    lengths: np.ndarray, label: str, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    size = 128
    copies = 2
    packed = dtype == packed_cache.DTYPE
    tables, blocks = tables_for(lengths)
    cache = random(copies, 2, kv_heads, blocks * BLOCK, size) * 0.5
    cache = packed_of(cache) if packed else cache.to(dtype)
    step = random(len(lengths), heads + 2 * kv_heads, size)
    resident_ctas = count_resident_ctas(DEVICE, one_warp=packed)
    plan = DecodePlan(
        on_device(cut_chunks(np.arange(len(lengths)), lengths, kv_heads, resident_ctas))
    )
    attention = GpuAttention(tables, BLOCK, resident_ctas, len(lengths), plan, None)
    time = microseconds(
        lambda i: attention.attend(step, *cache[i], AttentionRule(size**-0.5)), copies
    )
    name = {1: "fp8", 2: "12-bit" if packed else "bf16"}[dtype.itemsize]
    show(
        "decode attention",
        f"{name} {heads}/{kv_heads} {label}",
        time,
        # one word is empty
        float(lengths.sum()) * 2 * kv_heads * (cache.shape[-1] - packed) * dtype.itemsize,
    )


def packed_of(cache: torch.Tensor) -> torch.Tensor:
    """Pack [copies, 2, kv_heads, slots, size] into 12 bits, by the kernel that writes the cache."""
    slots, size = cache.shape[3:]
    packed = torch.zeros(
        (*cache.shape[:4], packed_cache.words(size)), dtype=packed_cache.DTYPE, device=DEVICE
    )
    ids = torch.arange(slots, device=DEVICE)
    zeros = torch.zeros(slots, size, device=DEVICE)
    for plain, place in zip(cache, packed, strict=True):
        heads = torch.cat((plain[0, :1], plain.flatten(0, 1))).transpose(0, 1).contiguous()
        rotate_write(heads, ids, ids, (zeros + 1, zeros), None, None, 1e-6, *place)
    return packed


def prefill_attention(prompts: list[int], cached: int, heads: int, kv_heads: int) -> None:
    size = 128
    counts = np.array(prompts)
    tables, blocks = tables_for(counts + cached)
    cache = packed_of(random(1, 2, kv_heads, blocks * BLOCK, size))[0]
    step = random(int(counts.sum()), heads + 2 * kv_heads, size)
    large_tiles = use_large_tiles(max(prompts) + cached, step.dtype, size, DEVICE)
    rows = np.arange(len(counts))
    positions = np.full(len(counts), cached)
    columns = cut_tiles(rows, positions, counts, np.cumsum(counts) - counts, large_tiles)
    plan = PrefillPlan(*map(on_device, columns), large_tiles=large_tiles)  # type: ignore[misc]
    unpacked = None
    if unpacking_pays(positions, counts, BLOCK, 4 * kv_heads * size):
        where, own = map(on_device, plan_unpacking(rows, positions, BLOCK, tables.shape[1]))
        keys, values = random(2, kv_heads, len(where) * BLOCK, size)
        unpacked = UnpackedKv(tables.view(-1)[where], own, keys, values, BLOCK)
    attention = GpuAttention(tables, BLOCK, count_resident_ctas(DEVICE), 0, None, plan, unpacked)
    time = microseconds(lambda _: attention.attend(step, *cache, AttentionRule(size**-0.5)), 1)
    flops = sum(4 * heads * size * (count * cached + count * count / 2) for count in prompts)
    behind = f" behind {cached}" if cached else ""
    show(
        "prefill attention",
        f"{heads}/{kv_heads} {len(prompts)} × {prompts[0]}{behind}",
        time,
        flops=flops,
    )


def small_kernels() -> None:
    hidden = 4096
    ffn = 14336
    heads = 32
    kv_heads = 8
    size = 128
    for tokens in (1, 32, 8192):
        copies = 2 if tokens > 1000 else 8
        residual = torch.randn(copies, tokens, hidden, device=DEVICE)
        delta = random(copies, tokens, hidden)
        norm = Norm(random(hidden), None, 1e-5)
        show(
            "add_norm",
            f"[{tokens}, {hidden}]",
            microseconds(lambda i: add_norm(residual[i], delta[i], norm), copies),
            tokens * hidden * 12,
        )
        middle = random(copies, tokens, 2 * ffn)
        show(
            "silu_gated",
            f"[{tokens}, {2 * ffn}]",
            microseconds(lambda i: silu_gated(middle[i]), copies),
            tokens * ffn * 6,
        )
        step = random(copies, tokens, heads + 2 * kv_heads, size)
        cache = random(2, kv_heads, tokens + BLOCK, size)
        slots = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
        rope = (torch.rand(8192, size, device=DEVICE), torch.rand(8192, size, device=DEVICE))
        show(
            "rotate_write",
            f"[{tokens}, {heads + 2 * kv_heads}, {size}]",
            microseconds(
                lambda i: rotate_write(step[i], slots, slots, rope, None, None, 1e-5, *cache),
                copies,
            ),
            tokens * size * 2 * (2 * (heads + kv_heads) + 3 * kv_heads),
        )
    for rows in (1, 32, 1024):
        sample_rows(rows, 151936)


SAMPLING = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-k 50": {"temperature": 0.7, "top_k": 50},
    "min-p": {"temperature": 0.7, "min_p": 0.05},
    "typical": {"temperature": 0.7, "typical_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "log-probs": {"log_probs": True},
}


def sample_rows(count: int, vocab: int) -> None:
    """Show the time of drawing tokens, beside reading the logits once."""
    copies = 2 if count > 100 else 20
    logits = torch.randn(copies, count, vocab, device=DEVICE)
    tokens = torch.randint(0, vocab, (count, 512), device=DEVICE)
    rows = torch.arange(count, device=DEVICE, dtype=torch.int32)
    lengths = torch.full_like(rows, 256)
    for name, parameters in SAMPLING.items():
        table = SamplingRows(count, vocab, torch.device(DEVICE))
        starts = [
            RowStart(row, [], 128, [], SamplingParams(**parameters, seed=row))
            for row in range(count)
        ]
        table.apply(StepPlan(step=0, starts=starts))
        show(
            f"sample, {name}",
            f"[{count}, {vocab}]",
            microseconds(lambda i: table.sample(logits[i], rows, lengths, tokens), copies),
            count * vocab * 4,
        )


def main() -> None:
    chance = np.random.default_rng(1)
    mixed = chance.integers(100, 2048, 256)
    for dtype in (torch.bfloat16, packed_cache.DTYPE, torch.float8_e4m3fn):
        for heads, kv_heads in ((32, 8), (16, 8), (32, 32)):
            long = chance.integers(1025, 1152, 5600 // kv_heads)
            decode_attention(long, f"{len(long)} × 1025 to 1152", heads, kv_heads, dtype)
            decode_attention(np.full(1000, 190), "1000 × 190", heads, kv_heads, dtype)
            for rows in (256, 128, 96, 64, 48, 32):
                decode_attention(mixed[:rows], f"{rows} × 100 to 2048", heads, kv_heads, dtype)
            decode_attention(np.full(32, 2000), "32 × 2000", heads, kv_heads, dtype)
            decode_attention(np.full(32, 200), "32 × 200", heads, kv_heads, dtype)
    for prompts in ([8192], [2048] * 4, [1024] * 8, [128] * 64):
        prefill_attention(prompts, 0, 32, 8)
    for prompt in (2048, 512, 255):
        prefill_attention([prompt], 6144, 32, 8)
    linears()
    gated_linears()
    layers_over_seconds()
    small_kernels()


if __name__ == "__main__":
    main()

"""Compile kernels for other GPUs, as they would be launched there, and print their shared memory.

    python tests/support/kernel_resources.py ARCHITECTURE SHARED_BYTES

Run as a separate process: the tests enable Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as build

from slipstream.kernels import packed_cache
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.gpu import (
    decode_attention,
    gated_gemm,
    gemv,
    launch,
    prefill_attention,
    prefill_tiles,
    rotary,
    skinny_gemm,
    unpacked_kv,
)
from slipstream.kernels.gpu.decode_chunks import DecodePlan, ResidentCtas, cut_chunks

ARCHITECTURE = int(sys.argv[1])
SHARED_BYTES = int(sys.argv[2])
CPU = torch.device("cpu")
TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
}


def type_of(argument: Any) -> str:
    if argument is None:
        return "constexpr"
    if isinstance(argument, torch.Tensor):
        return "*" + TYPES[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    if isinstance(argument, int):
        return "i32"
    shape = ",".join(map(str, argument.block_shape))
    return f"tensordesc<{TYPES[argument.base.dtype]}[{shape}]>"


def compiled(
    kernel: launch.CachedKernel, grid: tuple[int, ...], *arguments: Any, **constants: Any
) -> None:
    """Compile a kernel and print its shared memory; replaces `CachedKernel._launch`."""
    if "ON_DEVICE" in constants:  # False for tensors on a CPU
        constants["ON_DEVICE"] = True
    options = {
        name: constants.pop(name)
        for name in ("num_warps", "num_stages", "launch_pdl")
        if name in constants
    }
    names = kernel._kernel.arg_names
    signature = {name: type_of(argument) for name, argument in zip(names, arguments, strict=False)}
    signature |= dict.fromkeys(constants, "constexpr")
    fixed = {(names.index(name),): value for name, value in constants.items()}
    fixed |= {(i,): None for i, argument in enumerate(arguments) if argument is None}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(arguments)
        if isinstance(argument, torch.Tensor) or (isinstance(argument, int) and argument % 16 == 0)
    }
    source = ASTSource(kernel._kernel, signature, fixed, aligned)
    result = build(source, target=GPUTarget("cuda", ARCHITECTURE, 32), options=options)
    print(f"{kernel._kernel.__name__} {constants} {result.metadata.shared}", flush=True)


def new_cache(kv_heads: int, size: int, cached: torch.dtype) -> torch.Tensor:
    numbers = packed_cache.words(size) if cached == packed_cache.DTYPE else size
    return torch.empty(2, kv_heads, 32, numbers, dtype=cached)


def decode(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, cached: torch.dtype, rows: int
) -> None:
    places = ResidentCtas(5 * 128, one_warp=cached == packed_cache.DTYPE)
    plan = cut_chunks(np.zeros(rows, dtype=np.int64), np.full(rows, 100), kv_heads, places)
    q = torch.empty(rows, heads, size, dtype=dtype)
    cache = new_cache(kv_heads, size, cached)
    tables = torch.zeros(rows, 4, dtype=torch.int32)
    chunks = DecodePlan(torch.from_numpy(plan))
    decode_attention.attend_decode(q, *cache, tables, chunks, 32, places, AttentionRule(0.1), q)


def prefill(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, cached: torch.dtype, longest: int
) -> None:
    large_tiles = prefill_tiles.use_large_tiles(longest, dtype, size, CPU)
    tiles = prefill_tiles.cut_tiles(*(np.array([n]) for n in (0, 0, 64, 0)), large_tiles)
    plan = prefill_tiles.PrefillPlan(*map(torch.from_numpy, tiles), large_tiles=large_tiles)  # type: ignore[misc, arg-type]
    step = torch.empty(64, heads + 2 * kv_heads, size, dtype=dtype)
    cache = new_cache(kv_heads, size, cached)
    tables = torch.zeros(1, 4, dtype=torch.int32)
    out = torch.empty(64, heads, size, dtype=dtype)
    prefill_attention.attend_prefill(step, *cache, tables, plan, 32, AttentionRule(0.1), out)


def write(heads: int, kv_heads: int, size: int, cached: torch.dtype) -> None:
    step = torch.empty(4, heads + 2 * kv_heads, size, dtype=torch.bfloat16)
    ids = torch.zeros(4, dtype=torch.int64)
    rope = (torch.empty(4, size), torch.empty(4, size))
    rotary.rotate_write(step, ids, ids, rope, None, None, 1e-6, *new_cache(kv_heads, size, cached))


def unpack_kv(kv_heads: int, size: int) -> None:
    blocks = torch.zeros(4, dtype=torch.int32)
    plain = torch.empty(2, kv_heads, 128, size, dtype=torch.bfloat16)
    unpacked_kv.UnpackedKv(blocks, blocks[None], *plain, 32).unpack(
        *new_cache(kv_heads, size, packed_cache.DTYPE)
    )


def linear(tokens: int, dtype: torch.dtype, stored: torch.dtype, gated: bool = False) -> None:
    """stored: int16 means 12-bit weights"""
    scales = torch.empty(4096) if stored != dtype or stored == torch.float8_e4m3fn else None
    by_token = torch.empty(tokens, 1) if dtype == torch.float8_e4m3fn else None
    x = torch.empty(tokens, 4096, dtype=dtype)
    weight = torch.empty(4096, 4096, dtype=stored)
    if stored == torch.int16:
        weight = weight[:, :3072]
    if tokens == 1:
        gemv.gemv(x, weight, None, scales=scales)
        return
    skinny_gemm.skinny_gemm(x, weight, None, by_token, scales, gated=gated)


def main() -> None:
    launch.CachedKernel._launch = compiled  # type: ignore[method-assign]
    overlapping = (
        {"OVERLAP": True, "launch_pdl": True} if ARCHITECTURE >= 90 else {"OVERLAP": False}
    )
    for module in (decode_attention, skinny_gemm, gemv, rotary):
        module.overlapping = lambda device: overlapping  # type: ignore[attr-defined]
    for module in (skinny_gemm, prefill_tiles):
        module.shared_memory = lambda device: SHARED_BYTES  # type: ignore[attr-defined]
    skinny_gemm.sm_count = lambda device: 132  # type: ignore[attr-defined]
    half = torch.bfloat16
    for tokens in (16, 32, 64):
        linear(tokens, half, half)
        linear(tokens, half, torch.int8)
        linear(tokens, half, torch.int16, gated=True)
        linear(tokens, half, half, gated=True)
    linear(1, half, half)
    linear(1, half, torch.int16)
    for size in (64, 128, 256):
        for cached in (half, packed_cache.DTYPE):
            decode(32, 8, size, half, cached, 4)
            prefill(32, 8, size, half, cached, 100)
            prefill(32, 8, size, half, cached, 100_000)
            write(32, 8, size, cached)
        unpack_kv(8, size)
    for rows in (40, 80, 4000):
        decode(32, 8, 128, half, half, rows)
        decode(32, 8, 128, half, packed_cache.DTYPE, rows)
    decode(32, 8, 256, torch.float32, torch.float32, 4)
    prefill(32, 8, 256, torch.float32, torch.float32, 100)
    if ARCHITECTURE == 90:
        gated_gemm.gated_gemm(
            torch.empty(2048, 4096, dtype=half), torch.empty(28672, 4096, dtype=half)
        )
    if ARCHITECTURE >= 89:
        for rows in (4, 4000):
            decode(32, 8, 128, half, torch.float8_e4m3fn, rows)
        linear(64, torch.float8_e4m3fn, torch.float8_e4m3fn)


if __name__ == "__main__":
    main()

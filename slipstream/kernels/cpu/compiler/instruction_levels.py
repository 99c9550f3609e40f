"""Instruction levels: what code is compiled for, the best first."""

from __future__ import annotations

import platform
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    machine: str  # of platform.machine()
    cpu: str  # LLVM's name
    features: str  # LLVM's names, beyond those of the CPU
    flags: frozenset[str]  # names in /proc/cpuinfo that the level needs
    vector_bits: int  # width of the registers
    registers: int  # number of vector registers
    bf16_dot: bool = False  # products of pairs of bfloat16
    int8_dot: bool = False  # products of four bytes (VNNI), of vectors of that width


_AVX2 = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

LEVELS = (
    Level(
        "avx512-bf16",
        "x86_64",
        "x86-64-v4",
        "+avx512bf16,+avx512vnni",
        _AVX512 | {"avx512_bf16", "avx512_vnni"},
        512,
        32,
        bf16_dot=True,
        int8_dot=True,
    ),
    Level(
        "avx512-vnni",
        "x86_64",
        "x86-64-v4",
        "+avx512vnni",
        _AVX512 | {"avx512_vnni"},
        512,
        32,
        int8_dot=True,
    ),
    Level("avx512", "x86_64", "x86-64-v4", "", _AVX512, 512, 32),
    Level(
        "avx2-vnni",
        "x86_64",
        "x86-64-v3",
        "+avxvnni",
        _AVX2 | {"avx_vnni"},
        256,
        16,
        int8_dot=True,
    ),
    Level("avx2", "x86_64", "x86-64-v3", "", _AVX2, 256, 16),
    Level("neon", "aarch64", "generic", "+neon", frozenset({"asimd"}), 128, 32),
)
BY_NAME = {level.name: level for level in LEVELS}


def possible_levels(flags: frozenset[str], machine: str = "") -> list[Level]:
    """Return the levels whose instructions the machine reports, the best first."""
    machine = machine or platform.machine()
    return [level for level in LEVELS if level.machine == machine and level.flags <= flags]

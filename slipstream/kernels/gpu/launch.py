"""Kernels that begin before the one ahead has ended: what does not depend on it is done while it runs out.

Every kernel of a step waits for its predecessor before it reads or writes what others share, so that each one
also waits, through it, for all before. Needs Hopper or later; elsewhere kernels simply follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait for the kernel ahead, and let the next one begin: for kernels that are over soon."""
    wait(OVERLAP)
    let_next(OVERLAP)


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Until the kernel ahead has ended and what it wrote can be read."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next(OVERLAP: tl.constexpr):
    """The next kernel may begin once every program has said so, or ended; it takes up room from then on."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, OVERLAP: tl.constexpr):
    """Ask for memory that nobody writes to come nearer; used before `follow`."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@cache
def overlapping(device: torch.device) -> Mapping[str, Any]:
    """Arguments of a launch: whether the kernel overlaps the one ahead."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}

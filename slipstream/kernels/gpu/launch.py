"""How kernels are launched: with little work for the host, and before the kernel ahead has ended.

What does not depend on the kernel ahead is done while it runs out. Of every kernel of a step at
least one program waits for its predecessor, and all do that read or write what others share, so
that each kernel also waits, through it, for all before. Needs Hopper or later; elsewhere kernels
simply follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


class Quick:
    """A kernel that Triton is asked for once for each kind of arguments, and that is then launched
    directly.

    Triton searches for the compiled variant at every launch, which costs the host several times
    what the launch does. Arguments of one kind share a variant: Triton compiles for types, for
    addresses and numbers that sixteen divides, and for the number one. All kernels of a process run
    on one device.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._names = list(kernel.arg_names)
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """arguments: those known at run time, in order; constants: the others, and Triton's
        options.
        """
        kind = (*map(_kind, arguments), *constants.values())
        found = self._compiled.get(kind)
        if found is None:
            compiled = self._kernel[grid](*arguments, **constants)
            if compiled is not None:  # the interpreter compiles nothing
                self._compiled[kind] = (
                    compiled,
                    [constants[name] for name in self._names[len(arguments) :]],
                )
            return
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)


def counters(least: int, device: torch.device) -> Tensor:
    """For programs that share work to count who has arrived: int32, zero between any two kernels,
    because who arrives last resets what it counted.
    """
    return _counters(power_of_two(max(least, 65536)), device)


@cache
def _counters(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes near a processor that a program may have. Hopper's have 227 KiB, Ampere's 163; those
    made for games 99.
    """
    if device.type != "cuda":
        return 2**30  # the interpreter
    index = device.index if device.index is not None else torch.cuda.current_device()
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


@cache
def sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def pieces(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The least that holds `count`."""
    return 1 << (count - 1).bit_length()


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if argument.__class__ is int:
        return argument % 16 == 0, argument == 1, argument.bit_length() > 31
    if argument.__class__.__name__ == "TensorDescriptor":
        return argument.base.dtype, *argument.block_shape
    return argument.__class__


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
    """The next kernel may begin once every program has said so, or ended; it takes up room from
    then on.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, OVERLAP: tl.constexpr):
    """Ask for memory that nobody writes to come nearer; used before `follow`."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@cache
def overlapping(device: torch.device) -> Mapping[str, Any]:
    """Arguments of a launch: whether the kernel overlaps the one ahead."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}

"""Kernel launches with little host work, which overlap the end of the previous kernel.

With programmatic dependent launch (PDL) a kernel starts while the previous one finishes, and does
what does not depend on it. At least one CTA of every kernel of a step waits for the previous
kernel. Every CTA that touches data written by other CTAs waits for the previous kernel. By
induction it waits for all earlier kernels. Needs Hopper or later; on other devices kernels run one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class _Variant(NamedTuple):
    """A compiled variant of a kernel."""

    run: Callable[..., None]  # launches a function
    function: int  # its handle
    metadata: Any
    constants: list[Any]  # the constexpr arguments


class CachedKernel:
    """A kernel whose compiled variants are cached by the kinds of its arguments.

    Triton looks up the compiled variant at every launch, which costs the host several times the
    launch itself. Arguments of one kind share a variant: Triton compiles for types, for addresses
    and numbers that are multiples of 16, and for the number 1. All kernels of a process run on one
    device.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._names = list(kernel.arg_names)
        self._compiled: dict[tuple[Any, ...], _Variant] = {}
        self._collected: set[tuple[Any, ...]] = set()

    @property
    def function(self) -> Any:
        """Triton's function."""
        return self._kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._collect if _collecting else self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """arguments: the run-time arguments in order; constants: the constexpr ones, and Triton's
        options
        """
        kind = (*map(_kind, arguments), *constants.values())
        found = self._compiled.get(kind)
        if found is None:
            compiled = self._kernel[grid](*arguments, **constants)
            if compiled is not None:  # the interpreter compiles nothing
                rest = [constants[name] for name in self._names[len(arguments) :]]
                self._compiled[kind] = _Variant(
                    compiled.run, compiled.function, compiled.packed_metadata, rest
                )
            return
        # As `compiled[grid]` does, without its hooks, which take as long as the launch.
        found.run(
            *(*grid, 1, 1)[:3],
            _current_stream(),
            found.function,
            found.metadata,
            None,
            None,
            None,
            *arguments,
            *found.constants,
        )

    def _collect(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Show Triton's hook a variant that is not compiled; launch nothing."""
        kind = (*map(_kind, arguments), *constants.values())
        if kind not in self._compiled and kind not in self._collected:
            self._collected.add(kind)
            self._kernel.warmup(*arguments, grid=grid, **constants)


@cache
def _stream_getter() -> Callable[[], int]:
    """Return the function that returns the handle of the current stream of this process's GPU."""
    driver = triton.runtime.driver.active
    return partial(driver.get_current_stream, driver.get_current_device())


def _current_stream() -> int:
    return _stream_getter()()


_collecting = False  # whether kernels are collected instead of launched


@contextmanager
def collecting() -> Iterator[None]:
    """Launch no kernels while the context lasts: they only pass through Triton's hook."""
    global _collecting
    _collecting = True
    try:
        yield
    finally:
        _collecting = False


def counters(least: int, device: torch.device) -> Tensor:
    """Return counters for CTAs that share work: int32, zero between any two kernels, because the
    last CTA to arrive resets its counter.
    """
    return _counters(power_of_two(max(least, 65536)), device)


@cache
def _counters(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a CTA may have: Hopper 227 KiB, Ampere 163 KiB,
    consumer GPUs 99 KiB.
    """
    if device.type != "cuda":
        return 2**30  # the interpreter
    index = device.index if device.index is not None else torch.cuda.current_device()
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"])


@cache
def sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def pieces(count: int, size: int) -> int:
    """Return how many pieces of `size` hold `count`: ceil(count / size)."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
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
def wait_and_trigger(OVERLAP: tl.constexpr):
    """Wait for the previous kernel, and start the next one: for short kernels."""
    wait(OVERLAP)
    trigger_next(OVERLAP)


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def trigger_next(OVERLAP: tl.constexpr):
    """Start the next kernel once every CTA of this one has called this function or ended.

    From then on the next kernel occupies registers and shared memory.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, OVERLAP: tl.constexpr):
    """Prefetch read-only memory into L2, before `wait_and_trigger`."""
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
    """Return the launch arguments that say whether the kernel overlaps the previous one."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}

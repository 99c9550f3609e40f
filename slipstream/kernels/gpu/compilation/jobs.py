"""Kernels to compile, as plain data that crosses a process boundary.

`collect_jobs` runs steps without launching their kernels and gathers the variants that they need.
`compile_job` compiles one in any process, without a GPU. Its result goes into Triton's cache on
disk, under the key by which the process that launches the kernel looks for it.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource

from slipstream.kernels import gpu
from slipstream.kernels.gpu import launch

Place = list[int]  # of an argument


@dataclass(frozen=True)
class CompileJob:
    """One variant of one kernel."""

    module: str
    kernel: str
    signature: dict[str, str]  # argument → its type
    constants: list[tuple[Place, Any]]
    attributes: list[tuple[Place, Any]]  # such as an address that is a multiple of 16
    options: dict[str, Any]  # of Triton's backend, such as num_warps
    target: tuple[str, int, int]  # backend, architecture, threads of a warp

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CompileJob:
        return cls(**json.loads(text))


def fix_cache_keys() -> None:
    """Load all kernels, and compute their keys in Triton's cache in a fixed order.

    Triton's key of a kernel depends on which of the functions that it calls have a key already. So
    without this, processes that launch kernels in different orders look for different keys.
    """
    for found in pkgutil.walk_packages(gpu.__path__, f"{gpu.__name__}."):
        if found.name.startswith(__package__):
            continue
        for value in vars(import_module(found.name)).values():
            function = value.function if isinstance(value, launch.CachedKernel) else value
            if isinstance(function, triton.JITFunction):
                _ = function.cache_key


@contextmanager
def collect_jobs(found: Callable[[CompileJob], None]) -> Iterator[None]:
    """Call `found` once for each kernel variant that is met while the context lasts and not
    compiled.

    No kernel of this package runs meanwhile. New memory is zero, because other operations use as
    indices what the kernels would have written.
    """
    runtime = triton.knobs.runtime
    before = runtime.jit_cache_hook
    seen: set[str] = set()

    def hook(**given: Any) -> bool:
        job = _job(given["fn"], given["compile"])
        if job is not None and job.to_json() not in seen:
            seen.add(job.to_json())
            found(job)
        return True  # neither compile nor launch

    runtime.jit_cache_hook = hook
    try:
        with launch.collecting(), _ZeroFilled():
            yield
    finally:
        runtime.jit_cache_hook = before


def compile_job(job: CompileJob) -> None:
    """Compile a kernel into Triton's cache."""
    if not job.module.startswith(f"{gpu.__name__}."):
        raise ValueError(f"{job.module} is no module of {gpu.__name__}")
    kernel = getattr(import_module(job.module), job.kernel)
    source = ASTSource(
        kernel.function,
        job.signature,
        {tuple(place): _decoded(value) for place, value in job.constants},
        {tuple(place): value for place, value in job.attributes},
    )
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in job.options.items()
    }
    compiled = triton.compile(source, target=GPUTarget(*job.target), options=options)
    if hasattr(driver, "make_launcher"):
        # This Triton has a C function for each kernel that launches it. It is in the cache, too.
        driver.CudaLauncher(compiled.src, compiled.metadata)


def _job(function: Any, given: dict[str, Any]) -> CompileJob | None:
    """Return the job of what Triton's hook was given, or None if it is no plain data."""
    target = triton.runtime.driver.active.get_current_target()
    job = CompileJob(
        module=function.module,
        kernel=function.name,
        signature=given["signature"],
        constants=[(list(place), _encoded(value)) for place, value in given["constants"].items()],
        attributes=[(list(place), value) for place, value in given["configs"][0].items()],
        options=json.loads(given["specialization_data"])["options"],
        target=(target.backend, target.arch, target.warp_size),
    )
    try:
        job.to_json()
    except TypeError:
        return None
    return job


def _encoded(constant: Any) -> Any:
    return {"dtype": constant.name} if isinstance(constant, tl.dtype) else constant


def _decoded(constant: Any) -> Any:
    return tl.dtype(constant["dtype"]) if isinstance(constant, dict) else constant


class _ZeroFilled(TorchFunctionMode):
    """New memory is zero."""

    _FUNCTIONS = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        return result.zero_() if function in self._FUNCTIONS else result

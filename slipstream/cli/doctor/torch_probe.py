"""Prints what torch finds on this machine as JSON.

It is a process of its own, because torch takes seconds to load and may crash.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch


def main() -> None:
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda_runtime": torch.version.cuda or "",
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "gpus": [],
        "unreachable": [],
        "nccl": "",
    }
    if torch.version.cuda and torch.cuda.is_available():
        count = torch.cuda.device_count()
        found["gpus"] = [_gpu(index) for index in range(count)]
        found["unreachable"] = _unreachable(count)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    print(json.dumps(found))


def _unreachable(count: int) -> list[tuple[int, int]]:
    """Return the pairs of GPUs that cannot read each other's memory."""
    return [
        pair
        for pair in itertools.combinations(range(count), 2)
        if not torch.cuda.can_device_access_peer(*pair)
    ]


def _gpu(index: int) -> dict[str, Any]:
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    found = {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"}
    try:
        free, total = torch.cuda.mem_get_info(device)
        with torch.cuda.device(device):
            try_kernel(device)
    except Exception as error:  # any failure is part of the report
        return found | {"failure": f"{type(error).__name__}: {error}"}
    return found | {"free": free, "total": total, "failure": ""}


def try_kernel(device: torch.device) -> None:
    """Compile and run one of the engine's kernels. Raises ValueError if its result is wrong."""
    from slipstream.kernels import normalisation
    from slipstream.kernels.gpu import normalisation as on_gpu

    given = torch.linspace(-1, 1, 4 * 64, device=device).reshape(4, 64)
    norm = normalisation.Norm(torch.ones(64, device=device), None, 1e-5)
    if not torch.allclose(
        on_gpu.normalise(given, norm), normalisation.normalise(given, norm), atol=1e-3
    ):
        raise ValueError("a kernel gives wrong results")


if __name__ == "__main__":
    main()

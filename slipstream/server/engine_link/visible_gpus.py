"""The GPUs that engines probably run on, found without torch."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path

GPU_DEVICE = Path("/dev/nvidiactl")  # exists where there is a driver for GPUs
GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU of the machine


def runs_on_gpu(
    device: str, environment: Mapping[str, str] = os.environ, driver: Path = GPU_DEVICE
) -> bool:
    """Return whether engines with this setting probably run on a GPU, without loading torch."""
    if device != "auto":
        return device == "cuda"
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0").strip()
    if visible in ("", "-1") or not driver.exists():
        return False
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def visible_gpus(
    device: str,
    environment: Mapping[str, str] = os.environ,
    driver: Path = GPU_DEVICE,
    gpus: Path = GPUS,
) -> int:
    """Return how many GPUs an engine with this setting may use; 0: it runs on a CPU."""
    if not runs_on_gpu(device, environment, driver):
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").strip()
    if visible:
        return len([name for name in visible.split(",") if name.strip()])
    return len(list(gpus.iterdir())) if gpus.is_dir() else 1

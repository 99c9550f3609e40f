"""Which device a replica runs on, and what it shares with others. No torch here."""

from __future__ import annotations

from typing import NamedTuple

from slipstream.engine.settings import EngineSettings


class Placement(NamedTuple):
    device: int | None  # number of the GPU; None: the default one
    sharing: int  # replicas on that GPU, this one included


def place_replica(settings: EngineSettings, gpus: int) -> Placement:
    """Return the GPU of this replica, among `gpus` of them.

    Without `devices`, replicas take the GPUs in turn. Raises ValueError for a GPU that does not
    exist.
    """
    if not settings.devices and settings.replicas == 1:
        return Placement(None, 1)
    devices = settings.devices or [index % gpus for index in range(settings.replicas)]
    missing = [device for device in devices if device >= gpus]
    if missing:
        seen = "1 GPU is" if gpus == 1 else f"{gpus} GPUs are"
        raise ValueError(
            f"devices: there is no GPU {missing[0]}, {seen} visible: change gpu_device_ids or "
            "CUDA_VISIBLE_DEVICES"
        )
    own = devices[settings.replica]
    return Placement(own, list(devices).count(own))


def cpu_threads(settings: EngineSettings, cores: int) -> int:
    """Return the threads of this replica on a CPU. Replicas divide the cores evenly."""
    if settings.threads is not None:
        return settings.threads
    return max(1, cores // settings.replicas + (settings.replica < cores % settings.replicas))

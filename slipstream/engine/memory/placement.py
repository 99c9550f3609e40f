"""Which device each rank of a replica runs on, and what it shares with others. No torch here."""

from __future__ import annotations

from typing import NamedTuple

from slipstream.engine.settings import EngineSettings


class Placement(NamedTuple):
    device: int | None  # number of the GPU; None: the default one
    sharing: int  # processes of this model on that GPU, this one included


def place_rank(settings: EngineSettings, rank: int, ranks: int, gpus: int) -> Placement:
    """Return the GPU of a rank of this replica, among `gpus` of them.

    Without `devices`, the ranks of all replicas take the GPUs in turn. Raises ValueError for a GPU
    that does not exist, and if two ranks of a replica would share a GPU that was not given.
    """
    if not settings.devices and settings.replicas * ranks == 1:
        return Placement(None, 1)
    if not settings.devices and ranks > gpus:
        raise ValueError(
            f"{ranks} ranks need {ranks} GPUs, {_visible(gpus)}: use fewer ranks, or change "
            "CUDA_VISIBLE_DEVICES"
        )
    devices = settings.devices or [index % gpus for index in range(settings.replicas * ranks)]
    if len(devices) != settings.replicas * ranks:
        raise ValueError(
            f"{len(devices)} devices for {settings.replicas} replicas of {ranks} ranks: give one "
            "GPU for each rank"
        )
    missing = [device for device in devices if device >= gpus]
    if missing:
        raise ValueError(
            f"devices: there is no GPU {missing[0]}, {_visible(gpus)}: change gpu_device_ids or "
            "CUDA_VISIBLE_DEVICES"
        )
    own = devices[settings.replica * ranks + rank]
    return Placement(own, list(devices).count(own))


def _visible(gpus: int) -> str:
    return "1 GPU is visible" if gpus == 1 else f"{gpus} GPUs are visible"


def cpu_threads(settings: EngineSettings, cores: float, ranks: int = 1) -> int:
    """Return the threads of a rank on a CPU. Replicas divide the cores evenly, and so do their
    ranks.
    """
    if settings.threads is not None:
        return settings.threads
    whole = int(cores)  # a thread on a part of a core would delay all others
    own = whole // settings.replicas + (settings.replica < whole % settings.replicas)
    return max(1, own // ranks)

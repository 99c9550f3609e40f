"""Decides how many ranks run an engine where the settings do not say. No torch here."""

from __future__ import annotations

import logging
from dataclasses import replace

from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.cluster.division import (
    ReplicaSite,
    can_divide,
    find_local_place,
    gpus_per_process,
    ranks_per_process,
    spread_replicas,
)
from slipstream.server.engine_link.launched import Launched
from slipstream.weights.engine_config import EngineConfig
from slipstream.weights.shards import possible_ranks

logger = logging.getLogger(__name__)


def choose_ranks(
    settings: EngineSettings, config: EngineConfig, gpus: int, launched: Launched = Launched()
) -> EngineSettings:
    """Return the settings with a number of ranks: the given one, one for each GPU that the
    repository lists, or at most as many as were asked for, as GPUs are there and as the model can
    be divided among.

    gpus: GPUs that the engine may use on this machine; 0: it runs on a CPU, where it has one rank
    unless the setting says more, or a launcher started processes on several machines
    """
    if settings.ranks is not None:
        return settings
    if launched.elsewhere:
        return replace(settings, ranks=_ranks_of_cluster(settings, config, gpus, launched))
    if not gpus:
        return replace(settings, ranks=1, devices=())
    if settings.devices:
        return replace(settings, ranks=len(settings.devices) // settings.replicas)
    most = min(wanted_ranks(settings, config), gpus // settings.replicas)
    return replace(settings, ranks=possible_ranks(config.spec, config.quantisation, most))


def _ranks_of_cluster(
    settings: EngineSettings, config: EngineConfig, gpus: int, launched: Launched
) -> int:
    """Return the largest number of ranks that use all GPUs of all machines, or each process on a
    CPU, and that the model and the processes can be divided among. A replica stays on one machine.
    """
    if settings.replicas > 1:
        most = spread_replicas(launched, gpus).most_ranks(settings.replicas)
        return possible_ranks(config.spec, config.quantisation, most)
    most = launched.size * gpus_per_process(launched, gpus)
    for ranks in range(max(1, most), 1, -1):
        possible = possible_ranks(config.spec, config.quantisation, ranks) == ranks
        if possible and can_divide(ranks, launched.size):
            return ranks
    return 1


def spans_machines(settings: EngineSettings, launched: Launched, gpus: int = 0) -> bool:
    """Return whether an engine has ranks on other machines. Raises ValueError if it cannot.

    gpus: GPUs that the engine may use on this machine; 0: it runs on a CPU
    """
    ranks = settings.ranks or 1
    if settings.replicas > 1 or not launched.elsewhere or ranks <= launched.local_size:
        return False
    find_local_place(launched, gpus, 0, ranks_per_process(ranks, launched.size))
    if settings.devices:
        raise ValueError(
            f"gpu_device_ids names GPUs of one machine, and {ranks} ranks need several: remove it"
        )
    return True


def find_sites(settings: EngineSettings, launched: Launched, gpus: int = 0) -> list[ReplicaSite]:
    """Return where each replica runs: on the machines in turn. Raises ValueError if one does not
    fit on a machine.

    gpus: GPUs that the engine may use on this machine; 0: it runs on a CPU
    """
    replicas = settings.replicas
    if replicas == 1 or not launched.elsewhere:
        return [ReplicaSite(0, replicas, replica) for replica in range(replicas)]
    if settings.devices:
        raise ValueError(
            "gpu_device_ids, or gpus of instance_group, names GPUs of one machine, and the "
            f"{replicas} replicas are on several: remove it"
        )
    spread = spread_replicas(launched, gpus)
    ranks = settings.ranks or 1
    if ranks > spread.ranks:
        kind = "GPUs" if gpus else f"processes from {launched.launcher}"
        raise ValueError(
            f"{ranks} ranks of a replica do not fit on one machine, where {spread.ranks} {kind} "
            f"can be used: use at most {spread.ranks} ranks, or start a server for each replica"
        )
    return [spread.place(replica, replicas) for replica in range(replicas)]


def explain_sites(name: str, sites: list[ReplicaSite], launched: Launched, gpus: int) -> None:
    """Say where the replicas run if some are on other machines, and which places stay empty."""
    if not any(site.process for site in sites):
        return
    spread = spread_replicas(launched, gpus)
    logger.info(
        "the replicas of %s are started by the processes %s of %d from %s",
        name,
        ", ".join(str(site.process) for site in sites),
        launched.size,
        launched.launcher,
    )
    if len(sites) < spread.sites:
        logger.warning(
            "%s has %d replicas for %d machines: %d of these are not used; --replicas=%d uses all",
            name,
            len(sites),
            spread.sites,
            spread.sites - len(sites),
            spread.sites,
        )


def wanted_ranks(settings: EngineSettings, config: EngineConfig) -> int:
    """Return the ranks that a launcher asks for, or that the engine was built for."""
    return settings.wanted_ranks or config.wanted_ranks


def explain_ranks(name: str, settings: EngineSettings, config: EngineConfig) -> None:
    """Say why an engine has another number of ranks than was asked for."""
    wanted = wanted_ranks(settings, config)
    ranks = settings.ranks or 1
    if wanted not in (1, ranks):
        asked = "was started for" if settings.wanted_ranks else "was built for"
        divided = possible_ranks(config.spec, config.quantisation, wanted) == wanted
        logger.info(
            "%s %s %d ranks, which %s: it runs with %d %s",
            name,
            asked,
            wanted,
            "need as many GPUs" if divided else "do not divide this model",
            ranks,
            "rank" if ranks == 1 else "ranks",
        )

"""Starts one rank of an engine: meets the others, then leads or follows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
from slipstream.engine_worker.progress import show_progress
from slipstream.server.engine_link.child import ENGINE_COMMAND
from slipstream.server.engine_link.cluster.address import route_interface
from slipstream.server.engine_link.cluster.key import take_cluster_key
from slipstream.server.engine_link.link import RankPlace
from slipstream.server.engine_link.rank_link import FollowerLinks, LeaderLink
from slipstream.server.engine_link.rank_processes import FollowerProcesses
from slipstream.weights.engine_config import read_engine_config
from slipstream.weights.shards import check_ranks

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from slipstream.engine.loop import EngineLoop, Progress
    from slipstream.kernels.gpu.compilation.pool import CompilePool
    from slipstream.kernels.torch_ranks import TorchRanks

_FAILURE_SECONDS = 1.0  # from a broken connection until the end of the other process is known
# The server ends a start that takes too long, and a rank that is silent.
_MEETING_TIME = timedelta(days=1)
_ENDPOINT = "orders for rank {}"  # key of the store: where a follower gets its orders
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def connect(
    place: RankPlace, settings: EngineSettings, find_failure: Callable[[], str] = lambda: ""
) -> TorchRanks:
    """Meet the other ranks. find_failure: returns why another rank has ended, if that is known"""
    return _join(place, settings, open_store(place), find_failure)


def open_store(place: RankPlace) -> Store:
    """Return where the ranks find each other. Rank 0 of several machines listens for the others."""
    import torch.distributed as dist

    if place.local is None:
        return dist.FileStore(place.store, place.size)  # type: ignore[attr-defined]
    host, _, port = place.store.rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        place.size,
        is_master=place.rank == 0,
        timeout=_MEETING_TIME,
        wait_for_workers=False,
        master_listen_fd=place.local.listener,
    )


def _join(
    place: RankPlace, settings: EngineSettings, store: Store, find_failure: Callable[[], str]
) -> TorchRanks:
    import torch
    import torch.distributed as dist

    from slipstream.engine.memory.placement import place_rank
    from slipstream.kernels.torch_ranks import TorchRanks

    if dist.is_initialized():
        raise ValueError(
            f"ranks {place.size}: this process has a torch.distributed group already; run the "
            "engine in a process without one"
        )
    backend = "gloo"
    device = None
    local = (place.rank, place.size)
    if place.local is not None:
        local = (place.local.rank, place.local.size)
    if not cpu_probe.runs_on_cpu(settings):
        placement = place_rank(settings, *local, torch.cuda.device_count())
        device = torch.device("cuda", placement.device or 0)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    with _one_interface(place):
        # With a device, NCCL connects now and not in the first step.
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            device_id=device,
            timeout=None if place.local is None else _MEETING_TIME,
        )
    return TorchRanks(
        find_failure=find_failure, batch_invariant=settings.deterministic, local_place=local
    )


def disconnect(settings: EngineSettings) -> None:
    """Leave the group, so that this process can enter another one. With GPUs the process stays in
    it: NCCL would wait for captured graphs that the caller may still hold.
    """
    import torch.distributed as dist

    if dist.is_initialized() and cpu_probe.runs_on_cpu(settings):
        dist.destroy_process_group()


def start_leader(
    engine_folder: str,
    settings: EngineSettings,
    place: RankPlace,
    progress: Progress,
    find_failure: Callable[[], str] = lambda: "",
    compiler: CompilePool | None = None,
) -> EngineLoop:
    """Start the leading rank. The followers start at the same time, and meet it here.

    compiler: processes that compile the kernels of a GPU, for all ranks
    """
    store = open_store(place)
    listening = _listen(place, store)
    ranks = _join(place, settings, store, find_failure)

    from slipstream.engine.constraints.constraints import Constraints
    from slipstream.server.text.vocabulary import read_vocabulary
    from slipstream.weights.load import start_engine

    followers = listening or FollowerLinks(place.sockets, find_failure)
    loop = start_engine(engine_folder, settings, progress, compiler, ranks, followers)
    loop.constraints = Constraints(partial(read_vocabulary, engine_folder, loop.info.vocab_size))
    return loop


def _listen(place: RankPlace, store: Store) -> FollowerLinks | None:
    """Return the links to followers on other machines, and tell them where these listen."""
    if place.local is None:
        return None
    address = place.store.rpartition(":")[0]
    links = FollowerLinks.listen(address, place.size - 1, take_cluster_key())
    for rank, endpoint in enumerate(links.endpoints, start=1):
        store.set(_ENDPOINT.format(rank), endpoint)
    return links


def start_own_ranks(engine_folder: str, settings: EngineSettings) -> EngineLoop:
    """Start an engine of several ranks whose leading rank is in this process, for `slipstream.LLM`.

    The followers are processes, which end when the engine is closed.
    """
    config = read_engine_config(engine_folder)
    check_ranks(config.spec, config.quantisation, settings.ranks or 1)
    settings = cpu_probe.prepare(settings, config.spec)
    followers = FollowerProcesses(ENGINE_COMMAND, engine_folder, settings)
    wait_for_failure = partial(followers.find_failure, _FAILURE_SECONDS)
    try:
        loop = start_leader(
            engine_folder, settings, followers.place, show_progress, wait_for_failure
        )
    except BaseException:
        followers.kill()
        disconnect(settings)
        raise
    followers.remove_files()

    end_leader = loop.on_close

    def end_followers() -> None:
        end_leader()
        followers.close()
        disconnect(settings)

    loop.on_close = end_followers
    return loop


def run_follower(engine_folder: str, settings: EngineSettings, place: RankPlace) -> None:
    """Follow the leading rank until it ends this one."""
    settings = cpu_probe.bind_to_node(settings)
    settings = cpu_probe.prepare(settings, read_engine_config(engine_folder).spec)
    store = open_store(place)
    if place.local is None:
        link = LeaderLink(place.sockets[place.rank - 1])
    else:
        endpoint = store.get(_ENDPOINT.format(place.rank)).decode()
        link = LeaderLink(endpoint, take_cluster_key())
    ranks = _join(place, settings, store, lambda: "")

    from slipstream.engine.memory.garbage_collection import freeze_garbage_collector
    from slipstream.engine.ranks.following import follow
    from slipstream.weights.load import start_follower

    follower = start_follower(engine_folder, settings, ranks)
    freeze_garbage_collector()
    follow(follower, link.orders(), link.answer)
    link.close()


@contextmanager
def _one_interface(place: RankPlace) -> Iterator[None]:
    """Make gloo and NCCL listen on one interface only: loopback if all ranks are on this machine,
    else the one that leads to rank 0, unless the environment names another.
    """
    before = {name: os.environ.get(name) for name in _INTERFACE_VARIABLES}
    if place.local is None:
        chosen: dict[str, str] = dict.fromkeys(_INTERFACE_VARIABLES, "lo")
    else:
        interface = route_interface(place.store.rpartition(":")[0])
        chosen = {name: value or interface for name, value in before.items()}
    os.environ.update({name: value for name, value in chosen.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)

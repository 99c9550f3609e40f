"""Starts one rank of an engine: meets the others, then leads or follows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
from slipstream.engine_worker.progress import show_progress
from slipstream.server.engine_link.child import ENGINE_COMMAND
from slipstream.server.engine_link.link import RankPlace
from slipstream.server.engine_link.rank_link import FollowerLinks, LeaderLink
from slipstream.server.engine_link.rank_processes import FollowerProcesses
from slipstream.weights.engine_config import read_engine_config
from slipstream.weights.shards import check_ranks

if TYPE_CHECKING:
    from slipstream.engine.loop import EngineLoop, Progress
    from slipstream.kernels.gpu.compilation.pool import CompilePool
    from slipstream.kernels.ranks import TorchRanks

_FAILURE_SECONDS = 1.0  # from a broken connection until the end of the other process is known
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def connect(
    place: RankPlace, settings: EngineSettings, find_failure: Callable[[], str] = lambda: ""
) -> TorchRanks:
    """Meet the other ranks. find_failure: returns why another rank has ended, if that is known"""
    import torch
    import torch.distributed as dist

    from slipstream.engine.memory.placement import place_rank
    from slipstream.kernels.ranks import TorchRanks

    if dist.is_initialized():
        raise ValueError(
            f"ranks {place.size}: this process has a torch.distributed group already; run the "
            "engine in a process without one"
        )
    backend = "gloo"
    device = None
    if not cpu_probe.runs_on_cpu(settings):
        placement = place_rank(settings, place.rank, place.size, torch.cuda.device_count())
        device = torch.device("cuda", placement.device or 0)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    with _loopback_only():
        store = dist.FileStore(place.store, place.size)  # type: ignore[attr-defined]
        # With a device, NCCL connects now and not in the first step.
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, device_id=device
        )
    return TorchRanks(find_failure=find_failure, batch_invariant=settings.deterministic)


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
    ranks = connect(place, settings, find_failure)

    from slipstream.engine.constraints.constraints import Constraints
    from slipstream.server.text.vocabulary import read_vocabulary
    from slipstream.weights.load import start_engine

    followers = FollowerLinks(place.sockets, find_failure)
    loop = start_engine(engine_folder, settings, progress, compiler, ranks, followers)
    loop.constraints = Constraints(partial(read_vocabulary, engine_folder, loop.info.vocab_size))
    return loop


def start_own_ranks(engine_folder: str, settings: EngineSettings) -> EngineLoop:
    """Start an engine of several ranks whose leading rank is in this process, for `slipstream.LLM`.

    The followers are processes, which end when the engine is closed.
    """
    config = read_engine_config(engine_folder)
    check_ranks(config.spec, config.quantisation, settings.ranks or 1)
    settings = cpu_probe.prepare(settings)
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
    settings = cpu_probe.prepare(settings)
    link = LeaderLink(place.sockets[place.rank - 1])
    ranks = connect(place, settings)

    from slipstream.engine.memory.garbage_collection import freeze_garbage_collector
    from slipstream.engine.ranks.following import follow
    from slipstream.weights.load import start_follower

    follower = start_follower(engine_folder, settings, ranks)
    freeze_garbage_collector()
    follow(follower, link.orders(), link.answer)
    link.close()


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Let gloo and NCCL listen on the loopback interface only: all ranks are on this machine."""
    before = {name: os.environ.get(name) for name in _INTERFACE_VARIABLES}
    os.environ.update(dict.fromkeys(_INTERFACE_VARIABLES, "lo"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

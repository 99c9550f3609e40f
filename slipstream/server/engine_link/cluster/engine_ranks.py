"""The ranks of one start of an engine over several machines, or on another machine."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.cluster.division import find_local_place, ranks_per_process
from slipstream.server.engine_link.cluster.leader import RankHosts
from slipstream.server.engine_link.cluster.messages import StartRank
from slipstream.server.engine_link.cluster.remote import RemoteRank
from slipstream.server.engine_link.cluster.tunnels import Tunnels
from slipstream.server.engine_link.link import RankPlace
from slipstream.server.engine_link.visible_gpus import visible_gpus
from slipstream.weights.integrity import identify_folder


class EngineRanks:
    """The places of the ranks. The first ones are on this machine, for this process to start."""

    def __init__(self, hosts: RankHosts, engine_folder: str, settings: EngineSettings) -> None:
        self._hosts = hosts
        self._engine = hosts.next_engine()
        self._engine_folder = engine_folder
        self._identity = identify_folder(engine_folder)
        self._settings = settings
        self._ranks = settings.ranks or 1
        self._each = ranks_per_process(self._ranks, hosts.launched.size)
        self._gpus = visible_gpus(settings.device)
        # The ranks meet at this port. Rank 0 inherits it.
        self._listener = socket.create_server((hosts.address, 0))
        self._port = self._listener.getsockname()[1]

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables for the ranks on this machine: the cluster key."""
        return self._hosts.key.variables

    def is_remote(self, rank: int) -> bool:
        return rank >= self._each

    def place(self, rank: int) -> RankPlace:
        """Return the place of a rank on this machine. Raises ValueError without enough GPUs."""
        local = find_local_place(self._hosts.launched, self._gpus, rank, self._each)
        if rank == 0:
            local = replace(local, listener=self._listener.fileno())
        return replace(self._remote_place(rank), local=local)

    def start_remote(self, rank: int) -> RemoteRank:
        """Have the host of a rank start it."""
        start = StartRank(
            self._engine,
            self._engine_folder,
            self._identity,
            self._settings.to_json(),
            self._remote_place(rank),
            rank % self._each,
            self._each,
            self._gpus,
        )
        return self._hosts.start(rank // self._each, start)

    def _remote_place(self, rank: int) -> RankPlace:
        return RankPlace(rank, self._ranks, f"{self._hosts.address}:{self._port}", [])

    def remove(self) -> None:
        """Close the listening socket, which rank 0 has inherited."""
        self._listener.close()


class RemoteEngine:
    """All ranks of a replica that one process of another machine starts."""

    def __init__(
        self,
        hosts: RankHosts,
        engine_folder: str,
        settings: EngineSettings,
        process: int,
        paths: Sequence[Path],
    ) -> None:
        """process: of the launcher. paths: of the sockets that the front ends bind"""
        self._hosts = hosts
        self._engine = hosts.next_engine()
        self._engine_folder = engine_folder
        self._identity = identify_folder(engine_folder)
        self._settings = settings
        self._process = process
        self._tunnels = Tunnels(hosts.address, hosts.key, paths)

    def start(self, rank: int) -> RemoteRank:
        """Have the host start a rank."""
        ranks = self._settings.ranks or 1
        start = StartRank(
            self._engine,
            self._engine_folder,
            self._identity,
            self._settings.to_json(),
            RankPlace(rank, ranks, "", []),
            rank,
            ranks,
            visible_gpus(self._settings.device),
            whole=True,
            links=self._tunnels.endpoints if rank == 0 else [],
        )
        return self._hosts.start(self._process, start)

    def replace_link(self, before: Path, path: Path) -> str:
        """Lead a link to another path. Return the endpoint for the engine."""
        return self._tunnels.replace(before, path)

    def remove(self) -> None:
        """Have the host remove the files over which the ranks have met."""
        self._hosts.note_met(self._process, self._engine)

    def close(self) -> None:
        self.remove()
        self._tunnels.close()

"""A replica over several nodes: an actor on each other node runs a process of the launch there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slipstream.ray.server_process import ServerProcess, launch_variables, meeting_variables


class NodeRanks:
    """Runs a rank host. As Ray calls the methods of such an actor in one thread, the process lives
    as long as the actor.
    """

    def __init__(
        self, flags: Sequence[str], exit_timeout_seconds: float, variables: dict[str, str]
    ) -> None:
        self._process = ServerProcess(flags, exit_timeout_seconds, variables)

    def check_running(self) -> None:
        """Raise ServerFailed if the rank host has ended."""
        self._process.check_running()


class OtherNodes:
    """The actors on the other nodes of this replica's placement group. Its first bundle is the one
    of the replica, whose server is rank 0.
    """

    def __init__(self, flags: Sequence[str], exit_timeout_seconds: float) -> None:
        group = ray.util.get_current_placement_group()
        nodes = len(group.bundle_specs)
        shared = meeting_variables(ray.util.get_node_ip_address())
        job = group.id.hex()
        # of the server of this replica
        self.variables = shared | launch_variables(0, nodes, job)
        self._actors: list[Any] = []
        for rank in range(1, nodes):
            bundle = group.bundle_specs[rank]
            actor = ray.remote(NodeRanks).options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
            )
            variables = shared | launch_variables(rank, nodes, job)
            self._actors.append(actor.remote(list(flags), exit_timeout_seconds, variables))

    async def check_running(self) -> None:
        """Raise if an actor or its rank host has ended."""
        for actor in self._actors:
            await actor.check_running.remote()

    def kill(self) -> None:
        """End the actors, and what they run."""
        for actor in self._actors:
            ray.kill(actor)

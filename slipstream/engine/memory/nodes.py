"""NUMA nodes: cores and the memory near to them, one or more for each socket. No torch here.

Replicas on a CPU are placed one per node: a process that may only use the cores of a node gets its
memory from there.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from slipstream.engine.memory.control_groups import read_text
from slipstream.engine.settings import EngineSettings

logger = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")


class NodePlace(NamedTuple):
    """Where a replica runs."""

    node: int  # its number
    cores: frozenset[int]  # of the node that this process may use
    threads: int  # of each of the replica's processes


def usable_nodes(folder: Path = NODES) -> dict[int, frozenset[int]]:
    """Return the cores that this process may use, by the number of their node. Nodes without any
    are left out.
    """
    usable = os.sched_getaffinity(0)
    found: dict[int, frozenset[int]] = {}
    for path in sorted(folder.glob("node[0-9]*"), key=_number):
        cores = _parse_list(read_text(path / "cpulist")) & usable
        if cores:
            found[_number(path)] = frozenset(cores)
    return found


def place_replica(
    settings: EngineSettings, nodes: dict[int, frozenset[int]], cores: float
) -> NodePlace | None:
    """Return where a replica on a CPU runs; None: anywhere, as there is one node or one replica.

    Replicas take the nodes in turn, and those of a node divide its cores. cores: what all replicas
    may use together, by a quota
    """
    if settings.replicas < 2 or len(nodes) < 2:
        return None
    number = sorted(nodes)[settings.replica % len(nodes)]
    own = nodes[number]
    sharing = range(settings.replica % len(nodes), settings.replicas, len(nodes))
    before = sharing.index(settings.replica)
    most = len(own) // len(sharing) + (before < len(own) % len(sharing))
    quota = cores / sum(map(len, nodes.values()))
    most = int(most * min(1.0, quota)) // (settings.ranks or 1)
    return NodePlace(number, own, settings.threads or max(1, most))


def bind_replica(place: NodePlace) -> None:
    """Keep this process on the cores of a node. Memory that it takes from now on is the node's."""
    os.sched_setaffinity(0, place.cores)
    cores = len(place.cores)
    logger.info("runs on NUMA node %d (%d cores), %d threads", place.node, cores, place.threads)


def on_one_of_several_nodes(folder: Path = NODES) -> bool:
    """Return whether this process is kept on one node of a machine with several."""
    with_cores = [path for path in folder.glob("node[0-9]*") if read_text(path / "cpulist").strip()]
    return len(with_cores) > 1 and len(usable_nodes(folder)) == 1


def _number(path: Path) -> int:
    return int(path.name.removeprefix("node"))


def _parse_list(text: str) -> set[int]:
    """Return the numbers of a list such as 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found

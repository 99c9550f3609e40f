"""The servers of this machine: their processes, the ports they listen on, what they serve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.cli.models.repository_option import REPOSITORY_OPTIONS
from slipstream.repository.used_repositories import DEFAULT_REPOSITORY
from slipstream.server.log.process_state import read_age
from slipstream.weights.home import slipstream_home

PROCESSES = Path("/proc")
_LISTENING = "0A"  # state of a socket in /proc/net/tcp
# module or program: how many words lie before `start`; None: it is always a server
_MODULES = {
    "slipstream.cli.main": 0,
    "slipstream.cli.models.run": 1,
    "slipstream.cli.compat.tritonserver": None,
}
_PROGRAMS = {"slipstream": 0, "triton": 0, "tritonserver": None}
_COMMAND_WORDS = (["start"], ["serve"])


@dataclass(frozen=True)
class RunningServer:
    process: int
    seconds: float  # since it started
    ports: tuple[int, ...]
    serves: str  # a model or a repository, as the command line names it
    own: bool = True  # whether this user has started it, with this SLIPSTREAM_HOME


def listening_sockets(processes: Path = PROCESSES) -> dict[str, int]:
    """Return the ports that programs listen on, by socket as the links in /proc/<id>/fd name it."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (processes / "net" / table).read_text().splitlines()[1:]:
                row = line.split()
                if row[3] == _LISTENING:
                    sockets[f"socket:[{row[9]}]"] = int(row[1].rpartition(":")[2], 16)
    return sockets


def find_servers(processes: Path = PROCESSES) -> list[RunningServer]:
    """Return the servers that run, the oldest first. Ports of other users' servers are unknown."""
    sockets = listening_sockets(processes)
    found = []
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            arguments = server_arguments(words)
            if arguments is not None:
                seconds = read_age(folder)
                ports = _ports(folder, sockets)
                process = int(folder.name)
                serves = _serves(arguments)
                found.append(RunningServer(process, seconds, ports, serves, _is_own(folder)))
    return sorted(found, key=lambda server: -server.seconds)


def server_arguments(words: Sequence[str]) -> list[str] | None:
    """Return the arguments of a command line that runs a server; None for any other."""
    if not words or not Path(words[0]).name.startswith("python"):
        return None
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest.pop(0)
    known: dict[str, int | None] = _PROGRAMS
    name = Path(rest.pop(0)).name if rest else ""
    if name == "-m":
        known = _MODULES
        name = rest.pop(0) if rest else ""
    if name not in known:
        return None
    before = known[name]
    if before is None:
        return rest
    return rest[before + 1 :] if rest[before : before + 1] in _COMMAND_WORDS else None


def _is_own(folder: Path) -> bool:
    if folder.stat().st_uid != os.getuid():
        return False
    try:
        words = (folder / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
    except PermissionError:
        return False
    variables = dict(word.partition("=")[::2] for word in words)
    home = variables.get("SLIPSTREAM_HOME")
    if not home:
        user_home = variables.get("HOME")
        home = f"{user_home}/.cache/slipstream" if user_home else str(slipstream_home())
    return os.path.realpath(os.path.expanduser(home)) == os.path.realpath(slipstream_home())


def _ports(folder: Path, sockets: dict[str, int]) -> tuple[int, ...]:
    ports = set()
    with suppress(PermissionError):
        for descriptor in (folder / "fd").iterdir():
            with suppress(OSError):
                ports.add(sockets.get(os.readlink(descriptor), 0))
    return tuple(sorted(ports - {0}))


def _serves(arguments: Sequence[str]) -> str:
    """Return the model or the repository. The other arguments may hold secrets."""
    for position, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") in REPOSITORY_OPTIONS:
            return value if equals else "".join(arguments[position + 1 : position + 2])
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    return str(DEFAULT_REPOSITORY)

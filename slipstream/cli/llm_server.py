"""The server of `LLM.serve`: `slipstream start` with the engine of the process that started it.

    python -m slipstream.cli.llm_server PARENT SOCKET OPTIONS...

It ends with the process PARENT, which shares its engine at SOCKET. OPTIONS are those of
`slipstream start`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slipstream.cli import start
from slipstream.cli.arguments import CommandError
from slipstream.server.log.parent_death import die_with

_PROXY = "slipstream.engine_worker.shared_engine_proxy"


def main(parent: int, place: str, words: Sequence[str]) -> int:
    """Serve until a signal. Returns the exit code."""
    if not die_with(parent):
        return 1
    command = (sys.executable, "-P", "-m", _PROXY, place)
    try:
        return start.serve(start.create_parser().parse(words), command)
    except CommandError as error:  # the reason is the last line of the log
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))

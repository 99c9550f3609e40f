"""The engine process: `python -m slipstream.engine_worker.process ORDER`. The server starts and
watches it.

ORDER is the JSON form of `link.StartOrder`. Torch is loaded here, and only
after the CPU probe has set the environment that torch reads.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.engine.memory.cores import usable_cores
from slipstream.engine.memory.garbage_collection import freeze_garbage_collector
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
from slipstream.engine_worker.progress import show_progress
from slipstream.kernels.gpu.compilation.pool import CompilePool, start_pool
from slipstream.kernels.rank_errors import RankLost
from slipstream.server.engine_link.engine_end import EngineEnd
from slipstream.server.engine_link.link import (
    EXIT_WITH_REASON,
    EngineFailed,
    RankPlace,
    StartOrder,
)
from slipstream.server.engine_link.serve import Loop, describe, serve
from slipstream.server.log.capture import capture_python_reports
from slipstream.server.log.formats import RELAYED
from slipstream.server.log.output import configure_log
from slipstream.server.log.parent_death import die_with
from slipstream.weights.engine_config import read_engine_config

if TYPE_CHECKING:
    from slipstream.server.engine_link.cluster.key import ClusterKey

logger = logging.getLogger("slipstream.engine_worker.process")

StartLoop = Callable[[str, EngineSettings, RankPlace | None], Loop]
# A rank that cannot reach another one waits this long before it ends. The server notices the end of
# the other one meanwhile, which is the cause.
_LOST_RANK_SECONDS = 2.0


def start_real_engine(
    engine_folder: str, settings: EngineSettings, place: RankPlace | None = None
) -> Loop:
    """Start an engine. place: of this process, if the server has started the other ranks"""
    settings = cpu_probe.bind_to_node(settings)
    if place is None and settings.ranks is not None and settings.ranks > 1:
        # imported here and below: an engine of one rank starts faster without the rest
        from slipstream.engine_worker.ranks import start_own_ranks

        return start_own_ranks(engine_folder, settings)
    on_gpu = not cpu_probe.runs_on_cpu(settings)
    compiler = _start_compiling(engine_folder, settings) if on_gpu else None
    try:
        settings = cpu_probe.prepare(settings, read_engine_config(engine_folder).spec)
        if place is not None:
            from slipstream.engine_worker.ranks import start_leader

            return start_leader(engine_folder, settings, place, show_progress, compiler=compiler)
        return _start_one_rank(engine_folder, settings, compiler)
    finally:
        if compiler is not None:
            compiler.close()


def _start_compiling(engine_folder: str, settings: EngineSettings) -> CompilePool | None:
    return start_pool(_kernels_of(engine_folder, settings), int(usable_cores()))


def _start_one_rank(
    engine_folder: str, settings: EngineSettings, compiler: CompilePool | None
) -> Loop:
    from slipstream.engine.constraints.constraints import Constraints
    from slipstream.server.text.vocabulary import read_vocabulary
    from slipstream.weights.load import start_engine

    loop = start_engine(engine_folder, settings, show_progress, compiler)
    loop.constraints = Constraints(partial(read_vocabulary, engine_folder, loop.info.vocab_size))
    return loop


def _kernels_of(engine_folder: str, settings: EngineSettings) -> str:
    """Return a text that decides which kernels an engine needs."""
    config = Path(engine_folder, "config.json")
    shape = config.read_text() if config.is_file() else ""  # the loader reports it
    return shape + json.dumps(settings.to_json())


def main(start_loop: StartLoop = start_real_engine) -> int:
    """Serve as the order on the command line says. Returns the exit code."""
    order = msgspec.json.decode(sys.argv[1], type=StartOrder)
    if not die_with(order.parent_process):
        return 1
    _prepare_signals()
    link = EngineEnd(order.sockets, _key_of(order))
    settings = EngineSettings.from_json(order.settings)
    if order.place is not None and order.place.rank > 0:
        return _follow(link, order.engine_folder, settings, order.place)
    try:
        loop = start_loop(order.engine_folder, settings, order.place)
    except Exception as error:
        expected = isinstance(error, OSError | ValueError)  # their text is meant for the user
        return _leave(link, error, with_traceback=not expected)
    freeze_garbage_collector()
    try:
        link.send(loop.info)
        serve(loop, link)
        loop.close()
    except Exception as error:
        return _leave(link, error, with_traceback=True)
    link.close()
    return 0


def _key_of(order: StartOrder) -> ClusterKey | None:
    """Return the key of links to another machine; None: they are Unix sockets."""
    if not any(socket.startswith("tcp://") for socket in order.sockets):
        return None
    from slipstream.server.engine_link.cluster.key import take_cluster_key

    return take_cluster_key()


def _follow(link: EngineEnd, engine_folder: str, settings: EngineSettings, place: RankPlace) -> int:
    """Run a following rank. Returns the exit code."""
    from slipstream.engine_worker.ranks import run_follower

    try:
        run_follower(engine_folder, settings, place)
    except Exception as error:
        return _leave(link, error, with_traceback=not isinstance(error, OSError | ValueError))
    link.close()
    return 0


def _leave(link: EngineEnd, error: Exception, with_traceback: bool) -> int:
    if isinstance(error, RankLost):
        time.sleep(_LOST_RANK_SECONDS)
        with_traceback = False
    reason = describe(error)
    logger.error(
        "the engine process leaves: %s", reason, exc_info=error if with_traceback else None
    )
    link.send(EngineFailed(reason))
    link.close()
    return EXIT_WITH_REASON


def _prepare_signals() -> None:
    # Ctrl-C and a supervisor's SIGTERM reach the whole group, but admitted work has to finish
    # first: the server decides when the engine leaves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def run(start_loop: StartLoop = start_real_engine) -> None:
    """`main`, then leave at once: tearing down torch's thread pools takes long and can crash."""
    # Without a terminal the standard error stream is the server's pipe.
    configure_log(format="default" if sys.stderr.isatty() else RELAYED)
    with capture_python_reports():
        code = main(start_loop)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()

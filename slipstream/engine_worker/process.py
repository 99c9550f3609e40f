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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from slipstream.engine.memory.garbage_collection import freeze_garbage_collector
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
from slipstream.kernels.gpu.compilation.pool import start_pool
from slipstream.server.engine_link.engine_end import EngineEnd
from slipstream.server.engine_link.link import (
    EXIT_WITH_REASON,
    EngineFailed,
    StartOrder,
)
from slipstream.server.engine_link.serve import Loop, describe, serve
from slipstream.server.log.capture import capture_python_reports
from slipstream.server.log.formats import RELAYED
from slipstream.server.log.output import configure_log
from slipstream.server.log.parent import die_with

logger = logging.getLogger("slipstream.engine_worker.process")

StartLoop = Callable[[str, EngineSettings], Loop]


def start_real_engine(engine_folder: str, settings: EngineSettings) -> Loop:
    on_gpu = not cpu_probe.runs_on_cpu(settings)
    compiler = start_pool(_kernels_of(engine_folder, settings)) if on_gpu else None
    settings = cpu_probe.prepare(settings)
    from slipstream.engine.constraints.constraints import Constraints
    from slipstream.server.text.vocabulary import read_vocabulary
    from slipstream.weights.load import start_engine

    try:
        loop = start_engine(engine_folder, settings, show_progress, compiler)
    finally:
        if compiler is not None:
            compiler.close()
    loop.constraints = Constraints(partial(read_vocabulary, engine_folder, loop.info.vocab_size))
    return loop


def _kernels_of(engine_folder: str, settings: EngineSettings) -> str:
    """Return a text that decides which kernels an engine needs."""
    config = Path(engine_folder, "config.json")
    shape = config.read_text() if config.is_file() else ""  # the loader reports it
    return shape + json.dumps(settings.to_json())


def show_progress(phase: str, done: int, total: int) -> None:
    """Show how far a phase of the start has come: a bar on a terminal, a line each quarter
    elsewhere.
    """
    if sys.stderr.isatty():
        bar = "#" * (30 * done // total)
        sys.stderr.write(f"\r  {phase:<24} [{bar:<30}] {done}/{total}" + "\n" * (done == total))
        sys.stderr.flush()
    elif 4 * done // total > 4 * (done - 1) // total:
        logger.info("%s: %d of %d", phase, done, total)


def main(start_loop: StartLoop = start_real_engine) -> int:
    """Serve as the order on the command line says. Returns the exit code."""
    order = msgspec.json.decode(sys.argv[1], type=StartOrder)
    if not die_with(order.parent_process):
        return 1
    _prepare_signals()
    link = EngineEnd(order.sockets)
    try:
        loop = start_loop(order.engine_folder, EngineSettings.from_json(order.settings))
    except Exception as error:
        expected = isinstance(error, OSError | ValueError)  # their text is meant for the user
        return _leave(link, error, with_traceback=not expected)
    freeze_garbage_collector()
    try:
        link.send(loop.info)
        serve(loop, link)
    except Exception as error:
        return _leave(link, error, with_traceback=True)
    link.close()
    return 0


def _leave(link: EngineEnd, error: Exception, with_traceback: bool) -> int:
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

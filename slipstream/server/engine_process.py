"""The engine process: `python -m slipstream.server.engine_process ORDER`. The server starts and
watches it.

ORDER is the JSON form of `link.StartOrder`. This is the only file under `server/` behind which
torch is loaded, and only after the CPU trial has set the environment torch reads. `serve` is also
what the in-process engine's thread runs, over a link of its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import msgspec

from slipstream.engine.messages import EngineInfo, EngineStats, Shutdown, StepOutputs
from slipstream.engine.request import FinishReason, GenerateRequest
from slipstream.engine.settings import EngineSettings
from slipstream.server import cpu_probe, logging
from slipstream.server.garbage import spare_what_is_there
from slipstream.server.link import (
    EXIT_WITH_REASON,
    EngineEnd,
    EngineFailed,
    FromEngine,
    StartOrder,
    ToEngine,
)
from slipstream.server.log_capture import told_by_python

STATS_SECONDS = 0.1
INTEGRITY_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class Loop(Protocol):
    """What `engine.loop.EngineLoop` offers."""

    info: EngineInfo

    def submit(self, request: GenerateRequest) -> None: ...
    def cancel(self, request_ids: list[int], reason: FinishReason = "cancelled") -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> StepOutputs | None: ...
    def stats(self) -> EngineStats: ...
    def check_integrity(self) -> None: ...


class LoopLink(Protocol):
    """The engine's side of a link, to another process or to another thread."""

    def send(self, message: FromEngine) -> None: ...
    def wait(self, seconds: float | None) -> bool: ...
    def receive_waiting(self) -> list[ToEngine]: ...


StartLoop = Callable[[str, EngineSettings], Loop]


def serve(loop: Loop, link: LoopLink) -> None:
    """Run until told to shut down: all waiting messages, one step, one message with its news."""
    next_stats = next_check = 0.0
    while True:
        if not loop.has_work():
            next_check = _rest(loop, link, next_check)
        for message in link.receive_waiting():
            if isinstance(message, Shutdown):
                return
            _apply(loop, message)
        outputs = loop.step()
        if outputs is not None:
            link.send(outputs)
        if time.monotonic() >= next_stats:
            link.send(loop.stats())
            next_stats = time.monotonic() + STATS_SECONDS


def _apply(loop: Loop, message: ToEngine) -> None:
    if isinstance(message, GenerateRequest):
        loop.submit(message)
    elif not isinstance(message, Shutdown):
        loop.cancel(message.request_ids, cast(FinishReason, message.reason))


def _rest(loop: Loop, link: LoopLink, next_check: float) -> float:
    """Sleep until there is a message. Check the books meanwhile, at most once a second."""
    link.send(loop.stats())
    if link.wait(max(0.0, next_check - time.monotonic())):
        return next_check
    loop.check_integrity()
    checked = time.monotonic()
    link.wait(None)
    return checked + INTEGRITY_SECONDS


def start_real_engine(engine_folder: str, settings: EngineSettings) -> Loop:
    settings = cpu_probe.prepare(settings)
    from slipstream.engine.constraints import Constraints
    from slipstream.server.text.vocabulary import read_vocabulary
    from slipstream.weights.load import start_engine

    loop = start_engine(engine_folder, settings, show_capture)
    loop.constraints = Constraints(partial(read_vocabulary, engine_folder, loop.info.vocab_size))
    return loop


def show_capture(done: int, total: int) -> None:
    """How far the capture of decode steps has come: a bar on a terminal, a line each quarter
    elsewhere.
    """
    if sys.stderr.isatty():
        bar = "#" * (30 * done // total)
        sys.stderr.write(
            f"\r  capturing decode steps [{bar:<30}] {done}/{total}" + "\n" * (done == total)
        )
        sys.stderr.flush()
    elif 4 * done // total > 4 * (done - 1) // total:
        logging.info(f"captured {done} of {total} decode steps")


def main(start_loop: StartLoop = start_real_engine) -> int:
    """Serve as the order on the command line says. Returns the exit code."""
    order = msgspec.json.decode(sys.argv[1], type=StartOrder)
    if not _die_with(order.parent_process):
        return 1
    _prepare_signals()
    link = EngineEnd(order.socket)
    try:
        loop = start_loop(order.engine_folder, EngineSettings.from_json(order.settings))
    except Exception as error:
        expected = isinstance(error, OSError | ValueError)  # their text is meant for the user
        return _leave(link, error, with_traceback=not expected)
    spare_what_is_there()
    try:
        link.send(loop.info)
        serve(loop, link)
    except Exception as error:
        return _leave(link, error, with_traceback=True)
    link.close()
    return 0


def _leave(link: EngineEnd, error: Exception, with_traceback: bool) -> int:
    reason = describe(error)
    trace = "\n" + "".join(traceback.format_exception(error)).rstrip() if with_traceback else ""
    logging.error(f"the engine process leaves: {reason}{trace}")
    link.send(EngineFailed(reason))
    link.close()
    return EXIT_WITH_REASON


def describe(error: Exception) -> str:
    """One line a client may see: the kind and the first line of the text."""
    text = str(error).strip().partition("\n")[0][:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _die_with(parent_process: int) -> bool:
    """Ask the kernel to kill this process when its parent ends. False when the parent has ended
    already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent_process


def _prepare_signals() -> None:
    # Ctrl-C and a supervisor's SIGTERM reach the whole group, but admitted work has to finish
    # first: the server decides when the engine leaves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def run(start_loop: StartLoop = start_real_engine) -> None:
    """`main`, then leave at once: tearing down torch's thread pools takes long and can crash."""
    if not sys.stderr.isatty():  # it is the server's pipe
        logging.configure(format=logging.RELAYED)
    with told_by_python():
        code = main(start_loop)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()

"""From a repository to a server that answers, and back to nothing: start, drain, leave.

The order matters. The repository is read and the ports are taken first, so that a mistake is told
at once. Then the engine process starts to load, and only then does this process import its web
stack, which takes as long. Ports begin to listen when the engines serve, as with Triton: until then
a client is refused and tries again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.repository.models import Repository, inspect_repository
from slipstream.repository.reading import Reading
from slipstream.server.engine_link.memory_table import memory_table
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.garbage import spare_what_is_there
from slipstream.server.kserve.health import ServerState
from slipstream.server.log.output import HANDLER
from slipstream.server.options import ALL_MODELS, Port, ServerOptions

if TYPE_CHECKING:
    from slipstream.server.model_factories import ModelFactory
    from slipstream.server.services import Services

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)

# gRPC's library looks at this as it is imported. Its sockets are then read by whoever takes its
# events, and not by threads of its own, which would have to wake somebody for every call.
GRPC_READING = ("GRPC_EXPERIMENTS", "-event_engine_listener")


class StartFailed(Exception):
    """The server cannot start. The text is the cause and what to do about it."""


class ModelsFailed(StartFailed):
    """Not all models could be loaded, and the server was told not to run without them."""


def run_server(options: ServerOptions) -> int:
    """Serve until a signal or a failure. Returns the exit code; StartFailed is the way a failure
    ends it.
    """
    early_signals: list[int] = []  # those that come before the event loop can take them
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: early_signals.append(number))
    factories = _factories(options)
    reading = _read(options, factories)
    for warning in reading.problems.warnings:
        logger.warning(str(warning))
    _warn_of_exposure(options)
    sockets = _Sockets(options)
    engines = EnginePool(options.engine_settings, options.supervision, options.engine_command)
    try:
        wanted = _wanted(options, reading)
        for name in reading.engines_of(wanted):
            engines.spawn(reading.repository.engines[name])
        import uvloop

        server = _Server(options, reading, wanted, engines, sockets, factories)
        return uvloop.run(server.run(early_signals))
    finally:
        engines.kill()
        sockets.close()


def _factories(options: ServerOptions) -> list[ModelFactory]:
    if not options.allow_python_models:
        return []
    from slipstream.server.python_models.factory import PythonModels
    from slipstream.server.python_models.rate_limiter import RateLimiter

    limiter = None if options.rate_limits is None else RateLimiter(options.rate_limits)
    return [PythonModels(limiter, options.complete_config)]


def _read(options: ServerOptions, factories: Sequence[ModelFactory]) -> Reading:
    try:
        reading = Reading(
            *inspect_repository(
                options.repositories, lambda model: any(f.claims(model) for f in factories)
            )
        )
    except OSError as error:
        places = ", ".join(str(path) for path in options.repositories)
        raise StartFailed(f"cannot read the model repository {places}: {error.strerror}") from error
    missing = [path for path in options.repositories if not path.is_dir()]
    if reading.problems.errors and (
        missing or (options.exit_on_error and options.control_mode == "none")
    ):
        for problem in reading.problems.errors:
            logger.error(str(problem))
        count = len(reading.problems.errors)
        places = ", ".join(str(path) for path in options.repositories)
        found = (
            str(reading.problems.errors[0])
            if count == 1
            else f"{count} problems in {places}, listed above"
        )
        raise ModelsFailed(f"cannot serve the model repository: {found}")
    return reading


def _wanted(options: ServerOptions, reading: Reading) -> list[str]:
    """The models to load at the start."""
    names = list(reading.repository.models)
    if options.control_mode != "explicit":
        return names
    chosen = names if ALL_MODELS in options.load_models else []
    return list(
        dict.fromkeys([*chosen, *(name for name in options.load_models if name != ALL_MODELS)])
    )


def _warn_of_exposure(options: ServerOptions) -> None:
    """One block, once, where strangers can reach what they should not use unasked."""
    exposed = sorted({address for address in options.addresses if not _is_loopback(address)})
    if exposed and not options.access.guarded:
        logger.warning(
            "listening at %s without an API key: whoever can reach this machine can use its models, "
            "unasked. Set --api-key (a file, or the variable SLIPSTREAM_API_KEY), or listen at "
            "127.0.0.1 only.",
            ", ".join(exposed),
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1")


class _Sockets:
    """The ports, taken before anything slow happens; they do not listen yet."""

    def __init__(self, options: ServerOptions) -> None:
        self._taken: list[socket.socket] = []
        try:
            self.http = self._taken_port(options.http, "--http-port")
            self.metrics = self._taken_port(options.metrics, "--metrics-port")
            # gRPC opens its own; this one only tells whether it will be able to.
            grpc = self._taken_port(options.grpc, "--grpc-port")
            if grpc is not None:
                grpc.close()
        except StartFailed:
            self.close()
            raise

    def _taken_port(self, port: Port, option: str) -> socket.socket | None:
        return self._take(port.address, port.number, option) if port.open else None

    def _take(self, address: str, port: int, option: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        taken = socket.socket(family, socket.SOCK_STREAM)
        self._taken.append(taken)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((address, port))
        except OverflowError as error:
            raise StartFailed(f"{option} must be 0 to 65535, got {port}") from error
        except OSError as error:
            remedy = f"stop what uses it or choose another port with {option}"
            raise StartFailed(f"cannot use {address}:{port}: {error.strerror}; {remedy}") from error
        return taken

    def close(self) -> None:
        for taken in self._taken:
            taken.close()


class _Server:
    def __init__(
        self,
        options: ServerOptions,
        reading: Reading,
        wanted: list[str],
        engines: EnginePool,
        sockets: _Sockets,
        factories: Sequence[ModelFactory],
    ) -> None:
        self._options = options
        self._reading = reading
        self._wanted = wanted
        self._engines = engines
        self._sockets = sockets
        self._factories = factories
        self._state = ServerState(engines)
        self._told_to_stop = asyncio.Event()

    async def run(self, early_signals: list[int]) -> int:
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        if early_signals:
            return 0
        self._engines.attend()
        await asyncio.sleep(0)  # so that the engines are watched from here on
        os.environ.setdefault(*GRPC_READING)
        from slipstream.server.services import Services

        spare_what_is_there()  # all but models, which may go again
        try:
            services = Services(self._options, self._engines, self._state, self._factories)
            loading = asyncio.ensure_future(services.load(self._wanted, self._reading))
            if not await self._first(loading):
                return 0
            _log_models(services.loader.rows(), self._engines)
            self._check_loaded(services, loading.result())
            await services.open(self._sockets.http, self._sockets.metrics)
        except (
            OSError,
            ValueError,
        ) as error:  # a port that was taken meanwhile, a certificate that is none
            places = ", ".join(str(path) for path in self._options.repositories)
            raise StartFailed(f"cannot serve {places}: {error}") from error
        if self._options.announce:
            self._announce()
        return await self._serve(services)

    def _check_loaded(self, services: Services, failed: dict[str, str]) -> None:
        if not failed or not self._options.exit_on_error:
            return
        engine = next((name for name in failed if name in self._reading.repository.engines), None)
        if engine is not None:
            raise ModelsFailed(
                f"the engine did not start: {services.loader.reason(engine).removeprefix('Internal: ')}"
            )
        name, reason = next(iter(failed.items()))
        raise ModelsFailed(f"model '{name}' did not load: {reason}")

    async def _serve(self, services: Services) -> int:
        polling = None
        if self._options.control_mode == "poll":
            polling = asyncio.ensure_future(services.loader.poll(self._options.poll_seconds))
        failed = asyncio.ensure_future(self._engines.wait_failed())
        try:
            if await self._first(failed):
                await services.close()
                await self._engines.stop()
                raise StartFailed(f"the engine failed for good: {failed.result()}")
        finally:
            if polling is not None:
                polling.cancel()
        await self._drain(services)
        await services.close()
        await self._engines.stop()
        return 0

    async def _first(self, event: asyncio.Future[Any]) -> bool:
        """True when `event` comes first, False when the order to stop does. Raises what the event
        raises.
        """
        stop = asyncio.ensure_future(self._told_to_stop.wait())
        await asyncio.wait([stop, event], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if event.done():
            event.result()
            return True
        event.cancel()
        return False

    async def _drain(self, services: Services) -> None:
        """Refuse new work, finish what was admitted, but not beyond the exit timeout."""
        self._state.draining = True
        self._engines.begin_drain()
        under_way = self._engines.outstanding + services.loader.under_way
        logger.info("Waiting for in-flight requests to complete: %d now", under_way)
        idle = asyncio.gather(self._engines.wait_drained(), services.loader.wait_idle())
        try:
            await asyncio.wait_for(idle, self._options.exit_timeout_seconds)
        except TimeoutError:
            seconds = self._options.exit_timeout_seconds
            logger.warning(
                "requests still run after %g s (--exit-timeout-secs) and are given up", seconds
            )
            await self._engines.stop()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._told_to_stop.is_set():
            self._told_to_stop.set()
            return
        logger.warning("second %s: leaving at once", number.name)
        self._engines.kill()
        os._exit(128 + number)

    def _announce(self) -> None:
        """What a person wants next: where everything is, and a command that shows it works."""
        if self._sockets.http is None:
            return
        address = self._options.http.address
        host = "localhost" if address in ("0.0.0.0", "::") else address
        port = self._sockets.http.getsockname()[1]
        place = f"API docs: http://{host}:{port}/docs"
        if self._sockets.metrics is not None:
            place += f"   metrics: http://{host}:{self._sockets.metrics.getsockname()[1]}/metrics"
        lines = [place]
        repository = self._reading.repository
        if repository.chains:
            guarded = self._options.access.guarded
            chat = f"slipstream chat -u {host}:{port}"
            # A browser cannot bring a key.
            chat = (
                f"{chat} --api-key YOUR_KEY_FILE" if guarded else f"http://{host}:{port}/ or {chat}"
            )
            lines.insert(0, f"OpenAI:   http://{host}:{port}/v1   chat: {chat}")
            body = json.dumps({"text_input": "What is machine learning?", "max_tokens": 64})
            url = f"http://{host}:{port}/v2/models/{_model_to_show(repository)}/generate"
            key = "-H 'Authorization: Bearer YOUR_KEY' " if guarded else ""
            lines.insert(0, f"Try it:   curl -s {key}{url} -d '{body}'")
        lines.insert(0, self._time_taken())
        if HANDLER.settings.format == "json":
            logger.info("\n".join(lines))
        else:
            print("\n".join(lines), flush=True)

    def _time_taken(self) -> str:
        """Engines load side by side, so the slowest of them is what a start waits for."""
        whole = round(_process_seconds(), 1)
        loads = [
            round(engine.info.load_seconds, 1)
            for _, engine in self._engines.items()
            if engine.info is not None
        ]
        parts = (
            f": {max(loads):.1f} s to load, {whole - max(loads):.1f} s for all else"
            if loads
            else ""
        )
        return f"Ready:    in {whole:.1f} s{parts}"


def _process_seconds() -> float:
    """Since this process began."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def _model_to_show(repository: Repository) -> str:
    """The text model somebody named; `ensemble` and `tensorrt_llm_bls` are in every repository."""
    customary = ("ensemble", "tensorrt_llm_bls")
    return min(repository.chains, key=lambda name: (name in customary, name))


def _log_models(rows: list[tuple[str, str, str]], engines: EnginePool) -> None:
    """Triton's table of models, and how each engine uses the machine."""
    widths = [
        max(len(row[column]) for row in [("Model", "Version", "Status"), *rows])
        for column in range(3)
    ]

    def line(cells: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            + " |"
        )

    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    shown = [tuple(cell.replace("\n", " ") for cell in row) for row in rows]
    table = [rule, line(("Model", "Version", "Status")), rule, *(line(row) for row in shown), rule]
    logger.info("\n" + "\n".join(table) + "\n", extra={"place": "server.cc:674"})
    for name, engine in engines.items():
        if (info := engine.info) is not None:
            logger.info("\n".join(memory_table(name, info)) + "\n", extra={"model": name})

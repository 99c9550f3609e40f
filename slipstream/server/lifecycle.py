"""From a repository to a server that answers, and back to nothing: start, drain, leave.

The order matters. The repository is read and the ports are taken first, so that a mistake is told at once. Then
the engine process starts to load, and only then does this process import its web stack, which takes as long.
Ports begin to listen when the engines serve, as with Triton: until then a client is refused and tries again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.repository.models import Repository, read_repository
from slipstream.repository.problems import RepositoryError
from slipstream.server import logging
from slipstream.server.engine_child import ENGINE_COMMAND
from slipstream.server.engine_client import EngineClient, EngineStartFailed, Supervision
from slipstream.server.health import ServerState

if TYPE_CHECKING:
    from slipstream.server.services import Services

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StartFailed(Exception):
    """The server cannot start. The text is the cause and what to do about it."""


@dataclass(frozen=True)
class ServerOptions:
    repository: Path
    address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    exit_timeout_seconds: float = 30.0
    engine_settings: dict[str, Any] = field(default_factory=dict)  # win over what the repository says
    supervision: Supervision = field(default_factory=Supervision)
    engine_command: Sequence[str] = ENGINE_COMMAND


def run_server(options: ServerOptions) -> int:
    """Serve until a signal or a failure. Returns the exit code; StartFailed is the way a failure ends it."""
    early_signals: list[int] = []  # those that come before the event loop can take them
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: early_signals.append(number))
    repository = _read(options.repository)
    for warning in repository.warnings:
        logging.warning(str(warning))
    _warn_of_exposure(options.address)
    sockets = _Sockets(options)
    engines: dict[str, EngineClient] = {}
    try:
        _spawn(repository, options, engines)
        import uvloop

        return uvloop.run(_Server(options, repository, engines, sockets).run(early_signals))
    finally:
        for engine in engines.values():
            engine.kill()
        sockets.close()


def _read(path: Path) -> Repository:
    try:
        return read_repository(path)
    except RepositoryError as error:
        for problem in error.problems:
            logging.error(str(problem))
        count = len(error.problems)
        found = str(error.problems[0]) if count == 1 else f"{count} problems in {path}, listed above"
        raise StartFailed(f"cannot serve the model repository: {found}") from error
    except OSError as error:
        raise StartFailed(f"cannot read the model repository {path}: {error.strerror}") from error


def _warn_of_exposure(address: str) -> None:
    if not (address.startswith("127.") or address in ("localhost", "::1")):
        logging.warning(f"listening at {address}: whoever can reach this machine can use its models, unasked")


def _spawn(repository: Repository, options: ServerOptions, engines: dict[str, EngineClient]) -> None:
    for name, model in repository.engines.items():
        settings = replace(model.settings, **options.engine_settings)
        engines[name] = EngineClient(model.engine.path, settings, options.supervision, options.engine_command)
        engines[name].spawn()


class _Sockets:
    """The ports, taken before anything slow happens; they do not listen yet."""

    def __init__(self, options: ServerOptions) -> None:
        self._taken: list[socket.socket] = []
        try:
            self.http = self._take(options.address, options.http_port, "--http-port")
            self.metrics = self._take(options.address, options.metrics_port, "--metrics-port")
            # gRPC opens its own; this one only tells whether it will be able to.
            self._take(options.address, options.grpc_port, "--grpc-port").close()
        except StartFailed:
            self.close()
            raise

    def _take(self, address: str, port: int, option: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        taken = socket.socket(family, socket.SOCK_STREAM)
        self._taken.append(taken)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((address, port))
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
        repository: Repository,
        engines: dict[str, EngineClient],
        sockets: _Sockets,
    ) -> None:
        self._options = options
        self._repository = repository
        self._engines = engines
        self._sockets = sockets
        self._state = ServerState(engines.values())
        self._told_to_stop = asyncio.Event()

    async def run(self, early_signals: list[int]) -> int:
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        if early_signals:
            return 0
        loading = asyncio.gather(*(engine.start() for engine in self._engines.values()))
        await asyncio.sleep(0)  # so that the engines are watched from here on
        from slipstream.server.services import Services

        try:
            services = Services(self._options.address, self._repository, self._engines, self._state)
            if not await self._first(loading):
                return 0
            _log_models(self._repository, self._engines)
            await services.open(self._sockets.http, self._sockets.metrics, self._options.grpc_port)
        except EngineStartFailed as error:
            raise StartFailed(f"the engine did not start: {error}") from error
        except (OSError, ValueError) as error:  # a damaged tokenizer, a port that was taken meanwhile
            raise StartFailed(f"cannot serve {self._options.repository}: {error}") from error
        self._announce()
        return await self._serve(services)

    async def _serve(self, services: Services) -> int:
        failures = [asyncio.ensure_future(engine.wait_failed()) for engine in self._engines.values()]
        failed = asyncio.ensure_future(asyncio.wait(failures, return_when=asyncio.FIRST_COMPLETED))
        if await self._first(failed):
            reason = next(failure.result() for failure in failures if failure.done())
            await services.close()
            await self._stop_engines()
            raise StartFailed(f"the engine failed for good: {reason}")
        failed.cancel()
        await self._drain()
        await services.close()
        await self._stop_engines()
        return 0

    async def _first(self, event: asyncio.Future[Any]) -> bool:
        """True when `event` comes first, False when the order to stop does. Raises what the event raises."""
        stop = asyncio.ensure_future(self._told_to_stop.wait())
        await asyncio.wait([stop, event], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if event.done():
            event.result()
            return True
        event.cancel()
        return False

    async def _drain(self) -> None:
        """Refuse new work, finish what was admitted, but not beyond the exit timeout."""
        self._state.draining = True
        for engine in self._engines.values():
            engine.begin_drain()
        outstanding = sum(engine.outstanding for engine in self._engines.values())
        logging.info(f"Waiting for in-flight requests to complete: {outstanding} now")
        drained: Awaitable[Any] = asyncio.gather(*(engine.wait_drained() for engine in self._engines.values()))
        try:
            await asyncio.wait_for(drained, self._options.exit_timeout_seconds)
        except TimeoutError:
            seconds = self._options.exit_timeout_seconds
            logging.warning(f"requests still run after {seconds:g} s (--exit-timeout-secs) and are given up")
            await self._stop_engines()

    async def _stop_engines(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._told_to_stop.is_set():
            self._told_to_stop.set()
            return
        logging.warning(f"second {number.name}: leaving at once")
        for engine in self._engines.values():
            engine.kill()
        os._exit(128 + number)

    def _announce(self) -> None:
        """What a person wants next: where everything is, and a command that shows it works."""
        host = "localhost" if self._options.address in ("0.0.0.0", "::") else self._options.address
        http_port, metrics_port = (s.getsockname()[1] for s in (self._sockets.http, self._sockets.metrics))
        lines = [f"API docs: http://{host}:{http_port}/docs   metrics: http://{host}:{metrics_port}/metrics"]
        if self._repository.chains:
            body = json.dumps({"text_input": "What is machine learning?", "max_tokens": 64})
            url = f"http://{host}:{http_port}/v2/models/{_model_to_show(self._repository)}/generate"
            lines.insert(0, f"Try it:   curl -s {url} -d '{body}'")
        print("\n".join(lines), flush=True)


def _model_to_show(repository: Repository) -> str:
    """The text model somebody named; `ensemble` and `tensorrt_llm_bls` are in every repository."""
    customary = ("ensemble", "tensorrt_llm_bls")
    return min(repository.chains, key=lambda name: (name in customary, name))


def _log_models(repository: Repository, engines: dict[str, EngineClient]) -> None:
    """Triton's table of models, and how each engine uses the machine."""
    rows = [(name, str(version)) for name, model in repository.models.items() for version in model.versions]
    width = max(len(name) for name, _ in [("Model", ""), *rows])
    rule = f"+-{'-' * width}-+---------+--------+"
    table = [rule, f"| {'Model':{width}} | Version | Status |", rule]
    table += [f"| {name:{width}} | {version:7} | READY  |" for name, version in rows]
    logging.info("\n" + "\n".join([*table, rule]) + "\n", "server.cc:674")
    for name, engine in engines.items():
        if (info := engine.info) is not None:
            tokens = info.total_blocks * info.block_tokens
            logging.info(
                f"{name}: {info.dtype} on {info.device}, weights {info.weight_bytes / 2**20:.0f} MiB, "
                f"cache {info.cache_bytes / 2**20:.0f} MiB for {tokens} tokens, {info.max_rows} requests at once, "
                f"up to {info.max_sequence_tokens} tokens each, loaded in {info.load_seconds:.1f} s"
            )

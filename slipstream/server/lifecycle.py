"""Starts a server from a repository, drains it and stops it.

The order matters. The repository is read and the ports are bound first, so that a mistake is
reported at once. Then the engine process begins to load, and meanwhile this process imports its
HTTP and gRPC modules. As in Triton, the ports listen only when the engines serve.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slipstream.engine.memory.cores import usable_cores
from slipstream.engine.memory.garbage_collection import freeze_garbage_collector
from slipstream.engine.memory.nodes import usable_nodes
from slipstream.repository.models import Repository, inspect_repository
from slipstream.repository.reading import Reading
from slipstream.repository.templates import helpers_among
from slipstream.server.engine_link.link import remove_left_folders
from slipstream.server.engine_link.memory_table import memory_table, node_advice, titled_replicas
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.engine_link.visible_gpus import runs_on_gpu
from slipstream.server.exit_deadline import LAST_SECONDS, ExitDeadline
from slipstream.server.frontends.count import choose_count
from slipstream.server.frontends.ports import PortError, Ports
from slipstream.server.kserve.health import ServerState
from slipstream.server.loaded_models import READY
from slipstream.server.log.output import HANDLER
from slipstream.server.log.start_times import StartTimes, report_loading
from slipstream.server.options import ALL_MODELS, ServerOptions, is_loopback

if TYPE_CHECKING:
    from slipstream.server.engine_link.cluster.leader import RankHosts
    from slipstream.server.frontends.primary import Frontends
    from slipstream.server.models.factories import ModelFactory
    from slipstream.server.services import Services

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# longest wait, after the exit timeout, for other front ends to report to their clients
SETTLE_SECONDS = 0.5
# after the exit timeout, each part of the server has this long to end
LEAST_PATIENCE_SECONDS = 0.5
# longest time from the last failure of an engine to the end of the server
FAILED_SECONDS = 12.0
ENGINE_SECONDS = 5.0  # longest wait for the end of an engine without work

# The gRPC library reads this variable when it is imported. The thread that polls the completion
# queue (the event loop's, or `grpc-events` while the server is idle) then also reads the sockets.
# By default the library's event-engine threads read them and wake the polling thread at each call.
GRPC_EXPERIMENTS_DEFAULT = ("GRPC_EXPERIMENTS", "-event_engine_listener")


class StartFailed(Exception):
    """The server cannot start. The text gives the cause and the remedy."""


class ModelsFailed(StartFailed):
    """Some models could not be loaded, and the options do not allow to run without them."""


def run_server(options: ServerOptions, factories: Sequence[ModelFactory] = ()) -> int:
    """Serve until a signal, and return the exit code. Raise StartFailed on a failure.

    `factories` serve models besides those that the options allow.
    """
    early_signals: list[int] = []  # signals that arrive before the event loop runs
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: early_signals.append(number))
    _check_certificates(options)
    factories = [*factories, *_create_factories(options)]
    reading = _read_repository(options, factories)
    options = replace(options, frontends=_count_frontends(options, reading))
    for warning in reading.problems.warnings:
        logger.warning(str(warning))
    _warn_of_exposure(options)
    remove_left_folders()
    hosts = _open_cluster(options)
    try:
        return _run_server(options, factories, reading, early_signals, hosts)
    finally:
        if hosts is not None:
            hosts.close()


def _check_certificates(options: ServerOptions) -> None:
    """Read the certificates before anything is loaded. They are read again when a port opens."""
    files = [options.http_certificate, options.grpc_certificate]
    for one in dict.fromkeys(filter(None, files)):
        from slipstream.server.http.tls import check_certificate

        try:
            check_certificate(one)
        except OSError as error:
            raise StartFailed(f"TLS: {error}") from error


def _open_cluster(options: ServerOptions) -> RankHosts | None:
    """Listen for the processes that a launcher started on other machines, if there are any."""
    if options.cluster is None:
        return None
    from slipstream.server.engine_link.cluster.leader import RankHosts

    try:
        return RankHosts(options.cluster)
    except ValueError as error:
        raise StartFailed(str(error)) from error


def _run_server(
    options: ServerOptions,
    factories: Sequence[ModelFactory],
    reading: Reading,
    early_signals: list[int],
    hosts: RankHosts | None,
) -> int:
    engines = EnginePool(
        options.engine_settings, options.supervision, options.engine_command, hosts
    )
    try:
        engines.check(reading.repository.engines.values())
    except ValueError as error:
        raise StartFailed(str(error)) from error
    ports = _bind_ports(options)
    engines.frontends = options.frontends
    frontends = None
    try:
        models = _models_to_load(options, reading)
        startable = reading.list_startable_engines(models)
        engines.expect(reading.repository.engines[name] for name in startable)
        times = StartTimes(options.prepare_seconds)
        for name in startable:
            engines.spawn(reading.repository.engines[name])
        times.engines_spawned()
        frontends = _start_frontends(options, ports, engines)
        import uvloop

        server = _Server(options, reading, models, engines, ports, factories, frontends, times)
        return uvloop.run(server.run(early_signals))
    finally:
        if frontends is not None:
            frontends.kill()
        engines.kill()
        ports.close()


def _count_frontends(options: ServerOptions, reading: Reading) -> int:
    """Return how many processes to serve with."""
    if options.frontends:
        return options.frontends
    if not reading.repository.engines:
        return 1  # only the primary one has other models
    device = options.engine_settings.get("device", "auto")
    return choose_count(runs_on_gpu(device), usable_cores())


def _bind_ports(options: ServerOptions) -> Ports:
    try:
        return Ports(options.http, options.grpc, options.metrics, options.frontends)
    except PortError as error:
        raise StartFailed(str(error)) from error


def _start_frontends(options: ServerOptions, ports: Ports, engines: EnginePool) -> Frontends | None:
    """Start the other processes of the server, if it has any."""
    if options.frontends == 1:
        return None
    os.environ.setdefault(*GRPC_EXPERIMENTS_DEFAULT)
    from slipstream.server.frontends.primary import Frontends
    from slipstream.server.services import frontend_options

    own = frontend_options(options, ports.grpc_number)
    frontends = Frontends(options.frontends, own, ports.others, engines)
    frontends.spawn()
    return frontends


def _create_factories(options: ServerOptions) -> list[ModelFactory]:
    if not options.allow_python_models:
        return []
    from slipstream.server.python_models.factory import PythonModels
    from slipstream.server.python_models.rate_limiter import RateLimiter

    limiter = None if options.rate_limits is None else RateLimiter(options.rate_limits)
    return [PythonModels(limiter, options.complete_config)]


def _read_repository(options: ServerOptions, factories: Sequence[ModelFactory]) -> Reading:
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
        count = reading.problems.count(fatal=True)
        places = ", ".join(str(path) for path in options.repositories)
        cause = f"{count} problems in {places}, listed above"
        if count == 1:
            cause = str(reading.problems.errors[0])
        raise ModelsFailed(f"cannot serve the model repository: {cause}")
    return reading


def _models_to_load(options: ServerOptions, reading: Reading) -> list[str]:
    """Return the names of the models to load at the start, each once."""
    names = list(reading.repository.models)
    if options.control_mode != "explicit":
        return names
    all_models = names if ALL_MODELS in options.load_models else []
    by_name = [name for name in options.load_models if name != ALL_MODELS]
    return list(dict.fromkeys([*all_models, *by_name]))


def _warn_of_exposure(options: ServerOptions) -> None:
    """Warn once where other machines can use the models without a key."""
    exposed = sorted({address for address in options.addresses if not is_loopback(address)})
    if exposed and not options.access.guarded:
        logger.warning(
            "listening at %s without an API key: everyone who can reach this machine can use its "
            "models. Set --api-key (a file, or the variable SLIPSTREAM_API_KEY), or listen at "
            "127.0.0.1 only.",
            ", ".join(exposed),
        )
        if options.allow_python_models and options.control_mode == "explicit":
            logger.warning("clients can also load models with code of their own, which runs here")


class _Server:
    def __init__(
        self,
        options: ServerOptions,
        reading: Reading,
        models: list[str],
        engines: EnginePool,
        ports: Ports,
        factories: Sequence[ModelFactory],
        frontends: Frontends | None,
        times: StartTimes,
    ) -> None:
        self._times = times
        self._options = options
        self._reading = reading
        self._models = models
        self._engines = engines
        self._ports = ports
        self._factories = factories
        self._frontends = frontends
        self._state = ServerState(engines)
        self._stop_requested = asyncio.Event()
        self._stop_signal = 0  # the signal that requested it
        self._deadline = ExitDeadline(self._abandon)

    async def run(self, early_signals: list[int]) -> int:
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        if early_signals:
            return self._end_before_ready(early_signals[0])
        self._engines.watch_spawned()
        await asyncio.sleep(0)  # the tasks that watch the engines begin to run
        os.environ.setdefault(*GRPC_EXPERIMENTS_DEFAULT)
        from slipstream.server.services import Services

        freeze_garbage_collector()  # before models are loaded, because they may be unloaded
        try:
            services = Services(
                self._options, self._engines, self._state, self._factories, self._frontends
            )
            await services.attach_frontends()
            loading = asyncio.ensure_future(services.load(self._models, self._reading))
            reports = asyncio.ensure_future(report_loading(self._slow_models()))
            try:
                if not await self._first(loading):
                    return self._end_before_ready(self._stop_signal)
            finally:
                reports.cancel()
            self._times.models_loaded()
            _log_models(services.loader.rows(), self._engines)
            self._check_loaded(services, loading.result())
            await services.open(self._ports)
        except (OSError, ValueError) as error:  # a port in use, a bad certificate
            places = ", ".join(str(path) for path in self._options.repositories)
            raise StartFailed(f"cannot serve {places}: {error}") from error
        if self._options.announce:
            self._announce()
        return await self._serve(services)

    def _slow_models(self) -> list[str]:
        """Return the models that can take long to load: engines, or all without an engine."""
        engines = self._reading.repository.engines
        return [name for name in self._models if name in engines] or self._models

    def _check_loaded(self, services: Services, failed: dict[str, str]) -> None:
        if not failed or not self._options.exit_on_error:
            return
        engine = next((name for name in failed if name in self._reading.repository.engines), None)
        if engine is not None:
            reason = services.loader.reason(engine).removeprefix("Internal: ")
            raise ModelsFailed(f"the engine did not start: {reason}")
        name, reason = next(iter(failed.items()))
        raise ModelsFailed(f"model '{name}' did not load: {reason}")

    async def _serve(self, services: Services) -> int:
        polling = None
        if self._options.control_mode == "poll":
            polling = asyncio.ensure_future(services.loader.poll(self._options.poll_seconds))
        failed = asyncio.ensure_future(self._engines.wait_failed())
        try:
            if await self._first(failed):
                reason = f"the engine failed for good: {failed.result()}"
                self._deadline.set(FAILED_SECONDS, 1)
                self._deadline.part = f"the server; {reason}"
                await services.close()
                await self._engines.stop()
                raise StartFailed(reason)
        finally:
            if polling is not None:
                polling.cancel()
        await self._end(services)
        return 0

    async def _end(self, services: Services) -> None:
        deadline = time.monotonic() + self._options.exit_timeout_seconds
        self._deadline.set(self._options.exit_timeout_seconds + LAST_SECONDS, 0)
        self._deadline.part = "requests"
        await self._drain(services)
        self._deadline.part = "connections and models"
        await services.close(_patience(deadline))
        self._deadline.part = "engines"
        await self._engines.stop(min(_patience(deadline), ENGINE_SECONDS))
        self._deadline.finish(0)

    def _end_before_ready(self, number: int) -> int:
        """Say that a signal ended the server before it served; return the exit code.

        A user's Ctrl-C interrupts the command. SIGTERM is the orderly end of a supervisor.
        """
        logger.warning("%s before the server was ready: it ends", signal.Signals(number).name)
        code = 128 + number if number == signal.SIGINT else 0
        self._deadline.finish(code)
        return code

    def _abandon(self) -> None:
        """Kill all other processes, from any thread, before this process ends."""
        self._engines.abandon()
        if self._frontends is not None:
            self._frontends.abandon()

    async def _first(self, event: asyncio.Future[Any]) -> bool:
        """Return whether `event` comes before the order to stop. Raise what the event raises."""
        stop = asyncio.ensure_future(self._stop_requested.wait())
        await asyncio.wait([stop, event], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if event.done():
            event.result()
            return True
        event.cancel()
        return False

    async def _drain(self, services: Services) -> None:
        """Refuse new requests and finish the admitted ones, at most for the exit timeout."""
        self._state.draining = True
        self._engines.begin_drain()
        outstanding = self._engines.outstanding + services.loader.outstanding
        outstanding += self._state.outstanding_elsewhere()
        logger.info("Waiting for in-flight requests to complete: %d now", outstanding)
        seconds = self._options.exit_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await services.settle()  # before that, other front ends admit requests
                await asyncio.gather(
                    self._engines.wait_drained(),
                    services.loader.wait_idle(),
                    services.wait_drained(),
                )
        except TimeoutError:
            logger.warning(
                "requests still run after %g s (--exit-timeout-secs) and are cancelled", seconds
            )
            await self._engines.stop(LEAST_PATIENCE_SECONDS)
            with suppress(TimeoutError):  # a front end that does not respond is killed later
                async with asyncio.timeout(SETTLE_SECONDS):
                    await services.settle()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop_requested.is_set():
            self._stop_signal = number
            self._stop_requested.set()
            return
        logger.warning("second %s: exiting at once", number.name)
        if self._frontends is not None:
            self._frontends.kill()
        self._engines.kill()
        os._exit(128 + number)

    def _announce(self) -> None:
        """Show where everything is, and a command to try."""
        if self._ports.http is None:
            return
        address = self._options.http.address
        host = f"[{address}]" if ":" in address else address
        if address in ("0.0.0.0", "::"):
            host = "localhost"
        port = self._ports.http.getsockname()[1]
        scheme = "http" if self._options.http_certificate is None else "https"
        loaded = (engine.info for _, engine in self._engines.items() if engine.info is not None)
        lines = [self._times.describe(info.load_seconds for info in loaded)]
        if self._options.frontends > 1:
            lines.append(f"Serving:  with {self._options.frontends} front ends")
        if self._reading.repository.pipelines:
            lines += self._describe_text_models(f"{scheme}://{host}:{port}")
        places = f"API docs: {scheme}://{host}:{port}/docs"
        if self._ports.metrics is not None:
            metrics_port = self._ports.metrics.getsockname()[1]
            places += f"   metrics: http://{host}:{metrics_port}/metrics"
        lines.append(places)
        if HANDLER.settings.format == "json":
            logger.info("\n".join(lines))
        else:
            HANDLER.write_output("\n".join(lines))

    def _describe_text_models(self, place: str) -> list[str]:
        """Return a command to try and the ways to chat. `place`: scheme, host and port."""
        guarded = self._options.access.guarded
        body = json.dumps({"text_input": "What is machine learning?", "max_tokens": 64})
        url = f"{place}/v2/models/{_example_model(self._reading.repository)}/generate"
        key = "-H 'Authorization: Bearer YOUR_KEY' " if guarded else ""
        chat = f"slipstream chat -u {place.removeprefix('http://')}"
        if guarded:
            chat = f"{chat} --api-key YOUR_KEY_FILE"
        return [
            f"Try it:   curl -s {key}{url} -d '{body}'",
            f"OpenAI:   {place}/v1   chat: {place}/ or {chat}",
        ]


def _patience(deadline: float) -> float:
    """Return the seconds until the exit timeout, or a moment after it."""
    return max(LEAST_PATIENCE_SECONDS, deadline - time.monotonic())


def _example_model(repository: Repository) -> str:
    """Return a text model, preferring one that is not called `ensemble`."""
    customary = ("ensemble", "tensorrt_llm_bls")
    return min(repository.pipelines, key=lambda name: (name in customary, name))


def _log_models(rows: list[tuple[str, str, str]], engines: EnginePool) -> None:
    """Log Triton's table of models, and how each engine uses the memory."""
    head = ("Model", "Version", "Status")
    helpers = helpers_among([name for name, _, _ in rows])
    # a helper that is not ready is why its model does not answer
    hidden = [name for name, _, status in rows if name in helpers and status == READY]
    shown = [head, *(_on_one_line(row) for row in rows if row[0] not in hidden)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [_table_line(row, widths) for row in shown]
    table = [rule, lines[0], rule, *lines[1:], rule]
    if hidden:
        table.append(f"Ready helper models of these: {', '.join(hidden)}")
    logger.info("\n" + "\n".join(table) + "\n", extra={"place": "server.cc:674"})
    for name, engine in engines.items():
        infos = [client.info for client in engine.clients if client.info is not None]
        for title, info in titled_replicas(name, infos):
            lines = memory_table(title, info, engines.overrides)
            lines += node_advice(info, len(infos), len(usable_nodes()))
            logger.info("\n".join(lines) + "\n", extra={"model": name})


def _on_one_line(cells: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell.replace("\n", " ") for cell in cells)


def _table_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "| " + " | ".join(padded) + " |"

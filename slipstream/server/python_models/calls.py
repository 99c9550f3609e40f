"""What a Python model asks of the server: other models, repository control, the values of its
metrics.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.input_checks import check_request
from slipstream.server.kserve.repository_control import NoControl, RepositoryControl, load_model
from slipstream.server.python_models.convert import error_frame, request_of, response_frame
from slipstream.server.python_models.custom_metrics import CustomMetrics
from slipstream.server.python_models.frames import (
    Call,
    CallAnswer,
    Control,
    ControlAnswer,
    ErrorFrame,
    ToWorker,
)
from slipstream.server.python_models.rate_limiter import RateLimiter
from slipstream.server.python_models.unread import Unread
from slipstream.server.tracing.tracing import RequestTrace

if TYPE_CHECKING:
    from slipstream.server.kserve.registry import ModelVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """The server as its Python models see it."""

    # by name and version (empty: the latest); InferenceError for none
    find: Callable[[str, str], ModelVersion]
    control: RepositoryControl = field(default_factory=NoControl)
    metrics: CustomMetrics = field(default_factory=CustomMetrics)
    limiter: RateLimiter | None = None  # where instances share resources
    complete_config: bool = True  # models may complete their own configuration
    # of a request that the model works on
    trace_of: Callable[[int], RequestTrace | None] = lambda number: None


Send = Callable[[ToWorker], Awaitable[int]]  # tells how many bytes it took


class _Room:
    """In a model's process, for more answers to one of its calls."""

    def __init__(self) -> None:
        self.unread = Unread()
        self._read = asyncio.Event()

    def read(self) -> None:
        self.unread.read()
        self._read.set()

    async def wait(self) -> None:
        while self.unread.full:
            self._read.clear()
            await self._read.wait()


class Calls:
    """The calls of one model process. All of them end with it."""

    def __init__(self, surroundings: Surroundings, send: Send) -> None:
        self._surroundings = surroundings
        self._send = send
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._rooms: dict[int, _Room] = {}  # of the calls that are being answered

    def begin(self, call: Call) -> None:
        self._run(call.request.number, self._answer(call))

    def begin_control(self, control: Control) -> None:
        self._run(control.call, self._control(control))

    def cancel(self, number: int) -> None:
        if task := self._tasks.get(number):
            task.cancel()

    def read(self, number: int) -> None:
        if room := self._rooms.get(number):
            room.read()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _run(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        # Not in the context of the model's connection, which is that of whoever had it loaded: this
        # is nobody's.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answer(self, call: Call) -> None:
        number = call.request.number
        try:
            await self._pass_on(call)
        except InferenceError as error:
            await self._send(CallAnswer(number, error_frame(error), False))
        except asyncio.CancelledError:
            cancelled = InferenceError("the call was cancelled", Code.CANCELLED)
            await self._send(CallAnswer(number, error_frame(cancelled), True))
            raise
        except Exception as error:
            logger.error(
                "a call of model '%s' failed: %r",
                call.model_name,
                error,
                extra={"model": call.model_name},
            )
            failed = InferenceError(f"model '{call.model_name}' failed: {error}", Code.INTERNAL)
            await self._send(CallAnswer(number, error_frame(failed), False))
        await self._send(CallAnswer(number, None, True))

    async def _pass_on(self, call: Call) -> None:
        version = "" if call.model_version < 0 else str(call.model_version)
        entry = self._surroundings.find(call.model_name, version)
        model = entry.model
        if model.decoupled and not call.decoupled:
            text = (
                f"model '{call.model_name}' is decoupled: pass decoupled=True to exec or async_exec"
            )
            raise InferenceError(text, Code.UNSUPPORTED)
        request = request_of(call.request, entry.name, entry.version)
        check_request(request, model.config)
        if (trace := self._surroundings.trace_of(call.request.trace)) is not None:
            request.times.trace = trace.child()
        number, room = call.request.number, _Room()
        self._rooms[number] = room
        try:
            async with aclosing(model.infer(request)) as responses:
                async for response in responses:
                    frame = response_frame(response, call.request.requested_outputs)
                    await room.wait()
                    if room.unread.add(await self._send(CallAnswer(number, frame, False))):
                        await self._send(CallAnswer(number, None, False))
        finally:
            del self._rooms[number]

    async def _control(self, control: Control) -> None:
        value, error = 0.0, None
        try:
            value = await self._controlled(control)
        except InferenceError as failure:
            error = ErrorFrame(failure.message, failure.code.name)
        await self._send(ControlAnswer(control.call, value, error))

    async def _controlled(self, control: Control) -> float:
        if control.action == "metric":
            return self._surroundings.metrics.value(control.name, control.labels)
        if control.action == "ready":
            try:
                return float(self._surroundings.find(control.name, control.version).model.ready)
            except InferenceError:
                return 0.0  # unknown is not ready
        if control.action == "load":
            files = {f"file:{path}": content for path, content in control.files.items()}
            parameters = {"config": control.config, **files} if control.config else files
            await load_model(self._surroundings.control, control.name, parameters)
        else:
            await self._surroundings.control.unload(control.name, control.unload_dependents)
        return 0.0

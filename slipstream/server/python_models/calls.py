"""The requests of a Python model to the server: other models, repository control, metrics."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import RequestTrace
from slipstream.server.kserve.input_checks import check_request
from slipstream.server.kserve.repository_control import (
    LoadParameters,
    NoControl,
    RepositoryControl,
    load_model,
)
from slipstream.server.python_models.convert import error_frame, request_from_frame, response_frame
from slipstream.server.python_models.custom_metrics import CustomMetrics
from slipstream.server.python_models.flow_control import FlowControl
from slipstream.server.python_models.frames import (
    Call,
    CallAnswer,
    Control,
    ControlAnswer,
    ErrorFrame,
    ToWorker,
)
from slipstream.server.python_models.rate_limiter import RateLimiter

if TYPE_CHECKING:
    from slipstream.server.kserve.inference import ModelVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PythonModelContext:
    """The parts of the server that Python models may use."""

    # finds a model by name and version (empty: the latest); raises InferenceError
    find: Callable[[str, str], ModelVersion]
    control: RepositoryControl = field(default_factory=NoControl)
    metrics: CustomMetrics = field(default_factory=CustomMetrics)
    limiter: RateLimiter | None = None  # shares resources among instances
    complete_config: bool = True  # models may complete their own configuration
    # finds the trace of a request that the model runs, by its number
    trace_of: Callable[[int], RequestTrace | None] = lambda number: None


Send = Callable[[ToWorker], Awaitable[int]]  # returns the bytes that the message took


class _CallFlow:
    """Flow control of the responses to one call."""

    def __init__(self) -> None:
        self.flow = FlowControl()
        self._acknowledged = asyncio.Event()

    def acknowledged(self) -> None:
        self.flow.acknowledged()
        self._acknowledged.set()

    async def wait(self) -> None:
        """Wait while too much is unread."""
        while self.flow.full:
            self._acknowledged.clear()
            await self._acknowledged.wait()


class Calls:
    """The calls of one model process. All of them end with it."""

    def __init__(self, context: PythonModelContext, send: Send) -> None:
        self._context = context
        self._send = send
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._flows: dict[int, _CallFlow] = {}  # those of the calls that are being answered

    def begin(self, call: Call) -> None:
        self._run(call.request.number, self._answer(call))

    def begin_control(self, control: Control) -> None:
        self._run(control.call, self._control(control))

    def cancel(self, number: int) -> None:
        if task := self._tasks.get(number):
            task.cancel()

    def acknowledge(self, number: int) -> None:
        if flow := self._flows.get(number):
            flow.acknowledged()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _run(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        # in an empty context: that of the connection belongs to the client that loaded the model
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
        entry = self._context.find(call.model_name, version)
        model = entry.model
        if model.decoupled and not call.decoupled:
            raise InferenceError(
                f"model '{call.model_name}' is decoupled: "
                "pass decoupled=True to exec or async_exec",
                Code.UNSUPPORTED,
            )
        request = request_from_frame(call.request, entry.name, entry.version)
        check_request(request, model.config)
        if (trace := self._context.trace_of(call.request.trace)) is not None:
            request.times.trace = trace.child()
        number = call.request.number
        flow = self._flows[number] = _CallFlow()
        try:
            async with aclosing(model.infer(request)) as responses:
                async for response in responses:
                    frame = response_frame(response, call.request.requested_outputs)
                    await flow.wait()
                    if flow.flow.sent(await self._send(CallAnswer(number, frame, False))):
                        await self._send(CallAnswer(number, None, False))
        finally:
            del self._flows[number]

    async def _control(self, control: Control) -> None:
        value = 0.0
        error = None
        try:
            value = await self._perform(control)
        except InferenceError as failure:
            error = ErrorFrame(failure.message, failure.code.name)
        except Exception as failure:  # the model waits for an answer
            logger.exception("%s of '%s' failed:", control.action, control.name)
            error = ErrorFrame(f"{control.action} failed: {failure}", Code.INTERNAL.name)
        await self._send(ControlAnswer(control.call, value, error))

    async def _perform(self, control: Control) -> float:
        if control.action == "metric":
            return self._context.metrics.value(control.name, control.labels)
        if control.action == "ready":
            try:
                return float(self._context.find(control.name, control.version).model.ready)
            except InferenceError:
                return 0.0  # unknown is not ready
        if control.action == "load":
            files = {f"file:{path}": content for path, content in control.files.items()}
            parameters = LoadParameters(control.config or None, files)
            await load_model(self._context.control, control.name, parameters)
        else:
            await self._context.control.unload(control.name, control.unload_dependents)
        return 0.0

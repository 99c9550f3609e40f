"""A Python model: queues requests, gives them to its processes and returns their responses."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.repository.config import InstanceGroup, ModelConfig
from slipstream.repository.describe import config_document
from slipstream.server.kserve.errors import Code, InferenceError, Unavailable
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    RequestTrace,
    ResponseStream,
    ServedModel,
)
from slipstream.server.python_models.auto_complete import complete_config
from slipstream.server.python_models.calls import PythonModelContext
from slipstream.server.python_models.convert import request_frame, response_from_frame
from slipstream.server.python_models.frames import FrameError, Response, Start
from slipstream.server.python_models.instance import Instance
from slipstream.server.python_models.rate_limiter import GLOBAL, Contender, Device
from slipstream.server.python_models.request_queue import Pending, RequestQueue
from slipstream.server.python_models.sequence_queue import SequenceQueue

logger = logging.getLogger(__name__)

PREFETCHED_BATCHES = 4  # batches that a single process may hold
DRAIN_SECONDS = 30.0  # time limit for the requests of a model that is unloaded


@dataclass(frozen=True)
class RestartLimit:
    """The number of restarts of an instance that died, within a window of time."""

    restarts: int = 3
    window_seconds: float = 600.0


@dataclass(frozen=True)
class _Place:
    """The name and device of an instance."""

    name: str
    kind: str
    device: int
    group: InstanceGroup | None = None

    @property
    def needs(self) -> dict[tuple[str, Device], int]:
        """The amount of each resource that one execution takes."""
        resources = self.group.resources if self.group is not None else ()
        return {
            (one.name, GLOBAL if one.of_machine else self.device): one.count for one in resources
        }


class PythonModel(ServedModel):
    def __init__(
        self,
        config: ModelConfig,
        version_folder: Path,
        context: PythonModelContext,
        restart_limit: RestartLimit = RestartLimit(),
    ) -> None:
        self.config = config
        self._version_folder = version_folder.resolve()
        self._context = replace(context, trace_of=self._trace_of)
        self._restart_limit = restart_limit
        self._queue = _create_queue(config)
        self._instances: dict[_Place, Instance] = {}
        self._deaths: dict[_Place, list[float]] = {}
        self._running: dict[int, Pending] = {}
        self._last_number = 0  # number of the last request that an instance was given
        self._contenders: dict[Instance, Contender] = {}  # those of the rate limiter
        self._restarting: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def decoupled(self) -> bool:
        return self.config.decoupled

    @property
    def ready(self) -> bool:
        return bool(self._instances) and not self._closed

    @property
    def process_ids(self) -> list[int]:
        return [instance.process_id for instance in self._instances.values()]

    async def start(self) -> None:
        """Start every instance. Raises InferenceError with the model's reason where one fails."""
        first, *rest = _places(self.config)
        try:
            document = await self._start(first, complete=self._context.complete_config)
            if document:
                self.config = complete_config(self.config, json.loads(document))
                self._queue = _create_queue(self.config)
            await asyncio.gather(*(self._start(place) for place in rest))
        except BaseException:
            await self.close()
            raise

    async def _start(self, place: _Place, complete: bool = False) -> str:
        instance = Instance(
            place.name,
            self.config.name,
            self._depth(),
            self._context,
            self._on_response,
            self._on_free,
            self._on_end,
        )
        self._instances[place] = instance
        self._join_limiter(instance, place)
        document = config_document(self.config, self.config.decoupled)
        arguments = {
            "model_config": json.dumps(document, separators=(",", ":"), ensure_ascii=False),
            "model_instance_kind": place.kind,
            "model_instance_name": place.name,
            "model_instance_device_id": str(place.device),
            "model_repository": str(self._version_folder.parent),
            "model_version": self._version_folder.name,
            "model_name": self.config.name,
        }
        file = self._version_folder / (
            self.config.document.get("default_model_filename") or "model.py"
        )
        folder = str(self._version_folder.parent)
        try:
            order = Start(str(file), folder, place.name, self.config.decoupled, arguments, complete)
            return await instance.start(order)
        except BaseException:
            self._instances.pop(place, None)
            self._leave_limiter(instance)
            instance.kill()
            raise

    def _join_limiter(self, instance: Instance, place: _Place) -> None:
        limiter = self._context.limiter
        if limiter is not None and place.group is not None:
            contender = Contender(place.name, place.needs, place.group.priority)
            limiter.join(contender)
            self._contenders[instance] = contender

    def _leave_limiter(self, instance: Instance) -> None:
        contender = self._contenders.pop(instance, None)
        if contender is not None and self._context.limiter is not None:
            self._context.limiter.leave(contender)

    def _may_execute(self, instance: Instance) -> bool:
        if not self._contenders or self._context.limiter is None:
            return True
        contender = self._contenders.get(instance)
        if contender is None:
            return True
        return self._context.limiter.acquire(contender, self._dispatch)

    def _release(self, instance: Instance) -> None:
        contender = self._contenders.get(instance)
        if contender is not None and self._context.limiter is not None:
            self._context.limiter.release(contender)

    def _on_free(self, instance: Instance) -> None:
        if self._contenders:
            self._release(instance)
        if self._queue:
            self._dispatch()

    def _depth(self) -> int:
        """Return the number of batches that an instance may hold.

        A single process may hold several, which saves it the wait for the next one. Several
        processes would take them from each other, and with batching waiting requests are better
        executed together.
        """
        alone = len(_places(self.config)) == 1
        batched = (
            self.config.dynamic_batching is not None or self.config.sequence_batching is not None
        )
        return PREFETCHED_BATCHES if alone and not batched and self._context.limiter is None else 1

    def infer(self, request: InferRequest) -> ResponseStream:
        return _Answers(self, request)

    def admit(self, request: InferRequest) -> Pending:
        if (self._closed or not self._instances) and not self._restarting:
            raise Unavailable(f"no instance of model '{self.config.name}' is running")
        pending = self._queue.add(request)
        self._dispatch()
        return pending

    def _dispatch(self) -> None:
        """Give waiting requests to idle instances."""
        for instance in sorted(self._instances.values(), key=self._queue.load):
            while instance.has_room and self._queue and self._may_execute(instance):
                batch = self._queue.take(instance)
                if not batch:
                    self._release(instance)
                    break
                self._execute(instance, batch)
        if self._queue and self._timer is None and (delay := self._queue.delay()) > 0:
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._dispatch()

    def _execute(self, instance: Instance, batch: list[Pending]) -> None:
        frames = []
        for pending in batch:
            self._last_number += 1
            pending.number = self._last_number
            pending.instance = instance
            pending.request.times.leave_queue()
            self._running[pending.number] = pending
            frames.append(request_frame(pending.number, pending.request))
            pending.request.times.end_input()
        try:
            instance.execute(frames)
        except FrameError as error:
            self._release(instance)
            for pending in batch:
                del self._running[pending.number]
                self._queue.finished(pending)
                pending.fail(InferenceError(str(error)))

    def _on_response(self, message: Response) -> None:
        pending = self._running.get(message.number)
        if pending is None:
            return  # the request was cancelled
        response = None
        if message.response is not None:
            try:
                response = response_from_frame(message.response, message.final)
            except InferenceError as error:
                response = InferResponse(error=error, final=message.final)
        if message.final:
            del self._running[message.number]
            pending.request.times.end_infer()
        pending.put(response, message.final)
        if message.final and self._queue.finished(pending):
            self._dispatch()

    def _trace_of(self, number: int) -> RequestTrace | None:
        pending = self._running.get(number)
        return pending.request.times.trace if pending is not None else None

    def cancel(self, pending: Pending) -> None:
        self._queue.remove(pending)
        if self._running.pop(pending.number, None) is not None and pending.instance is not None:
            pending.instance.cancel(pending.number)
            if self._queue.finished(pending):
                self._dispatch()

    def _on_end(self, instance: Instance, reason: str) -> None:
        """Fail the requests of an instance whose process ended, and start it again.

        An instance that died too often is not started again.
        """
        place = next((place for place, other in self._instances.items() if other is instance), None)
        if place is not None:
            del self._instances[place]
        self._leave_limiter(instance)
        text = f"the process of model instance '{instance.name}' ended: {reason}"
        held = [pending for pending in self._running.values() if pending.instance is instance]
        not_begun = instance.not_begun
        for pending in held:
            del self._running[pending.number]
            if pending.number not in not_begun:
                pending.fail(InferenceError(text, Code.INTERNAL))
                self._queue.finished(pending)
        self._queue.put_back([pending for pending in held if pending.number in not_begun])
        self._queue.lost(instance, InferenceError(text, Code.INTERNAL))
        if place is not None and not self._closed:
            self._after_death(place, text)

    def _after_death(self, place: _Place, text: str) -> None:
        now = time.monotonic()
        window = self._restart_limit.window_seconds
        deaths = [moment for moment in self._deaths.get(place, ()) if now - moment < window]
        self._deaths[place] = [*deaths, now]
        if len(deaths) >= self._restart_limit.restarts:
            times = f"it has been started again {len(deaths)} times and now stays away"
            logger.error("%s; %s", text, times, extra={"model": self.config.name})
            self._refuse_all(text)
            return
        logger.warning("%s; starting it again", text, extra={"model": self.config.name})
        task = asyncio.ensure_future(self._restart(place))
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)

    async def _restart(self, place: _Place) -> None:
        try:
            await self._start(place)
        except (InferenceError, OSError) as error:
            self._after_death(place, f"model instance '{place.name}' did not start: {error}")
            return
        self._dispatch()

    def _refuse_all(self, text: str) -> None:
        """Fail all waiting requests where no instance runs or is being started."""
        # the task of a restart that has just failed is still in the set
        if not self._instances and not self._restarting - {asyncio.current_task()}:
            for pending in self._queue.clear():
                pending.fail(Unavailable(text))

    @property
    def outstanding(self) -> int:
        return len(self._running) + len(self._queue)

    async def close(self) -> None:
        """Wait for the admitted requests to end, then finalize and stop every instance."""
        await self._drain()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._restarting):
            task.cancel()
        await asyncio.gather(*(instance.stop() for instance in list(self._instances.values())))
        for pending in self._queue.clear():
            pending.fail(Unavailable(f"model '{self.config.name}' was unloaded"))

    async def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        while (self._running or (self._queue and self._instances)) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


class _Answers:
    """The responses to one request, which is admitted when the first one is asked for."""

    def __init__(self, model: PythonModel, request: InferRequest) -> None:
        self._model = model
        self._request = request
        self._pending: Pending | None = None
        self._final = False

    def __aiter__(self) -> _Answers:
        return self

    async def __anext__(self) -> InferResponse:
        if self._pending is None:
            self._pending = self._model.admit(self._request)
        try:
            while not self._final:
                if not self._pending.answers:
                    await self._pending.arrival()
                response, self._final = self._pending.answers.popleft()
                if response is not None:
                    return response
                if not self._final:
                    self._pending.acknowledge()  # a marker of flow control
        except asyncio.CancelledError:
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._pending is not None and not self._final:
            self._final = True
            self._model.cancel(self._pending)


def _create_queue(config: ModelConfig) -> RequestQueue | SequenceQueue:
    batching = config.sequence_batching
    return RequestQueue(config) if batching is None else SequenceQueue(config, batching)


def _places(config: ModelConfig) -> list[_Place]:
    """Return the place of each process. Names are upstream's: with the position of the group."""
    places = []
    groups = config.instance_groups
    for position, group in enumerate(groups):
        name = group.name or f"{config.name}_{position}"
        kind = "GPU" if group.kind == "KIND_GPU" else "CPU"
        devices = group.gpus if kind == "GPU" and group.gpus else (0,)
        for number in range(max(1, group.count) * len(devices)):
            places.append(_Place(f"{name}_{number}", kind, devices[number % len(devices)], group))
    return places or [_Place(f"{config.name}_0", "CPU", 0)]

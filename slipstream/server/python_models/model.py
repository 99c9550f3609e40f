"""A Python model as the rest of the server sees it: requests in, answers out, processes behind."""

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
from slipstream.server.kserve.inference import Answers, InferRequest, InferResponse
from slipstream.server.python_models.calls import Surroundings
from slipstream.server.python_models.completion import completed
from slipstream.server.python_models.convert import request_frame, response_of
from slipstream.server.python_models.frames import Response, Start
from slipstream.server.python_models.instance import Instance
from slipstream.server.python_models.rate_limiter import GLOBAL, Contender, Device
from slipstream.server.python_models.sequences import Sequences
from slipstream.server.python_models.waiting import Pending, Waiting
from slipstream.server.tracing.tracing import RequestTrace

logger = logging.getLogger(__name__)

HANDED_AHEAD = 4
DRAIN_SECONDS = 30.0  # for the requests of a model that is unloaded


@dataclass(frozen=True)
class Forgiveness:
    """How often an instance that died is started again."""

    restarts: int = 3  # within the window; one more and the instance stays away
    window_seconds: float = 600.0


@dataclass(frozen=True)
class _Place:
    """Where an instance runs: its name and device."""

    name: str
    kind: str
    device: int
    group: InstanceGroup | None = None

    @property
    def needs(self) -> dict[tuple[str, Device], int]:
        """The resources that one execution takes."""
        resources = self.group.resources if self.group is not None else ()
        return {
            (one.name, GLOBAL if one.of_machine else self.device): one.count for one in resources
        }


class PythonModel:
    def __init__(
        self,
        config: ModelConfig,
        version_folder: Path,
        surroundings: Surroundings,
        forgiveness: Forgiveness = Forgiveness(),
    ) -> None:
        self.config = config
        self._version_folder = version_folder.resolve()
        self._surroundings = replace(surroundings, trace_of=self._trace_of)
        self._forgiveness = forgiveness
        self._waiting = _waiting(config)
        self._instances: dict[_Place, Instance] = {}
        self._deaths: dict[_Place, list[float]] = {}
        self._running: dict[int, Pending] = {}
        self._numbers = 0  # of the requests that instances were given
        self._contenders: dict[Instance, Contender] = {}  # for resources, where any are limited
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
        """Start every instance; InferenceError with the model's reason when one of them fails."""
        first, *rest = _places(self.config)
        try:
            document = await self._start(first, complete=self._surroundings.complete_config)
            if document:
                self.config = completed(self.config, json.loads(document))
                self._waiting = _waiting(self.config)
            await asyncio.gather(*(self._start(place) for place in rest))
        except BaseException:
            await self.close()
            raise

    async def _start(self, place: _Place, complete: bool = False) -> str:
        instance = Instance(
            place.name,
            self.config.name,
            self._depth(),
            self._surroundings,
            self._take,
            self._freed,
            self._ended,
        )
        self._instances[place] = instance
        self._contend(instance, place)
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
            self._leave_contest(instance)
            instance.kill()
            raise

    def _contend(self, instance: Instance, place: _Place) -> None:
        limiter = self._surroundings.limiter
        if limiter is not None and place.group is not None:
            contender = Contender(place.name, place.needs, place.group.priority)
            limiter.join(contender)
            self._contenders[instance] = contender

    def _leave_contest(self, instance: Instance) -> None:
        contender = self._contenders.pop(instance, None)
        if contender is not None and self._surroundings.limiter is not None:
            self._surroundings.limiter.leave(contender)

    def _may_execute(self, instance: Instance) -> bool:
        if not self._contenders or self._surroundings.limiter is None:
            return True
        contender = self._contenders.get(instance)
        if contender is None:
            return True
        return self._surroundings.limiter.acquire(contender, self._dispatch)

    def _release(self, instance: Instance) -> None:
        contender = self._contenders.get(instance)
        if contender is not None and self._surroundings.limiter is not None:
            self._surroundings.limiter.release(contender)

    def _freed(self, instance: Instance) -> None:
        if self._contenders:
            self._release(instance)
        if self._waiting:
            self._dispatch()

    def _depth(self) -> int:
        """A lone process may be handed requests ahead, which saves it the wait for each next one.
        Several would take them from each other, and with batching those that wait are better
        executed together.
        """
        alone = len(_places(self.config)) == 1
        batched = (
            self.config.dynamic_batching is not None or self.config.sequence_batching is not None
        )
        return HANDED_AHEAD if alone and not batched and self._surroundings.limiter is None else 1

    def infer(self, request: InferRequest) -> Answers:
        return _Answers(self, request)

    def admit(self, request: InferRequest) -> Pending:
        if (self._closed or not self._instances) and not self._restarting:
            raise Unavailable(f"no instance of model '{self.config.name}' is running")
        pending = self._waiting.add(request)
        self._dispatch()
        return pending

    def _dispatch(self) -> None:
        """Give what waits to whoever is idle."""
        for instance in sorted(self._instances.values(), key=self._waiting.load):
            while instance.has_room and self._waiting and self._may_execute(instance):
                batch = self._waiting.take(instance)
                if not batch:
                    self._release(instance)
                    break
                self._execute(instance, batch)
        if self._waiting and self._timer is None and (delay := self._waiting.delay()) > 0:
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._dispatch()

    def _execute(self, instance: Instance, batch: list[Pending]) -> None:
        frames = []
        for pending in batch:
            self._numbers += 1
            pending.number, pending.instance = self._numbers, instance
            pending.request.times.leave_queue()
            self._running[pending.number] = pending
            frames.append(request_frame(pending.number, pending.request))
            pending.request.times.end_input()
        instance.execute(frames)

    def _take(self, message: Response) -> None:
        pending = self._running.get(message.number)
        if pending is None:
            return  # given up meanwhile
        response = None
        if message.response is not None:
            try:
                response = response_of(message.response, message.final)
            except InferenceError as error:
                response = InferResponse(error=error, final=message.final)
        if message.final:
            del self._running[message.number]
            pending.request.times.end_infer()
        pending.put(response, message.final)
        if message.final and self._waiting.finished(pending):
            self._dispatch()

    def _trace_of(self, number: int) -> RequestTrace | None:
        pending = self._running.get(number)
        return pending.request.times.trace if pending is not None else None

    def give_up(self, pending: Pending) -> None:
        self._waiting.remove(pending)
        if self._running.pop(pending.number, None) is not None and pending.instance is not None:
            pending.instance.cancel(pending.number)
            if self._waiting.finished(pending):
                self._dispatch()

    def _ended(self, instance: Instance, reason: str) -> None:
        """An instance's process is gone. Its requests are told, and it is started again unless it
        died too often.
        """
        place = next((place for place, other in self._instances.items() if other is instance), None)
        if place is not None:
            del self._instances[place]
        self._leave_contest(instance)
        text = f"the process of model instance '{instance.name}' ended: {reason}"
        held = [pending for pending in self._running.values() if pending.instance is instance]
        not_begun = instance.not_begun
        for pending in held:
            del self._running[pending.number]
            if pending.number not in not_begun:
                pending.fail(InferenceError(text, Code.INTERNAL))
                self._waiting.finished(pending)
        self._waiting.put_back([pending for pending in held if pending.number in not_begun])
        self._waiting.lost(instance, InferenceError(text, Code.INTERNAL))
        if place is not None and not self._closed:
            self._after_death(place, text)

    def _after_death(self, place: _Place, text: str) -> None:
        now, window = time.monotonic(), self._forgiveness.window_seconds
        deaths = [moment for moment in self._deaths.get(place, ()) if now - moment < window]
        self._deaths[place] = [*deaths, now]
        if len(deaths) >= self._forgiveness.restarts:
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
        """Where no instance is left nor on its way (a restart that just failed still counts as
        running).
        """
        if not self._instances and not self._restarting - {asyncio.current_task()}:
            for pending in self._waiting.clear():
                pending.fail(Unavailable(text))

    @property
    def under_way(self) -> int:
        return len(self._running) + len(self._waiting)

    async def close(self) -> None:
        """Let what was admitted end, finalize every instance and let its process go."""
        await self._drain()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._restarting):
            task.cancel()
        await asyncio.gather(*(instance.stop() for instance in list(self._instances.values())))
        for pending in self._waiting.clear():
            pending.fail(Unavailable(f"model '{self.config.name}' was unloaded"))

    async def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        while (
            self._running or (self._waiting and self._instances)
        ) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


class _Answers:
    """To one request, which the model admits when the first of them is asked for."""

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
                    self._pending.reach_mark()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._pending is not None and not self._final:
            self._final = True
            self._model.give_up(self._pending)


def _waiting(config: ModelConfig) -> Waiting | Sequences:
    batching = config.sequence_batching
    return Waiting(config) if batching is None else Sequences(config, batching)


def _places(config: ModelConfig) -> list[_Place]:
    """One for each process, named as upstream names them: with the group's position only where
    groups are given.
    """
    places = []
    groups = config.instance_groups
    for position, group in enumerate(groups):
        name = group.name or f"{config.name}_{position}"
        kind = "GPU" if group.kind == "KIND_GPU" else "CPU"
        devices = group.gpus if kind == "GPU" and group.gpus else (0,)
        for number in range(max(1, group.count) * len(devices)):
            places.append(_Place(f"{name}_{number}", kind, devices[number % len(devices)], group))
    return places or [_Place(f"{config.name}_0", "CPU", 0)]

"""The server's side of requests and models, in many orders of the event loop's tasks."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from scripted_engine import ScriptedLoop
from shuffled_loop import run_shuffled

from slipstream.engine.messages import Cancel
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.repository.config import ModelConfig
from slipstream.repository.models import RepositoryModel
from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.mailbox import EngineUnavailable, LinkedRequests, RequestOutput
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelRegistry,
    ServedModel,
)
from slipstream.server.model_loader import ModelLoader
from slipstream.server.models.factories import ModelFactory

SEEDS = range(60)
CLIENTS = 12
LOST = "the engine ended"


async def test_the_order_of_tasks_follows_the_seed() -> None:
    def order(seed: int) -> list[int]:
        found: list[int] = []

        async def note(number: int) -> None:
            await asyncio.sleep(0)
            found.append(number)

        async def start() -> None:
            await asyncio.gather(*map(note, range(6)))

        run_shuffled(start(), seed)
        return found

    orders = await asyncio.to_thread(lambda: [order(seed) for seed in (1, 1, 2)])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(6))


class Engine:
    """The scripted engine as a task of the same event loop, at the other end of a link."""

    def __init__(self, requests: LinkedRequests) -> None:
        self.requests = requests
        self.messages: deque[Any] = deque()
        self.loop = ScriptedLoop()

    def send(self, message: Any) -> bool:
        self.messages.append(message)
        return True

    async def run(self, chance: random.Random) -> None:
        while True:
            while self.messages:
                message = self.messages.popleft()
                if isinstance(message, Cancel):
                    self.loop.cancel(message.request_ids, message.reason)
                else:
                    self.loop.submit(message)
            outputs = self.loop.step()
            for _ in range(chance.randrange(1, 4)):
                await asyncio.sleep(0)
            if outputs is not None:
                self.requests.deliver(outputs)


async def requests_end_once(seed: int) -> list[tuple[list[int], str]]:
    chance = random.Random(seed)
    requests = LinkedRequests(itertools.count(1))
    ended: list[tuple[list[int], str]] = []

    async def use(first: int) -> None:
        tokens = chance.randrange(1, 30)
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        sampling = SamplingParams(max_tokens=tokens, seed=0)
        try:
            running = requests.submit(GenerateRequest(0, [first], sampling))
        except EngineUnavailable:
            ended.append(([], "refused"))
            return
        found = RequestOutput()
        leaves = chance.choice((0, 0, 1, 5))
        async for output in running:
            assert not found.finish_reason, "an output after the last one"
            found.merge(output)
            if leaves and len(found.tokens) >= leaves:
                running.cancel()
        assert found.tokens == list(range(first + 1, first + 1 + len(found.tokens)))
        assert len(found.tokens) == tokens or found.finish_reason in ("cancelled", "error")
        assert found.lost == (found.finish_reason == "error")
        ended.append((found.tokens, found.finish_reason))

    async def supervise() -> None:
        """Replace the engine now and then, as its supervisor does."""
        for _ in range(4):
            engine = Engine(requests)
            running = asyncio.ensure_future(engine.run(chance))
            requests.serve(engine)  # type: ignore[arg-type]
            for _ in range(chance.randrange(5, 60)):
                await asyncio.sleep(0)
            requests.lose(LOST)
            running.cancel()
            await asyncio.wait([running])
        engine = Engine(requests)
        requests.serve(engine)  # type: ignore[arg-type]
        await engine.run(chance)

    supervisor = asyncio.ensure_future(supervise())
    clients = [use(20 * number) for number in range(1, CLIENTS)]
    await asyncio.gather(*clients)
    await requests.wait_drained()
    supervisor.cancel()
    await asyncio.wait([supervisor])
    assert requests.outstanding == 0
    return ended


def test_every_request_ends_once_with_its_own_tokens_in_any_order() -> None:
    reasons: set[str] = set()
    for seed in SEEDS:
        ended = run_shuffled(requests_end_once(seed), seed)
        assert len(ended) == CLIENTS - 1, f"seed {seed}"
        assert ended == run_shuffled(requests_end_once(seed), seed), f"seed {seed} is not repeated"
        reasons |= {reason for _, reason in ended}
    assert reasons == {"length", "cancelled", "error", "refused"}


class SlowModel(ServedModel):
    """A model whose requests take several turns of the event loop."""

    decoupled = False
    ready = True

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.running = 0
        self.closed = 0

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        assert not self.closed, "a request of a closed model"
        self.running += 1
        for _ in range(5):
            await asyncio.sleep(0)
        self.running -= 1
        assert not self.closed, "the model was closed during a request"
        yield InferResponse([], final=True)

    async def close(self) -> None:
        """Wait for the requests, as every model does."""
        while self.running:
            await asyncio.sleep(0)
        self.closed += 1


class SlowFactory(ModelFactory):
    def __init__(self) -> None:
        self.made: list[SlowModel] = []

    def claims(self, model: RepositoryModel) -> bool:
        return True

    async def load(
        self, model: RepositoryModel, version: int, registry: ModelRegistry
    ) -> SlowModel:
        for _ in range(3):
            await asyncio.sleep(0)
        self.made.append(SlowModel(model.config))
        return self.made[-1]


CONFIG = """
name: "m"
backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 2 ] }
"""


async def models_change_under_load(folder: Path, seed: int) -> list[str]:
    chance = random.Random(seed)
    registry = ModelRegistry()
    factory = SlowFactory()
    engines = EnginePool({}, Supervision(), ("false",))
    loader = ModelLoader([folder], registry, engines, [factory], "explicit")  # type: ignore[arg-type]
    found: list[str] = []
    # a load at the time of the last change: what has not changed is not loaded again
    config = folder / "m" / "config.pbtxt"
    times = itertools.count(1)

    async def change() -> None:
        for _ in range(chance.randrange(1, 5)):
            for _ in range(chance.randrange(8)):
                await asyncio.sleep(0)
            if chance.random() < 0.7:
                os.utime(config, (0, next(times)))
                await loader.load("m")
                found.append("load")
            else:
                await loader.unload("m")
                found.append("unload")

    async def use() -> None:
        for _ in range(6):
            await asyncio.sleep(0)
            try:
                entry = registry.find("m")
                request = InferRequest("m", "1", {})
                answers = [answer async for answer in entry.model.infer(request)]
                found.append("answer")
                assert len(answers) == 1
            except InferenceError:
                found.append("refused")

    await asyncio.gather(change(), change(), *(use() for _ in range(6)))
    (row,) = loader.index()
    last = next(word for word in reversed(found) if word in ("load", "unload"))
    assert (row.get("state") == "READY") == (last == "load"), row
    await loader.wait_idle()
    serving = [model for model in factory.made if not model.closed]
    assert len(serving) == (last == "load"), "a model that was replaced was not closed"
    assert all(model.closed <= 1 for model in factory.made)
    await loader.close()
    assert all(model.closed for model in factory.made)
    return found


def test_a_model_is_replaced_and_removed_under_load_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    words: set[str] = set()
    for seed in SEEDS:
        words |= set(run_shuffled(models_change_under_load(tmp_path, seed), seed))
    assert words == {"load", "unload", "answer", "refused"}

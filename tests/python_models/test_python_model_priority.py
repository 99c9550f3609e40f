"""Requests that wait for a Python model: the more urgent ones are executed first."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from python_model_harness import models_of, open_models, response_texts, text_request, write_model

from slipstream.server.kserve.inference import InferRequest
from slipstream.server.python_models.request_queue import Pending, RequestQueue

NOTING = """
import time, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy() for request in requests]
        with open({log!r}, "a") as log:
            log.write(" ".join(text.ravel()[0].decode() for text in texts) + "\\n")
        while texts[0].ravel()[0] == b"first" and not open({gate!r}).read():
            time.sleep(0.005)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]) for text in texts]
"""
LEVELS = "dynamic_batching { priority_levels: 3 default_priority_level: 2 }"

ANY_INSTANCE: Any = None  # the queue does not look at it


def waiting(folder: Path, config: str) -> RequestQueue:
    return RequestQueue(models_of(write_model(folder, "m", "", config))["m"].config)


def request(text: str, priority: int = 0, width: int = 1) -> InferRequest:
    made = text_request(text, id=text, priority=priority)
    tensor = made.inputs["text_input"]
    return replace(
        made, inputs={"text_input": replace(tensor, shape=(1, width), data=tensor.data * width)}
    )


def names(batch: list[Pending]) -> str:
    return "".join(pending.request.id for pending in batch)


def all_of(queue: RequestQueue) -> list[str]:
    return [names(queue.take(ANY_INSTANCE)) for _ in range(len(queue)) if len(queue)]


def test_lower_levels_are_executed_first(tmp_path: Path) -> None:
    queue = waiting(tmp_path, LEVELS)
    for text, priority in (("a", 3), ("b", 0), ("c", 1), ("d", 2), ("e", 9), ("f", 1), ("g", 3)):
        queue.add(request(text, priority))
    assert all_of(queue) == [
        "c",
        "f",
        "b",
        "d",
        "e",
        "a",
        "g",
    ]  # 0 and levels beyond the last count as level 2


def test_without_levels_any_priority_is_accepted(tmp_path: Path) -> None:
    for name, config in (("plain", ""), ("batching", "dynamic_batching { }")):
        queue = waiting(tmp_path / name, config)
        for text, priority in (("a", 2**40), ("b", 3), ("c", 0), ("d", 2), ("e", 1)):
            queue.add(request(text, priority))
        assert all_of(queue) == ["e", "c", "d", "b", "a"]


def test_requests_of_several_levels_are_batched_together(tmp_path: Path) -> None:
    queue = waiting(tmp_path, f"max_batch_size: 3\n{LEVELS}")
    for text, priority, width in (("a", 3, 1), ("b", 2, 1), ("c", 1, 1), ("d", 1, 2), ("e", 1, 1)):
        queue.add(request(text, priority, width))
    assert all_of(queue) == ["c", "d", "eba"]


def test_the_queue_delay_counts_from_the_oldest_request(tmp_path: Path) -> None:
    queue = waiting(
        tmp_path,
        "max_batch_size: 3\n" + LEVELS.replace("{", "{ max_queue_delay_microseconds: 60000000"),
    )
    early = queue.add(request("a", 3))
    queue.add(request("b", 1))
    assert queue.take(ANY_INSTANCE) == []
    early.arrived -= 59
    assert 0 < queue.delay() < 2
    early.arrived -= 1
    assert names(queue.take(ANY_INSTANCE)) == "ba"


def test_requests_put_back_are_the_first_of_their_level(tmp_path: Path) -> None:
    queue = waiting(tmp_path, "")
    given = {
        text: queue.add(request(text, priority))
        for text, priority in (("a", 1), ("b", 2), ("c", 2))
    }
    taken = queue.take(ANY_INSTANCE) + queue.take(ANY_INSTANCE)
    queue.add(request("d", 1))
    queue.put_back(taken)
    queue.remove(given["c"])
    queue.remove(given["c"])
    assert len(queue) == 3
    assert all_of(queue) == ["a", "d", "b"]


def test_the_queue_matches_a_sorted_list_for_any_operations(tmp_path: Path) -> None:
    chance, queue = random.Random(5), waiting(tmp_path, "")
    there: list[tuple[int, int, Any]] = []
    for number in range(600):
        if chance.random() < 0.6:
            level = chance.randint(1, 9)
            there.append((level, number, queue.add(request("x", level))))
        elif there and chance.random() < 0.5:
            queue.remove(there.pop(chance.randrange(len(there)))[2])
        elif there:
            there.sort(key=lambda entry: entry[:2])
            assert queue.take(ANY_INSTANCE) == [there.pop(0)[2]]
        assert len(queue) == len(there)
    assert queue.clear() == [pending for *_, pending in sorted(there, key=lambda entry: entry[:2])]
    assert len(queue) == 0


async def test_urgent_requests_overtake_others(tmp_path: Path) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    gate.touch()
    code = NOTING.format(log=str(log), gate=str(gate))
    async with open_models(write_model(tmp_path / "models", "m", code, LEVELS), "m") as models:

        async def ask(text: str, priority: int) -> list[str]:
            return response_texts(
                [
                    answer
                    async for answer in models["m"].infer(text_request(text, priority=priority))
                ]
            )

        tasks = [
            asyncio.ensure_future(ask(text, priority))
            for text, priority in (("first", 3), ("late", 3), ("usual", 0), ("urgent", 1))
        ]
        await asyncio.sleep(0)
        gate.write_text("open")
        assert await asyncio.gather(*tasks) == [["first"], ["late"], ["usual"], ["urgent"]]
    assert log.read_text().split() == ["first", "urgent", "usual", "late"]

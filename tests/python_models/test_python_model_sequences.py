"""Sequence batching: one instance per sequence, in order, with the control tensors."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from python_model_harness import (
    ask,
    models_of,
    open_models,
    response_texts,
    text_tensor,
    write_model,
)

from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.models.response_cache import ResponseCache
from slipstream.server.models.warmup import warm_up
from slipstream.server.python_models import sequence_queue
from slipstream.server.python_models.request_queue import Pending
from slipstream.server.python_models.sequence_queue import SequenceQueue

CONTROLS = """control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0.5, 1.5 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 3, 4 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } ] },
    { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]"""
STATEFUL = """
import os, numpy as np, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.texts = {}
    def execute(self, requests):
        answers = []
        for request in requests:
            given = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                     for name in ("text_input", "START", "END", "READY", "ID")}
            text, identity = given.pop("text_input").ravel()[0].decode(), given["ID"].ravel()[0]
            if text == "crash": os._exit(9)
            self.texts[identity] = text if given["START"].ravel()[0] > 1 else self.texts[identity] + text
            described = [f"{name}={value.tolist()}{value.dtype}" for name, value in given.items()]
            answer = f"{os.getpid()} {self.texts[identity]} {' '.join(described)}".encode()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([[answer]], object))]))
        return answers
"""
ONE_AT_ONCE = "instance_group [ { count: 1 kind: KIND_CPU } ]\nsequence_batching { %s }"


def request(
    identity: int | str,
    text: str = "x",
    start: bool = False,
    end: bool = False,
    rows: int = 1,
    width: int = 1,
) -> InferRequest:
    tensor = text_tensor(text, shape=(rows, width))
    tensor.data = tensor.data * rows * width
    return InferRequest(
        "m",
        "1",
        {"text_input": tensor},
        id=text,
        sequence_id=identity,
        sequence_start=start,
        sequence_end=end,
    )


async def test_a_sequence_stays_on_its_instance_in_order(tmp_path: Path) -> None:
    config = "max_batch_size: 2\ninstance_group [ { count: 2 kind: KIND_CPU } ]\n"
    config += f"sequence_batching {{ max_sequence_idle_microseconds: 60000000 {CONTROLS} }}"
    async with open_models(write_model(tmp_path, "m", STATEFUL, config), "m") as models:
        processes: dict[int, set[str]] = defaultdict(set)

        async def step(identity: int, text: str, start: bool = False, end: bool = False) -> str:
            (answer,) = response_texts(await ask(models["m"], request(identity, text, start, end)))
            process, seen = answer.split(" ", 1)
            processes[identity].add(process)
            return seen

        steps = [(identity, text) for text in "abcd" for identity in (1, 2, 3)]
        answers = await asyncio.gather(
            *(step(identity, text, text == "a", text == "d") for identity, text in steps)
        )
        for (identity, text), seen in zip(steps, answers, strict=True):
            so_far, start, end, ready, corrid = seen.split(" ")
            assert so_far == "abcd"[: "abcd".index(text) + 1]
            assert start == ("START=[[1.5]]float32" if text == "a" else "START=[[0.5]]float32")
            assert end == ("END=[[4]]int32" if text == "d" else "END=[[3]]int32")
            assert (ready, corrid) == ("READY=[[True]]bool", f"ID=[[{identity}]]uint64")
        assert [len(used) for used in processes.values()] == [1, 1, 1]
        assert len(set().union(*processes.values())) == 2
        for identity in (8, 9):
            await step(identity, "a", start=True)
        assert processes[8] != processes[9]  # the instance with fewer sequences takes the next one
        with pytest.raises(InferenceError) as raised:
            await step(2, "e")  # the sequence has ended
        assert raised.value.message == (
            "inference request for sequence 2 to model 'm' must specify the START flag on the first request of the "
            "sequence"
        )


async def test_an_idle_sequence_makes_room_for_another(tmp_path: Path) -> None:
    config = (
        "max_batch_size: 1\n" + ONE_AT_ONCE % f"max_sequence_idle_microseconds: 30000 {CONTROLS}"
    )
    async with open_models(write_model(tmp_path, "m", STATEFUL, config), "m") as models:
        await ask(models["m"], request(1, "a", start=True))
        (answer,) = response_texts(
            await asyncio.wait_for(ask(models["m"], request(2, "b", start=True)), 20)
        )
        assert answer.split(" ")[1] == "b"
        with pytest.raises(
            InferenceError, match="sequence 1 to model 'm' must specify the START flag"
        ):
            await ask(models["m"], request(1, "c"))


async def test_sequences_end_with_their_process(tmp_path: Path) -> None:
    config = (
        "max_batch_size: 2\n" + ONE_AT_ONCE % f"max_sequence_idle_microseconds: 60000000 {CONTROLS}"
    )
    config += '\nmodel_warmup [ { name: "w" inputs { key: "text_input" value: { data_type: TYPE_STRING dims: 1 '
    config += "zero_data: true } } } ]"
    folder = write_model(tmp_path, "m", STATEFUL, config)
    async with open_models(folder, "m") as models:
        model = models["m"]
        await warm_up(model, model.config, 1)
        for identity in (1, 2):
            await ask(model, request(identity, "a", start=True))
        crash, waits = await asyncio.gather(
            ask(model, request(1, "crash")), ask(model, request(2, "b"))
        )
        assert [answers[0].error is not None for answers in (crash, waits)] == [True, True]
        with pytest.raises(
            InferenceError, match="sequence 2 to model 'm' must specify the START flag"
        ):
            await ask(model, request(2, "c"))
        (answer,) = response_texts(
            await asyncio.wait_for(ask(model, request(2, "d", start=True)), 20)
        )
        assert answer.split(" ")[1] == "d"


def sequences(folder: Path, batching: str = "", rows: int = 0) -> SequenceQueue:
    folder = write_model(
        folder, "m", "", f"max_batch_size: {rows}\nsequence_batching {{ {batching} }}"
    )
    config = models_of(folder)["m"].config
    assert config.sequence_batching is not None
    return SequenceQueue(config, config.sequence_batching)


ANY: list[Any] = ["first", "second", "third"]  # instances


def names(batch: list[Pending]) -> str:
    return "".join(pending.request.id for pending in batch)


def test_a_sequence_waits_while_no_instance_has_room(tmp_path: Path) -> None:
    queue = sequences(tmp_path)
    for identity in (1, 2, "three"):
        queue.add(request(identity, str(identity)[0], start=True))
        queue.add(request(identity, str(identity)[0].upper(), end=True))
    first, second = queue.take(ANY[0]), queue.take(ANY[1])
    assert (names(first), names(second)) == ("1", "2")
    last = queue.take(ANY[1])
    assert names(last) == "2"
    assert queue.take(ANY[1]) == []  # the sequence has not ended
    assert [queue.load(instance) for instance in ANY] == [1, 1, 0]
    queue.finished(*second)
    assert queue.finished(*last)
    assert names(queue.take(ANY[1])) == "t"
    assert (names(queue.take(ANY[0])), names(queue.take(ANY[1])), len(queue)) == ("1", "T", 0)


def test_the_oldest_strategy_batches_several_sequences(tmp_path: Path) -> None:
    queue = sequences(tmp_path, "oldest { max_candidate_sequences: 3 }", rows=2)
    for identity, text, start, width in (
        (1, "a", True, 1),
        (1, "b", False, 1),
        (2, "c", True, 2),
        (2, "d", False, 1),
        (3, "e", True, 1),
        (4, "f", True, 1),
    ):
        queue.add(request(identity, text, start, width=width))
    batches = [names(queue.take(ANY[0])) for _ in range(4)]
    assert batches == ["a", "b", "c", "de"]  # d has the shape of a, but is not executed before c
    assert len(queue) == 1
    assert names(queue.take(ANY[1])) == "f"  # the first has three sequences


def test_invalid_sequence_requests_are_refused(tmp_path: Path) -> None:
    queue = sequences(tmp_path, CONTROLS, rows=2)
    for wrong, why in (
        (request(0, start=True), "must specify a non-zero or non-empty correlation ID"),
        (
            request(1, start=True, rows=2),
            "must specify batch-size 1 due to requirements of sequence batcher",
        ),
        (request(1), "inference request for sequence 1 to model 'm' must specify the START flag"),
        (request("one", start=True), "sequence_id does not fit the UINT64 of 'ID', got 'one'"),
        (request(2**64, start=True), "sequence_id does not fit the UINT64 of 'ID'"),
    ):
        with pytest.raises(InferenceError, match=why):
            queue.add(wrong)
    assert len(queue) == 0
    assert queue.take(ANY[0]) == []
    named = sequences(tmp_path / "named", CONTROLS.replace("UINT64", "STRING"))
    tensor = named.add(request("one", start=True)).request.inputs["ID"]
    assert (tensor.datatype, tensor.shape, tensor.data) == ("BYTES", (1,), [b"one"])
    with pytest.raises(InferenceError, match="sequence_id does not fit the BYTES of 'ID', got 1"):
        named.add(request(1, start=True))


def test_a_sequence_ends_when_one_of_its_waiting_requests_is_cancelled(tmp_path: Path) -> None:
    queue = sequences(tmp_path)
    running = queue.add(request(1, "a", start=True))
    assert queue.take(ANY[0]) == [running]
    dropped, after, other = (
        queue.add(request(1, "b")),
        queue.add(request(1, "c")),
        queue.add(request(2, "d", True)),
    )
    queue.remove(dropped)
    (((response, _),),) = (after.answers,)
    assert response is not None
    assert response.error is not None
    assert (
        response.error.message
        == "sequence 1 was broken off: a request before this one was cancelled"
    )
    assert (len(queue), queue.take(ANY[0])) == (1, [])
    with pytest.raises(InferenceError, match="must specify the START flag"):
        queue.add(request(1, "e"))
    assert queue.finished(running)
    assert queue.take(ANY[0]) == [other]


def test_an_idle_sequence_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(sequence_queue, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    queue = sequences(tmp_path, "max_sequence_idle_microseconds: 5000000")

    def run(text: str, start: bool = False) -> None:
        pending = queue.add(request(1, text, start))
        assert queue.take(ANY[0]) == [pending]
        clock[0] += 20  # a running sequence is not idle
        queue.add(request(1, text.upper()))
        queue.finished(pending)
        queue.finished(*queue.take(ANY[0]))

    run("a", start=True)
    clock[0] += 4
    run("b")
    clock[0] += 4
    queue.add(request(2, "c", start=True))
    assert (queue.take(ANY[0]), queue.delay()) == ([], 1.0)
    clock[0] += 1
    assert names(queue.take(ANY[0])) == "c"
    with pytest.raises(InferenceError, match="must specify the START flag"):
        queue.add(request(1, "d"))


def test_after_its_end_the_same_id_is_another_sequence(tmp_path: Path) -> None:
    queue = sequences(tmp_path)
    queue.add(request(1, "a", start=True, end=True))
    with pytest.raises(InferenceError, match="must specify the START flag"):
        queue.add(request(1, "b"))
    queue.add(request(1, "c", start=True))
    assert [names(queue.take(instance)) for instance in ANY] == ["a", "c", ""]


def test_a_waiting_sequence_starts_before_later_requests(tmp_path: Path) -> None:
    queue = sequences(tmp_path, rows=2)
    queue.add(request(1, "a", start=True))
    assert names(queue.take(ANY[0])) == "a"
    for identity, text in ((2, "b"), (1, "c")):
        queue.add(request(identity, text, start=identity == 2))
    order = [names(queue.take(ANY[0]))]
    queue.add(request(1, "d"))
    assert order + [names(queue.take(ANY[0])) for _ in range(2)] == ["c", "b", "d"]


@pytest.mark.parametrize("batching", ["", "oldest { max_candidate_sequences: 2 }"])
def test_each_sequence_is_executed_in_order_for_any_traffic(tmp_path: Path, batching: str) -> None:
    chance, queue = random.Random(7), sequences(tmp_path, batching, rows=2)
    left = {identity: chance.randint(1, 6) for identity in range(1, 40)}
    sent, seen, places = dict.fromkeys(left, 0), defaultdict(list), defaultdict(set)
    running: dict[Any, list[Pending]] = {instance: [] for instance in ANY}
    while any(left.values()) or len(queue) or any(running.values()):
        if (identity := chance.choice(list(left))) and left[identity] and chance.random() < 0.5:
            left[identity] -= 1
            queue.add(
                request(identity, str(sent[identity]), sent[identity] == 0, left[identity] == 0)
            )
            sent[identity] += 1
        instance = chance.choice(ANY)
        for pending in running[instance]:
            queue.finished(pending)
        running[instance] = queue.take(instance)
        assert queue.load(instance) <= 2
        assert len({pending.request.sequence_id for pending in running[instance]}) == len(
            running[instance]
        )
        assert len(running[instance]) <= (2 if batching else 1)
        for pending in running[instance]:
            seen[pending.request.sequence_id].append(int(pending.request.id))
            places[pending.request.sequence_id].add(instance)
    assert seen == {identity: list(range(count)) for identity, count in sent.items()}
    assert {len(used) for used in places.values()} == {1}
    assert [queue.load(instance) for instance in ANY] == [0, 0, 0]


async def test_a_sequence_model_reports_its_limit_and_is_not_cached(
    tmp_path: Path,
) -> None:
    config = f"response_cache {{ enable: true }}\nsequence_batching {{ {CONTROLS} }}"
    completing = """
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(3)
        return config
"""
    async with open_models(
        write_model(tmp_path, "m", STATEFUL + completing, config), "m"
    ) as models:
        entry = models.registry.find("m")
        batching = entry.model.config.sequence_batching
        assert batching is not None
        assert batching.sequences == 3
        assert ResponseCache(1 << 20).wrap(entry) is entry.model

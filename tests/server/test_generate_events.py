"""A stream's events are written from a cached layout and equal events written without one."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from slipstream.server.http.generate import EventWriter, write_response
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.kserve.tensors import Tensor

NAMES = ["text_output", "a", "zz", "id", "model_name", "é", 'qu"ote']
VALUES: list[list[Any]] = [[b" 7"], [b"a", b'"b"'], [], [0.0, 1.5], [True], [3]]


def response(chance: random.Random, names: list[str], parameters: dict[str, Any]) -> InferResponse:
    if chance.random() < 0.1:
        return InferResponse(error=InferenceError("no \n more"))
    tensors = [Tensor(name, "BYTES", (1,), chance.choice(VALUES)) for name in names]
    return InferResponse(tensors, dict(parameters) if chance.random() < 0.5 else parameters)


def test_events_of_a_stream_equal_events_written_one_by_one() -> None:
    chance = random.Random(4)
    for _ in range(300):
        request = InferRequest("llm", "1", {}, id=chance.choice(["", "r 1", '"']))
        events = EventWriter(request)
        names = chance.sample(NAMES, chance.randint(0, 4))
        parameters = {}
        for _ in range(12):
            if chance.random() < 0.2:  # models may change their outputs
                names = chance.sample(NAMES, chance.randint(0, 4))
                parameters = dict(
                    chance.sample(
                        [("sequence_id", 0), ("a", "x"), ("b", True)], chance.randint(0, 3)
                    )
                )
            answer = response(chance, names, parameters)
            event = events.write_next(answer) or events.write(answer)
            assert event == b"data: " + write_response(request, answer) + b"\n\n"


def test_an_output_is_written_again_when_its_data_changes():
    """Placeholders share their data, which is written once per stream."""
    request = InferRequest("m", "1", {})
    shared = np.zeros(1, np.float32)
    other = np.ones(1, np.float32)
    events = EventWriter(request)
    written = [
        events.write(InferResponse([Tensor("a", "FP32", (1,), data)]))
        for data in (shared, shared, other, shared)
    ]
    values = [json.loads(event.removeprefix(b"data: "))["a"] for event in written]
    assert values == [0.0, 0.0, 1.0, 0.0]

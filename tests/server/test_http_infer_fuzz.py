"""Damaged infer bodies are read as requests or refused with an error, and never crash."""

from __future__ import annotations

import json
import random

import pytest
from fuzzing import damaged
from grpc_support import recorded_registry
from recordings import http_cases, recorded_bytes

from slipstream.repository.json_config import message_from_json
from slipstream.repository.problems import Problems
from slipstream.repository.schema import FileReading
from slipstream.server.http.infer_request import read_infer_call
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.shared_memory import SharedMemory


def run(cases: int, seed: int) -> tuple[int, int]:
    chance = random.Random(seed)
    registry = recorded_registry()[0]
    memory = SharedMemory()
    recorded = [
        (recorded_bytes(case["request"]), case["request"]["path"].split("/")[3])
        for name, case in http_cases().items()
        if name.startswith("infer-") and "unknown-model" not in name
    ]
    read = 0
    refused = 0
    for _ in range(cases):
        original, model = chance.choice(recorded)
        body = damaged(original, chance)
        header = chance.choice([None, None, None, 0, chance.randint(0, len(body))])
        try:
            read_infer_call(body, header, registry.find(model).model.config, "1", memory)
            read += 1
        except InferenceError:
            refused += 1
    return read, refused


def test_damaged_bodies_are_refused_or_parsed() -> None:
    read, refused = run(3000, 7)
    assert refused > 1000
    # some damaged bodies still parse, so that the checks after parsing are tested, too
    assert read > 20


@pytest.mark.slow
def test_many_damaged_bodies_are_refused_or_parsed() -> None:
    read, refused = run(100_000, 8)
    assert read + refused == 100_000


def test_damaged_configurations_are_reported_as_problems() -> None:
    chance = random.Random(9)
    good = json.dumps(
        {
            "name": "m",
            "max_batch_size": 4,
            "input": [{"name": "x", "data_type": "TYPE_INT32", "dims": ["1", -1]}],
            "parameters": {"a": {"string_value": "b"}},
            "version_policy": {"specific": {"versions": [1]}},
            "model_warmup": [{"name": "w", "inputs": {"x": {"dims": [1], "zero_data": True}}}],
        }
    ).encode()
    seen = 0
    for _ in range(20_000):
        try:
            document = json.loads(damaged(good, chance))
        except ValueError:
            continue
        if isinstance(document, dict):
            seen += 1
            FileReading("config", Problems()).message(
                "ModelConfig", message_from_json("ModelConfig", document)
            )
    assert seen > 200

"""Python models that share a resource: their instances take turns, and all requests are answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from python_model_harness import ask, models_of, response_texts, write_model

from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.python_models.factory import PythonModels
from slipstream.server.python_models.model import PythonModel
from slipstream.server.python_models.rate_limiter import GLOBAL, RateLimiter

CODE = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        with open({log!r}, "a") as file:
            file.write(f"begin {{os.getpid()}}\\n")
        time.sleep(0.01)
        with open({log!r}, "a") as file:
            file.write(f"end {{os.getpid()}}\\n")
        texts = [pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]) for text in texts]
"""
LIMITED = "instance_group [ {{ count: {count} kind: KIND_CPU rate_limiter {{ resources [ {resource} ] }} }} ]"
RESOURCE = '{ name: "lock" global: true count: 1 }'


async def open_model(folder: Path, name: str, limiter: RateLimiter | None) -> PythonModel:
    model = await PythonModels(limiter).load(models_of(folder)[name], 1, ModelRegistry())
    assert isinstance(model, PythonModel)
    return model


def most_at_once(log: Path) -> int:
    running = most = 0
    for line in log.read_text().splitlines():
        running += 1 if line.startswith("begin") else -1
        most = max(most, running)
    return most


@pytest.mark.parametrize(
    ("limiter", "expected"), [(RateLimiter({("lock", GLOBAL): 1}), 1), (None, 2)]
)
async def test_instances_that_share_a_resource_take_turns(
    tmp_path: Path, limiter: RateLimiter | None, expected: int
) -> None:
    log = tmp_path / "log"
    config = LIMITED.format(count=2, resource=RESOURCE)
    write_model(tmp_path / "models", "timed", CODE.format(log=str(log)), config)
    model = await open_model(tmp_path / "models", "timed", limiter)
    try:
        answers = await asyncio.gather(*(ask(model, f"text {number}") for number in range(12)))
    finally:
        await model.close()
    assert [response_texts(answer) for answer in answers] == [
        [f"text {number}"] for number in range(12)
    ]
    assert most_at_once(log) == expected


async def test_two_models_share_one_resource(tmp_path: Path) -> None:
    log, limiter = tmp_path / "log", RateLimiter({("lock", GLOBAL): 1})
    for name in ("one", "two"):
        config = LIMITED.format(count=1, resource=RESOURCE)
        write_model(tmp_path / "models", name, CODE.format(log=str(log)), config)
    models = [await open_model(tmp_path / "models", name, limiter) for name in ("one", "two")]
    try:
        answers = await asyncio.gather(
            *(ask(models[number % 2], str(number)) for number in range(10))
        )
    finally:
        await asyncio.gather(*(model.close() for model in models))
    assert [response_texts(answer) for answer in answers] == [[str(number)] for number in range(10)]
    assert most_at_once(log) == 1


async def test_a_model_that_needs_more_than_the_limit_does_not_load(tmp_path: Path) -> None:
    config = LIMITED.format(count=1, resource='{ name: "lock" global: true count: 4 }')
    write_model(tmp_path / "models", "greedy", CODE.format(log=str(tmp_path / "log")), config)
    with pytest.raises(InferenceError, match="is limited to 1"):
        await open_model(tmp_path / "models", "greedy", RateLimiter({("lock", GLOBAL): 1}))

"""`typical_p` has the same effect on every protocol.

With a tiny `typical_p` one token is left at each step: the one whose negative log-probability is
nearest to the entropy. The completion is then the same for every seed, and transformers computes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from grpc_support import RunningGrpc
from http_support import RunningServer, post
from openai_server import Serving
from optional_tensors import write_declared

from slipstream import LLM
from slipstream.repository.models import read_repository
from slipstream.repository.roles import Role
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.models.build import build_registry
from slipstream.server.services import create_app

PROMPT = "Once upon a time"
TOKENS = 16
TEMPERATURE = 8.0  # the tiny model prefers one token; this makes others likely, too
SMALLEST = 1e-6
DRAWS = {"temperature": TEMPERATURE, "max_tokens": TOKENS}
DECLARED = '{ name: "typical_p" data_type: TYPE_FP32 dims: [ 1 ] optional: true }'


@pytest.fixture(scope="module")
def expected(serving: Serving) -> str:
    """Return the completion of transformers with its own warpers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(serving.model_folder).float()
    tokenizer = serving.generator.tokenizer
    prompt = tokenizer.encode(PROMPT)
    ids = list(prompt)
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[:, -1].float()
        warped = transformers.TemperatureLogitsWarper(TEMPERATURE)(None, logits)
        ids.append(int(transformers.TypicalLogitsWarper(SMALLEST)(None, warped).argmax()))
    return tokenizer.decode(ids[len(prompt) :])


@pytest.fixture(scope="module")
def registry(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    """Return the models of a repository whose models declare the input `typical_p`."""
    engine = serving.model_folder.parent / "engine"
    folder = tmp_path_factory.mktemp("typical") / "repo"
    write_declared(folder, engine, decoupled_mode="false")
    for model in ("chat", "ensemble", "tensorrt_llm"):
        path = folder / model / "config.pbtxt"
        text = path.read_text().replace("input [\n", f"input [\n  {DECLARED},\n", 1)
        wire = 'input_map { key: "streaming"'
        text = text.replace(wire, 'input_map { key: "typical_p" value: "typical_p" }\n' + wire)
        path.write_text(text)
    repository = read_repository(folder)
    assert repository.models["chat"].role is Role.BLS
    return build_registry(repository, {"tensorrt_llm": serving.generator})


@pytest.fixture(scope="module")
def http(serving: Serving, registry: ModelRegistry) -> Iterator[str]:
    with RunningServer(create_app(registry, ServerState([serving.engine]))) as server:
        yield f"127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def grpc(serving: Serving, registry: ModelRegistry) -> Iterator[str]:
    with RunningGrpc(registry, ServerState([serving.engine])) as server:
        yield f"127.0.0.1:{server.port}"


def generate(address: str, status: int = 200, model: str = "chat", **fields: Any) -> dict[str, Any]:
    body = {"text_input": PROMPT, **DRAWS, **fields}
    answer = post(
        int(address.split(":")[1]), f"/v2/models/{model}/generate", json.dumps(body).encode()
    )
    assert answer.status == status, answer.body
    return dict(json.loads(answer.body))


def tensors(module: Any, values: dict[str, Any]) -> list[Any]:
    kinds = {bytes: ("BYTES", np.object_), int: ("INT32", np.int32), float: ("FP32", np.float32)}
    given = []
    for name, value in values.items():
        datatype, dtype = kinds[type(value)]
        tensor = module.InferInput(name, [1, 1], datatype)
        tensor.set_data_from_numpy(np.array([[value]], dtype))
        given.append(tensor)
    return given


def test_transformers_expects_another_text_than_the_greedy_one(
    serving: Serving, expected: str
) -> None:
    greedy = serving.client.completions.create(
        model="chat", prompt=PROMPT, temperature=0, max_tokens=TOKENS
    )
    assert greedy.choices[0].text != expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_openai_routes_take_typical_p(serving: Serving, expected: str, seed: int) -> None:
    def complete(**extra: Any) -> str:
        answer = serving.client.completions.create(
            model="chat", prompt=PROMPT, seed=seed, extra_body=extra, **DRAWS
        )
        return answer.choices[0].text

    assert complete(typical_p=SMALLEST) == expected
    assert complete(typical_p=1.0) == complete() != expected


@pytest.mark.parametrize("wrong", [0, 1.5, -0.1])
def test_openai_routes_reject_wrong_values(serving: Serving, wrong: float) -> None:
    with pytest.raises(openai.BadRequestError, match="typical_p must be over 0 and at most 1"):
        serving.client.completions.create(
            model="chat", prompt=PROMPT, extra_body={"typical_p": wrong}
        )


@pytest.mark.parametrize("model", ["chat", "ensemble"])
def test_generate_takes_a_declared_input(http: str, expected: str, model: str) -> None:
    for seed in (1, 2):
        answer = generate(http, model=model, typical_p=SMALLEST, random_seed=seed)
        assert answer["text_output"] == expected


def test_generate_takes_a_request_parameter(serving: Serving, expected: str) -> None:
    """The models of `serving` do not declare the input."""
    address = f"127.0.0.1:{serving.port}"
    assert generate(address, typical_p=SMALLEST, random_seed=5)["text_output"] == expected
    plain = generate(address, random_seed=5)["text_output"]
    assert generate(address, typical_p=1.0, random_seed=5)["text_output"] == plain != expected


def test_generate_rejects_a_value_outside_the_bounds(http: str) -> None:
    error = generate(http, 400, typical_p=0.0)["error"]
    assert "typical_p must be over 0 and at most 1, got 0.0" in error


@pytest.mark.parametrize("model", ["chat", "ensemble"])
def test_infer_takes_the_tensor(http: str, expected: str, model: str) -> None:
    client = http_client.InferenceServerClient(http)
    values = {"text_input": PROMPT.encode(), "typical_p": SMALLEST, **DRAWS}
    result = client.infer(model, tensors(http_client, values))
    assert result.as_numpy("text_output").reshape(-1)[0].decode() == expected
    client.close()


@pytest.mark.parametrize("model", ["chat", "ensemble"])
def test_grpc_takes_the_tensor(grpc: str, expected: str, model: str) -> None:
    client = grpc_client.InferenceServerClient(grpc)
    values = {"text_input": PROMPT.encode(), "typical_p": SMALLEST, **DRAWS}
    result = client.infer(model, tensors(grpc_client, values))
    assert result.as_numpy("text_output").reshape(-1)[0].decode() == expected
    client.close()


def test_grpc_takes_the_tensor_of_the_engine_model(
    serving: Serving, grpc: str, expected: str
) -> None:
    ids = serving.generator.tokenizer.encode(PROMPT)
    client = grpc_client.InferenceServerClient(grpc)
    prompt = grpc_client.InferInput("input_ids", [1, len(ids)], "INT32")
    prompt.set_data_from_numpy(np.array([ids], np.int32))
    values = {
        "input_lengths": len(ids),
        "request_output_len": TOKENS,
        "temperature": TEMPERATURE,
        "typical_p": SMALLEST,
    }
    result = client.infer("tensorrt_llm", [prompt, *tensors(grpc_client, values)])
    tokens = result.as_numpy("output_ids").reshape(-1).tolist()
    assert serving.generator.tokenizer.decode(tokens[-TOKENS:]) == expected
    client.close()


def test_llm_takes_the_option(serving: Serving, expected: str) -> None:
    engine = serving.model_folder.parent / "engine"
    with LLM(engine, dtype="float32", cache_tokens=512, threads=1) as llm:
        for seed in (1, 2):
            (completion,) = llm.generate(PROMPT, typical_p=SMALLEST, seed=seed, **DRAWS)
            assert completion.text == expected
        with pytest.raises(ValueError, match="typical_p must be over 0 and at most 1, got 0"):
            llm.generate(PROMPT, typical_p=0.0)

"""LoRA adapters through a running server, over HTTP and gRPC: weights, task ids, names, errors.

The expected answers are those of transformers with the adapter merged by peft.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from real_server import limit_cache
from test_cancel_soak import RealServer
from tiny_adapters import ALL_MODULES, save_adapter
from tiny_models import config_of, random_model
from tiny_server import MODEL, ROOT, wait_for

from slipstream.repository.templates import write_repository
from slipstream.weights.build import build_engine
from slipstream.weights.lora import convert_adapter, read_adapter

PROMPT = [7, 11, 13, 17, 19]
KINDS = {"french": {"rank": 8}, "german": {"rank": 12, "modules": ALL_MODULES}, "41": {"rank": 4}}
TENSORS = """  { name: "lora_task_id" data_type: TYPE_UINT64 dims: [ 1 ] optional: true },
  { name: "lora_weights" data_type: TYPE_FP16 dims: [ -1, -1 ] optional: true },
  { name: "lora_config" data_type: TYPE_INT32 dims: [ -1, 3 ] optional: true },
"""


def greedy(model, count: int = 12) -> list[int]:
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    base = random_model(config_of("llama", max_position_embeddings=256)).eval()
    base.save_pretrained(folder / "model")
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(96)}, "unk_token": "0"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": words,
    }
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model" / "tokenizer_config.json").write_text("{}")
    expected = {"": greedy(base)}
    for seed, (name, options) in enumerate(KINDS.items()):
        expected[name] = greedy(
            save_adapter(base, folder / "adapters" / name, seed=seed, **options)
        )
    assert len({tuple(answer) for answer in expected.values()}) == 4
    (folder / "expected.json").write_text(json.dumps(expected))
    shutil.copytree(folder / "adapters" / "french", folder / "adapters" / "broken")
    (folder / "adapters" / "broken" / "adapter_model.safetensors").write_bytes(b"not a tensor file")
    return folder


@pytest.fixture(scope="module")
def expected(place: Path) -> dict[str, list[int]]:
    return json.loads((place / "expected.json").read_text())


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def server(place: Path, request):
    """A server with one engine or with two replicas of it."""
    repository = place / f"repository {request.param}"
    engine = build_engine(place / "model", place / "engine", dtype="float32")
    write_repository(repository, MODEL, engine, engine, 64)
    config = repository / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace("{ count: 1", f"{{ count: {request.param}"))
    text = f'parameters {{ key: "lora_prefetch_dir" value {{ string_value: "{place / "adapters"}" }} }}\n'
    assert "decoupled: True" in config.read_text()
    # HTTP serves only models that are not decoupled
    config.write_text(config.read_text().replace("decoupled: True", "decoupled: False") + text)
    limit_cache(repository)
    # add the adapter tensors that the ensemble has since 0.18
    ensemble = repository / "ensemble" / "config.pbtxt"
    text = ensemble.read_text().replace("input [\n", "input [\n" + TENSORS, 1)
    wires = "".join(
        f'input_map {{ key: "{name}" value: "{name}" }}\n'
        for name in ("lora_task_id", "lora_weights", "lora_config")
    )
    at = 'input_map { key: "streaming" value: "stream" }\n'
    assert at in text
    ensemble.write_text(text.replace(at, at + wires))
    running = RealServer(repository, place / "log")
    yield running
    assert running.close() == 0, running.log()


def tensors_of(place: Path, name: str, task: int = 0) -> dict[str, numpy.ndarray]:
    adapter = read_adapter(place / "adapters" / name, "float16")
    arrays = {"lora_weights": adapter.weights, "lora_config": adapter.config}
    return arrays | ({"lora_task_id": numpy.array([[task]], dtype=numpy.uint64)} if task else {})


def token_arrays(**more: numpy.ndarray) -> dict[str, numpy.ndarray]:
    return {
        "input_ids": numpy.array([PROMPT], dtype=numpy.int32),
        "end_id": numpy.array([[-1]], dtype=numpy.int32),
        "input_lengths": numpy.array([[len(PROMPT)]], dtype=numpy.int32),
        "request_output_len": numpy.array([[12]], dtype=numpy.int32),
        **more,
    }


def ask(
    server: RealServer, protocol: str, arrays: dict[str, numpy.ndarray], **parameters
) -> list[int]:
    """Return the new tokens of the engine model's answer."""
    module = triton_http if protocol == "http" else triton_grpc
    inputs = []
    for name, array in arrays.items():
        given = module.InferInput(
            name, list(array.shape), triton_http.np_to_triton_dtype(array.dtype)
        )
        given.set_data_from_numpy(array)
        inputs.append(given)
    if protocol == "http":
        with triton_http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
            answer = client.infer("tensorrt_llm", inputs, parameters=parameters or None)
            return answer.as_numpy("output_ids")[0, 0].tolist()
    answers: list = []
    with triton_grpc.InferenceServerClient(
        f"127.0.0.1:{server.ports['GRPCInferenceService']}"
    ) as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        client.async_stream_infer("tensorrt_llm", inputs, parameters=parameters or None)
        client.stop_stream()
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0].as_numpy("output_ids")[0, 0].tolist()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_task_id_selects_the_weights_sent_before(server, place, expected, protocol):
    task = 100 + len(protocol)
    once = ask(server, protocol, token_arrays(**tensors_of(place, "german", task)))
    again = ask(
        server, protocol, token_arrays(lora_task_id=numpy.array([[task]], dtype=numpy.uint64))
    )
    assert once == again == expected["german"]
    assert ask(server, protocol, token_arrays()) == expected[""]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_weights_are_used_without_a_task_id(server, place, expected, protocol):
    assert ask(server, protocol, token_arrays(**tensors_of(place, "french"))) == expected["french"]


def test_an_unknown_task_is_refused(server):
    with pytest.raises(triton_grpc.InferenceServerException) as caught:
        ask(server, "grpc", token_arrays(lora_task_id=numpy.array([[9]], dtype=numpy.uint64)))
    assert "LoRA task 9 not found in cache. Please send LoRA weights with request" in str(
        caught.value
    )


def test_concurrent_requests_use_their_own_adapters(server, place, expected):
    names = ["", "french", "german", "41"] * 4
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda name: ask(
                    server, "http", token_arrays(**(tensors_of(place, name) if name else {}))
                ),
                names,
            )
        )
    assert answers == [expected[name] for name in names]


def generate(server: RealServer, model: str, **more) -> httpx.Response:
    body = {"text_input": " ".join(map(str, PROMPT)), "max_tokens": 12, "end_id": -1, **more}
    return httpx.post(
        f"http://127.0.0.1:{server.http_port}/v2/models/{model}/generate", json=body, timeout=60
    )


@pytest.mark.parametrize("model", [MODEL, "ensemble"])
def test_an_adapter_is_selected_by_name(server, expected, model):
    for name in ("french", "german", "41"):
        assert generate(server, model, lora_name=name).json()["text_output"].split() == [
            str(token) for token in expected[name]
        ]
    # a task id selects the folder of that name
    assert generate(server, model, lora_task_id=41).json()["text_output"].split() == [
        str(token) for token in expected["41"]
    ]
    assert ask(server, "grpc", token_arrays(), lora_name="german") == expected["german"]


def test_an_ensemble_passes_the_adapter_tensors_to_the_engine(server, place, expected):
    inputs = []
    text = numpy.array([[" ".join(map(str, PROMPT)).encode()]], dtype=object)
    arrays = {
        "text_input": text,
        "max_tokens": numpy.array([[12]], dtype=numpy.int32),
        "end_id": numpy.array([[-1]], dtype=numpy.int32),
        **tensors_of(place, "german"),
    }
    for name, array in arrays.items():
        given = triton_http.InferInput(
            name, list(array.shape), triton_http.np_to_triton_dtype(array.dtype)
        )
        given.set_data_from_numpy(array)
        inputs.append(given)
    with triton_http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        answer = client.infer("ensemble", inputs).as_numpy("text_output")[0].decode()
    assert answer.split() == [str(token) for token in expected["german"]]


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"lora_name": "spanish"}, 400, "adapter 'spanish' not found"),
        ({"lora_name": "../model"}, 400, "adapter '../model' not found"),
        ({"lora_name": "broken"}, 400, "adapter 'broken': "),
        (
            {"lora_task_id": 12},
            400,
            "LoRA task 12 not found in cache. Please send LoRA weights with request",
        ),
        ({"lora_name": 5}, 400, "lora_name must be of type BYTES, got 5"),
    ],
)
def test_an_invalid_adapter_is_refused_with_a_reason(server, expected, fields, status, text):
    refused = generate(server, MODEL, **fields)
    assert (refused.status_code, refused.json()["error"].startswith(text)) == (status, True), (
        refused.text
    )
    assert generate(server, MODEL).json()["text_output"].split() == [
        str(token) for token in expected[""]
    ]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([], "adapter_config.json: cannot be read: No such file or directory"),
        (["adapter_config.json"], " no adapter_model.safetensors in it"),
        (["adapter_config.json", "adapter_model.bin"], " adapter_model.bin is a pickle"),
        (["model.lora_weights.npy"], " No data left in file"),
    ],
)
def test_error_of_an_unreadable_adapter_has_its_name_but_not_its_path(server, place, files, text):
    name = f"half-{len(files)}-{'npy' in str(files)}"
    folder = place / "adapters" / name
    folder.mkdir(exist_ok=True)
    for file in files:
        (folder / file).write_text("{}" if file.endswith(".json") else "")
    error = generate(server, MODEL, lora_name=name).json()["error"]
    assert error.startswith(f"adapter '{name}': {name}")
    assert text in error
    assert str(place) not in error


def test_metrics_count_loaded_adapters(server, place, expected):
    assert ask(server, "http", token_arrays(**tensors_of(place, "french"))) == expected["french"]
    url = f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics"

    def values() -> dict[str, float]:
        lines = [
            line.split("{")
            for line in httpx.get(url).text.splitlines()
            if line.startswith("slipstream_adapter")
        ]
        return {name: float(rest.split()[-1]) for name, rest in lines}

    wait_for(lambda: values().get("slipstream_adapter_loads_total", 0) >= 1)
    # one page per row, and none is in use
    wait_for(lambda: values()["slipstream_adapter_pages_free"] >= 64)
    found = values()
    assert 1 <= found["slipstream_adapters"] <= found["slipstream_adapter_loads_total"]
    assert found["slipstream_adapter_bytes"] > 0


def test_the_client_command_sends_adapter_weights_once(server, place, expected, tmp_path):
    convert_adapter(place / "adapters" / "french", tmp_path / "french")
    command = [
        sys.executable,
        "-m",
        "slipstream.cli.main",
        "client",
        "-u",
        f"localhost:{server.ports['GRPCInferenceService']}",
        "--text",
        " ".join(map(str, PROMPT)),
        "--request-output-len",
        "12",
        "--lora-task-id",
        "77",
    ]
    # the second call uses the weights that the server has kept
    for more in (["--lora-path", str(tmp_path / "french")], []):
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ROOT}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"Output beam 0: {' '.join(map(str, expected['french']))}\n" in done.stdout

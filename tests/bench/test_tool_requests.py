"""The requests that other projects' benchmark tools send, and their ways to read the answers.

The tools are genai-perf 0.0.16 with perf_analyzer 2.51, and SGLang's bench_serving 0.4.6.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import numpy
import pytest
import tritonclient.grpc as grpcclient
from tiny_server import MODEL, TinyServer, make_repository

ANSWER = "6 7 8 9 10"  # of the scripted engine to "5"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "chat").mkdir()
    template = json.dumps({"chat_template": "{{ messages[-1].content }}"})
    (folder / "chat" / "tokenizer_config.json").write_text(template)
    flags = ["--openai-chat-template-tokenizer", str(folder / "chat")]
    running = TinyServer(make_repository(folder), folder / "tmp", *flags).wait_started()
    yield running
    running.close()


def events(server: TinyServer, path: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Read a stream as bench_serving does: a line is an event, cut after `data: `."""
    found = []
    with httpx.stream("POST", f"{server.url}{path}", json=payload, timeout=30) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line:
                text = line.removeprefix("data: ").removeprefix("data:")
                found.append({} if text == "[DONE]" else json.loads(text))
    return found


def test_bench_serving_trt(server: TinyServer) -> None:
    """An end token beyond the vocabulary never ends the answer, nor does a minimum length."""
    payload = {
        "accumulate_tokens": True,
        "text_input": "5",
        "temperature": 0.000001,
        "top_p": 1.0,
        "max_tokens": 5,
        "stream": True,
        "min_length": 5,
        "end_id": 1048576,
    }
    found = events(server, "/v2/models/ensemble/generate_stream", payload)
    assert "".join(event["text_output"] for event in found) == ANSWER


@pytest.mark.parametrize("stream", [True, False])
def test_bench_serving_vllm_and_sglang_oai(server: TinyServer, stream: bool) -> None:
    models = httpx.get(f"{server.url}/v1/models").json()  # asked without --model
    assert MODEL in [model["id"] for model in models["data"]]
    payload = {
        "model": MODEL,
        "prompt": "5",
        "temperature": 0.0,
        "best_of": 1,
        "max_tokens": 5,
        "stream": stream,
        "ignore_eos": True,
    }
    *found, last = events(server, "/v1/completions", payload)
    if not stream:  # one line, which is the whole answer
        assert last["choices"][0]["text"] == ANSWER
        assert last["usage"]["completion_tokens"] == 5
        return
    assert last == {}  # [DONE]
    assert "".join(event["choices"][0]["text"] for event in found) == ANSWER


def test_bench_serving_sglang_server_info_is_absent(server: TinyServer) -> None:
    """The tool accepts any answer but 200 as no information."""
    assert httpx.get(f"{server.url}/get_server_info").status_code == 404


def test_genai_perf_generate(server: TinyServer) -> None:
    payload = {"text_input": ["5"], "max_tokens": 5, "stream": True}
    found = events(server, "/v2/models/ensemble/generate_stream", payload)
    assert "".join(event["text_output"] for event in found) == ANSWER


@pytest.mark.parametrize("length", ["max_tokens", "max_completion_tokens"])
def test_genai_perf_chat(server: TinyServer, length: str) -> None:
    payload = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "5"}],
        "stream": True,
        length: 5,
        "min_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    *found, last = events(server, "/v1/chat/completions", payload)
    assert last == {}
    deltas = [event["choices"][0]["delta"] for event in found if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
    assert found[-1]["usage"]["completion_tokens"] == 5


def grpc_inputs(streaming: bool) -> list[grpcclient.InferInput]:
    values = {
        "text_input": numpy.array([[b"5"]], dtype=object),
        "max_tokens": numpy.array([[5]], dtype=numpy.int32),
        "exclude_input_in_output": numpy.array([[True]]),
    }
    types = {"text_input": "BYTES", "max_tokens": "INT32", "exclude_input_in_output": "BOOL"}
    if streaming:
        values["stream"] = numpy.array([[True]])
        types["stream"] = "BOOL"
    inputs = []
    for name, value in values.items():
        tensor = grpcclient.InferInput(name, list(value.shape), types[name])
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


@pytest.mark.parametrize("streaming", [True, False])
def test_genai_perf_kserve(server: TinyServer, streaming: bool) -> None:
    """perf_analyzer reads metadata, configuration and statistics, then streams over gRPC.

    It asks for an empty final response, which ends a request.
    """
    address = f"localhost:{server.ports['GRPCInferenceService']}"
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(address) as client:
        assert client.is_server_ready()
        assert client.get_model_metadata("ensemble").name == "ensemble"
        config = client.get_model_config("ensemble").config
        assert config.max_batch_size > 0
        before = client.get_inference_statistics("ensemble").model_stats[0].inference_count
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "ensemble", grpc_inputs(streaming), request_id="1", enable_empty_final_response=True
        )
        text = ""
        final = False
        while not final:
            result, error = answers.get(timeout=30)
            assert error is None
            response = result.get_response()
            assert response.id == "1"
            final = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                text += result.as_numpy("text_output").item().decode()
        client.stop_stream()
        after = client.get_inference_statistics("ensemble").model_stats[0].inference_count
    assert (text, after - before) == (ANSWER, 1)

"""Requests past their deadline: a running one ends with its tokens, a waiting one is refused."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc.aio as triton
from grpc_stack import ask, request, tensor, text_inputs, token_inputs
from http_support import Answer, RunningServer, post
from optional_tensors import write_declared
from test_pipeline_text import ScriptedEngine
from tiny_text import BEGIN, write_engine_folder

from slipstream.repository.models import read_repository
from slipstream.server.engine_link.mailbox import RequestOutput
from slipstream.server.grpc.options import GrpcOptions, add_port
from slipstream.server.grpc.service import create_grpc_server
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.models.build import build_registry
from slipstream.server.services import create_app
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer

RAN = [
    RequestOutput(tokens=[32, 33]),
    RequestOutput(tokens=[34]),
    RequestOutput(finish_reason="timeout"),
]
NEVER_RAN = [RequestOutput(finish_reason="timeout")]


class Stack:
    def __init__(self, folder: Path, decoupled: str) -> None:
        engine_folder = write_engine_folder(folder / "engine")
        self.engine = ScriptedEngine(ready=True)
        self.engine.outstanding = 0  # type: ignore[attr-defined]
        tokenizer = Tokenizer.load(engine_folder)
        self.text = tokenizer.decode([32, 33, 34])
        repo = write_declared(folder / "repo", engine_folder, decoupled_mode=decoupled)
        generator: Any = TextGenerator(tokenizer, self.engine)
        self.registry: ModelRegistry = build_registry(
            read_repository(repo), {"tensorrt_llm": generator}
        )
        self.state = ServerState([self.engine])


@pytest.fixture(params=["true", "false"], ids=["decoupled", "coupled"])
def stack(request, tmp_path) -> Stack:
    return Stack(tmp_path, request.param)


def generate(stack: Stack, model: str, endpoint: str) -> Answer:
    fields = {
        "text_input": "x",
        "max_tokens": 50,
        "timeout": 70_000_000,
        "return_finish_reason": True,
        "stream": endpoint == "generate_stream",
    }
    with RunningServer(create_app(stack.registry, stack.state)) as server:
        return post(server.port, f"/v2/models/{model}/{endpoint}", json.dumps(fields).encode())


@pytest.mark.parametrize("name", ["timeout", "priority"])
@pytest.mark.parametrize("value", [-5, 0.5, "soon", True])
def test_invalid_timeout_or_priority_is_refused(stack, name, value):
    body = json.dumps({"text_input": "x", "max_tokens": 5, name: value}).encode()
    with RunningServer(create_app(stack.registry, stack.state)) as server:
        answer = post(server.port, "/v2/models/chat/generate", body)
    assert answer.status == 400
    assert (
        json.loads(answer.body)["error"] == f"{name} must be an integer of 0 or more, got {value!r}"
    )
    assert not hasattr(stack.engine, "prompt")


@pytest.mark.parametrize("model", ["ensemble", "chat"])
def test_http_request_past_its_deadline_returns_its_text_so_far(stack, model):
    stack.engine.deltas = RAN
    answer = generate(stack, model, "generate")
    document = json.loads(answer.body)
    assert (answer.status, document["text_output"], document["finish_reason"]) == (
        200,
        stack.text,
        "timeout",
    )
    _, deadline, _ = stack.engine.rest
    # the client's timeout, in microseconds, bounds the whole request
    assert 0 < deadline - time.monotonic() <= 70
    streamed = generate(stack, model, "generate_stream")
    events = [json.loads(chunk.removeprefix(b"data: ")) for chunk in streamed.chunks]
    assert "".join(event["text_output"] for event in events) == stack.text
    assert events[-1]["finish_reason"] == "timeout"


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_http_request_that_never_ran_gets_503(stack, endpoint):
    stack.engine.deltas = NEVER_RAN
    for model in ("ensemble", "chat"):
        answer = generate(stack, model, endpoint)
        assert (answer.status, json.loads(answer.body)) == (
            503,
            {"error": "Request timeout expired"},
        )


@asynccontextmanager
async def grpc(stack: Stack) -> AsyncIterator[triton.InferenceServerClient]:
    server = create_grpc_server(stack.registry, stack.state, None, GrpcOptions())
    client = triton.InferenceServerClient(
        f"127.0.0.1:{add_port(server, '127.0.0.1:0', GrpcOptions())}"
    )
    await server.start()
    try:
        yield client
    finally:
        await client.close()
        await server.stop(None)


def calls(streaming: bool) -> list[tuple[str, list[Any]]]:
    flag = tensor("return_finish_reason", [True], "BOOL")
    return [
        ("ensemble", [*text_inputs("x", 50, streaming), flag]),
        ("chat", [*text_inputs("x", 50, streaming), flag]),
        ("tensorrt_llm", [*token_inputs([BEGIN, 5], 50, streaming), flag]),
    ]


async def test_grpc_stream_past_its_deadline_returns_its_text_so_far(stack):
    stack.engine.deltas = RAN
    async with grpc(stack) as client:
        for model, inputs in calls(streaming=True):
            answers = [
                result
                for result, error in await ask(client, request(model, inputs))
                if error is None
            ]
            answers = [result for result in answers if result.get_response().outputs]
            assert answers[-1].as_numpy("finish_reason").tolist() == [[b"timeout"]]
            if model == "tensorrt_llm":
                assert [int(i) for r in answers for i in r.as_numpy("output_ids").flatten()] == [
                    32,
                    33,
                    34,
                ]
            else:
                assert (
                    b"".join(r.as_numpy("text_output")[0] for r in answers).decode() == stack.text
                )


async def test_grpc_call_past_its_deadline_returns_its_text_or_unavailable(stack):
    async with grpc(stack) as client:
        for model, inputs in calls(streaming=False):
            if stack.registry.find(model).model.decoupled:
                continue  # decoupled models accept streams only
            stack.engine.deltas = RAN
            result = await client.infer(model, inputs, timeout=60_000_000)
            assert result.as_numpy("finish_reason").tolist() == [[b"timeout"]]
            stack.engine.deltas = NEVER_RAN
            with pytest.raises(
                triton.InferenceServerException, match="Request timeout expired"
            ) as refusal:
                await client.infer(model, inputs, timeout=60_000_000)
            assert refusal.value.status() == "StatusCode.UNAVAILABLE"

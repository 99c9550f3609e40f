"""Access, counters, queues and shutdown are the same as on Triton's protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_support import Connection, RunningServer, get, post, request_bytes, wait_until
from openai_server import MAX_WAITING, SETTINGS, sdk

from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.kserve.access import Access, Restriction
from slipstream.server.metrics.statistics_api import model_statistics
from slipstream.server.models.text_model import TextModel
from slipstream.server.services import create_app, create_context

CALL = {"model": "ensemble", "prompt": "Say: ", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def guarded(serving) -> Iterator[int]:
    access = Access(api_key="user-key", http_restrictions={"metadata": Restriction("pass", "word")})
    with RunningServer(
        create_app(serving.registry, serving.state, create_context(access=access))
    ) as server:
        yield server.port


def test_the_servers_api_key_is_the_sdks_key(guarded):
    assert sdk(guarded, "user-key").completions.create(**CALL).usage.completion_tokens == 4
    for client in (sdk(guarded, "wrong"), sdk(guarded, "user-keyy")):
        with pytest.raises(openai.AuthenticationError) as raised:
            client.completions.create(**CALL)
        assert raised.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(
                model="ensemble", messages=[{"role": "user", "content": "a"}]
            )
    # Triton's restriction of an API applies to OpenAI's routes, too
    with pytest.raises(openai.PermissionDeniedError):
        sdk(guarded, "user-key").models.list()
    for path in ("/v1/models", "/v1/models/ensemble", "/v1/nothing"):
        assert get(guarded, path).status == 403
    assert (
        sdk(guarded, "user-key").with_options(default_headers={"pass": "word"}).models.list().data
    )


def test_a_disconnected_clients_request_is_cancelled(serving):
    body = json.dumps(
        {
            **CALL,
            "prompt": ["Say: ", "Well, "],
            "n": 2,
            "max_tokens": 400,
            "stream": True,
            "logit_bias": {str(serving.generator.tokenizer.eos_id): -1000},
        }
    ).encode()
    before = serving.engine.stats.cancelled
    failed = statistics(serving, "ensemble")["fail"]["count"]
    with Connection(serving.port) as connection:
        connection.send(request_bytes("POST", "/v1/completions", [], body))
        assert connection.head().status == 200
        assert connection.chunk().startswith(b"data: {")
    wait_until(lambda: serving.engine.outstanding == 0)
    wait_until(lambda: serving.engine.stats.cancelled >= before + 1)
    # one request per prompt
    assert statistics(serving, "ensemble")["fail"]["count"] == failed + 2
    assert serving.client.completions.create(**CALL).usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"n": 2, "max_tokens": 400}),
        ("/v1/responses", {"input": "Say", "max_output_tokens": 400}),
        ("/v1/messages", {"max_tokens": 400}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_no_route_goes_on_without_its_client(serving, path, fields, stream):
    question = [{"role": "user", "content": "Say"}]
    body = {"model": "chat", "stream": stream, "ignore_eos": True, "temperature": 0, **fields}
    if "input" not in fields:
        body["messages"] = question
    before = serving.engine.stats.cancelled
    with Connection(serving.port) as connection:
        connection.send(request_bytes("POST", path, [], json.dumps(body).encode()))
        if stream:
            assert connection.head().status == 200
            assert connection.chunk()
        else:
            wait_until(lambda: serving.engine.outstanding > 0)
    wait_until(lambda: serving.engine.outstanding == 0)
    wait_until(lambda: serving.engine.stats.cancelled > before)


def test_a_model_that_is_not_decoupled_streams_on_openai_routes(serving, monkeypatch):
    monkeypatch.setattr(TextModel, "decoupled", False)
    whole = serving.client.completions.create(**{**CALL, "max_tokens": 60}).choices[0].text
    chunks = list(serving.client.completions.create(**{**CALL, "max_tokens": 60}, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    before = statistics(serving, "ensemble")
    stream = serving.client.completions.create(**{**CALL, "max_tokens": 400}, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(
        lambda: statistics(serving, "ensemble")["fail"]["count"] == before["fail"]["count"] + 1
    )
    assert statistics(serving, "ensemble")["success"]["count"] == before["success"]["count"]


def statistics(serving, name: str) -> dict[str, Any]:
    return model_statistics(serving.registry, name)[0]["inference_stats"]


def test_requests_are_counted_in_the_models_statistics(serving):
    before, engine = statistics(serving, "ensemble"), statistics(serving, "tensorrt_llm")
    serving.client.completions.create(**CALL)
    list(serving.client.completions.create(**CALL, stream=True))
    with pytest.raises(openai.BadRequestError):
        serving.client.completions.create(**{**CALL, "max_tokens": 0})
    after = statistics(serving, "ensemble")
    assert after["success"]["count"] == before["success"]["count"] + 2
    assert after["fail"]["count"] == before["fail"]["count"]
    assert after["compute_infer"]["ns"] > before["compute_infer"]["ns"]
    assert statistics(serving, "tensorrt_llm")["success"]["count"] == engine["success"]["count"] + 2


def test_tokens_are_counted_in_the_models_metrics(serving):
    tokens = serving.registry.find("ensemble").model.counters.tokens
    before = [
        (counter.count, counter.sum) for counter in (tokens.input_tokens, tokens.output_tokens)
    ]
    usage = serving.client.completions.create(**CALL).usage
    after = [
        (counter.count, counter.sum) for counter in (tokens.input_tokens, tokens.output_tokens)
    ]
    assert after == [
        (count + 1, total + more)
        for (count, total), more in zip(
            before, (usage.prompt_tokens, usage.completion_tokens), strict=True
        )
    ]


async def test_a_disconnect_between_two_pieces_cancels_the_request():
    from slipstream.server.kserve.inference import InferRequest, InferResponse
    from slipstream.server.metrics.statistics import ModelCounters

    async def answers():
        for final in (False, True):
            yield InferResponse(text_output=TextOutput([1], text="a"), final=final)

    for pieces, failures in ((1, 1), (2, 0)):
        counters = ModelCounters()
        read = counters.record(InferRequest("m", "1", {}), answers())
        for _ in range(pieces):
            await anext(read)
        await read.aclose()
        assert (counters.failures["CANCELED"], counters.success.count) == (failures, 1 - failures)


def test_a_full_queue_is_429_and_a_draining_server_is_503(serving, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(InProcessEngine, "outstanding", SETTINGS.max_rows + MAX_WAITING)
        with pytest.raises(openai.RateLimitError) as raised:
            serving.client.completions.create(**CALL)
        assert raised.value.code == "rate_limit_exceeded"
        assert raised.value.response.headers["retry-after"] == "1"
        assert "Exceeds maximum queue size" in raised.value.message
        # one more request fits
        patch.setattr(InProcessEngine, "outstanding", SETTINGS.max_rows + MAX_WAITING - 1)
        assert serving.client.completions.create(**CALL).usage.completion_tokens == 4
        with pytest.raises(openai.RateLimitError):
            serving.client.completions.create(**CALL, n=2)
    monkeypatch.setattr(serving.state, "draining", True)
    for fields in ({}, {"stream": True}):
        with pytest.raises(openai.InternalServerError) as failed:
            serving.client.completions.create(**CALL, **fields)
        assert failed.value.status_code == 503
        assert failed.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("lost_after", [0, 1])
def test_a_lost_engine_is_an_error_before_or_within_the_stream(serving, monkeypatch, lost_after):
    from slipstream.server.engine_link.engine import EngineUnavailable

    generate = serving.generator.generate

    async def failing(request):
        count = 0
        async for delta in generate(request):
            if count == lost_after:
                raise EngineUnavailable("the engine is not running: by order")
            count += 1
            yield delta

    monkeypatch.setattr(serving.generator, "generate", failing)
    if not lost_after:
        with pytest.raises(openai.InternalServerError, match="by order") as raised:
            serving.client.completions.create(**CALL, stream=True)
        assert raised.value.status_code == 503
        return
    call = {**CALL, "max_tokens": 300, "stream": True}
    answer = post(serving.port, "/v1/completions", json.dumps(call).encode())
    assert answer.status == 200
    events = [event.removeprefix(b"data: ") for event in answer.body.split(b"\n\n") if event]
    assert json.loads(events[-1])["error"]["message"] == "the engine is not running: by order"
    assert b"[DONE]" not in answer.body
    with pytest.raises(openai.APIError, match="by order"):
        list(serving.client.completions.create(**call))


def test_a_traced_call_appears_as_a_request_of_its_model(serving, tmp_path):
    from slipstream.server.tracing.settings import TraceSettings

    file = tmp_path / "trace.json"
    settings = TraceSettings(
        {"trace_file": str(file), "trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
    )
    app = create_app(serving.registry, serving.state, create_context(trace=settings))
    with RunningServer(app) as server:
        answer = sdk(server.port, "x").completions.create(**{**CALL, "prompt": ["a", "b"]})
        wait_until(lambda: file.is_file() and "HTTP_SEND_END" in file.read_text())
    settings.close()
    activities = json.loads(file.read_text())
    named = [activity for activity in activities if "model_name" in activity]
    steps = ["preprocessing", "tensorrt_llm", "postprocessing"]
    assert [found["model_name"] for found in named] == ["ensemble", *steps]
    assert [found.get("parent_id") for found in named] == [None, *[named[0]["id"]] * 3]
    assert {found["request_id"] for found in named} == {answer.id}
    stamps = [stamp["name"] for activity in activities for stamp in activity.get("timestamps", [])]
    assert {
        "HTTP_RECV_START",
        "HTTP_RECV_END",
        "REQUEST_START",
        "COMPUTE_END",
        "HTTP_SEND_END",
    } <= set(stamps)


async def test_concurrent_requests_get_their_own_answers(serving):
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="x", max_retries=0
    )
    # the tiny model's answer depends on it
    prompts = [f"It ends with {letter}" for letter in "abcdefghijkl"]

    async def streamed(prompt: str) -> str:
        stream = await client.completions.create(
            **{**CALL, "prompt": prompt, "max_tokens": 20}, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    whole = [
        choice.text
        for choice in serving.client.completions.create(
            **{**CALL, "prompt": prompts, "max_tokens": 20}
        ).choices
    ]
    assert await asyncio.gather(*map(streamed, prompts)) == whole
    assert len(set(whole)) == 12
    await client.close()


def test_the_documentation_has_the_routes_with_examples_that_run(serving):
    paths = json.loads(get(serving.port, "/openapi.json").body)["paths"]
    assert {path for path in paths if path.startswith("/v1/")} == {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/{id}",
        "/v1/responses/{id}/cancel",
        "/v1/responses/{id}/input_items",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
    assert [
        set(paths[path]["get"]["responses"]) for path in ("/v1/models", "/v1/models/{model}")
    ] == [{"200"}, {"200", "404"}]
    response = paths["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]
    assert "$ref" not in json.dumps(response)
    answer = post(serving.port, "/v1/responses", json.dumps(response["example"]).encode())
    assert json.loads(answer.body)["usage"]["output_tokens"] == 32
    for path, own in {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}.items():
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        properties = content["schema"]["properties"]
        assert {own, "model", "temperature", "logprobs", "stream_options"} <= set(properties)
        assert "$ref" not in json.dumps(content)
        answer = post(serving.port, path, json.dumps(content["example"]).encode())
        assert (
            json.loads(answer.body)["usage"]["completion_tokens"]
            == content["example"]["max_tokens"]
        )


def test_continuing_a_stopped_answer_reuses_its_cached_blocks(serving):
    prompt, end = "Tell me more. " * 5, str(serving.generator.tokenizer.eos_id)
    before, said = serving.engine.stats.cancelled, ""
    stream = serving.client.completions.create(
        model="chat",
        prompt=prompt,
        max_tokens=400,
        temperature=0,
        stream=True,
        logit_bias={end: -1000},
    )
    for chunk in stream:
        said += chunk.choices[0].text
        if len(said) > 100:
            break
    stream.close()
    wait_until(lambda: serving.engine.stats.cancelled == before + 1)
    answer = serving.client.completions.create(
        model="chat", prompt=f"{prompt}{said} No, wait", max_tokens=1
    )
    known = len(serving.generator.tokenizer.encode(prompt + said))
    block = serving.engine.info.block_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= known - 2 * block > len(prompt)


def test_spans_separate_queue_time_from_compute_time(serving):
    def spent(model: str) -> dict[str, int]:
        return {name: phase["ns"] for name, phase in statistics(serving, model).items()}

    before = {model: spent(model) for model in ("chat", "tensorrt_llm")}
    end = str(serving.generator.tokenizer.eos_id)
    serving.client.completions.create(
        model="chat", prompt=["Say: "] * 3, max_tokens=30, logit_bias={end: -1000}
    )
    idle = {model: spent(model) for model in before}
    serving.client.completions.create(
        model="chat", prompt=["Say: "] * 12, max_tokens=30, logit_bias={end: -1000}
    )
    for model, first in before.items():
        calm, busy = (
            {name: later[name] - earlier[name] for name in later}
            for earlier, later in ((first, idle[model]), (idle[model], spent(model)))
        )
        for phases in (calm, busy):
            parts = ("queue", "compute_input", "compute_infer", "compute_output")
            assert sum(phases[part] for part in parts) == phases["success"] > 0
            assert min(phases[part] for part in parts) >= 0
        # Four of the twelve requests run at once. The other eight wait, in total about as long as
        # all of them compute.
        assert busy["queue"] > busy["compute_infer"] / 8
        assert busy["queue"] > calm["queue"]

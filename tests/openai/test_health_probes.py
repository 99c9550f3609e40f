"""/health and /health_generate: whether the server is ready and every engine generates a token."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from http_support import Connection, request_bytes, wait_until

from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.http import health_probes


def probe(serving, path: str, method: str = "GET") -> tuple[int, Any]:
    with Connection(serving.port) as connection:
        connection.send(request_bytes(method, path, [], None))
        answer = connection.answer()
    return answer.status, json.loads(answer.body)


@pytest.fixture
def generate(serving, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces what the engine does with a request."""

    def replace(before: Any) -> None:
        async def generate(request):
            await before()
            yield

        monkeypatch.setattr(serving.generator, "generate", generate)

    return replace


def test_deep_health_generates_one_token_per_engine(serving):
    made = serving.engine.stats.output_tokens
    assert probe(serving, "/health") == (200, {})
    assert serving.engine.stats.output_tokens == made
    assert probe(serving, "/health_generate") == (200, {})
    # one token, although two models share the engine
    wait_until(lambda: serving.engine.stats.output_tokens == made + 1)
    assert probe(serving, "/health", "POST")[0] == 405
    assert probe(serving, "/health_generate", "POST")[0] == 405


@pytest.mark.parametrize("path", [health_probes.HEALTH, health_probes.HEALTH_GENERATE])
def test_deep_health_of_a_draining_server_gives_the_reason(serving, path):
    serving.state.draining = True
    try:
        assert probe(serving, path) == (503, {"error": "the server is not ready"})
    finally:
        serving.state.draining = False


def test_deep_health_reports_an_engine_that_fails_requests(serving, generate):
    async def fail() -> None:
        raise EngineUnavailable("it is being restarted")

    generate(fail)
    assert probe(serving, "/health") == (200, {})
    assert probe(serving, "/health_generate") == (
        503,
        {"error": "tensorrt_llm: it is being restarted"},
    )


def test_deep_health_reports_an_engine_that_hangs(serving, generate, monkeypatch):
    monkeypatch.setattr(health_probes, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(health_probes, "_REPLY_SECONDS", 0.1)
    generate(asyncio.Event().wait)
    assert probe(serving, "/health_generate") == (
        503,
        {"error": "tensorrt_llm gave no token in 0.1 s"},
    )


def test_an_engine_with_all_rows_busy_is_healthy(serving, monkeypatch):
    monkeypatch.setattr(health_probes, "ANSWER_SECONDS", 0.001)
    never = {str(serving.generator.tokenizer.eos_id): -1000}
    stop = threading.Event()

    def occupy() -> None:
        stream = serving.client.completions.create(
            model="chat", prompt="a", max_tokens=100_000, stream=True, n=4, logit_bias=never
        )
        for _ in stream:
            if stop.is_set():
                stream.close()
                return

    thread = threading.Thread(target=occupy)
    thread.start()
    try:
        wait_until(lambda: serving.engine.stats.running == 4)
        assert probe(serving, "/health_generate") == (200, {})
        monkeypatch.setattr(serving.engine, "info", replace(serving.engine.info, max_rows=4))
        # a probe sends no request once all rows are busy
        monkeypatch.setattr(serving.generator, "generate", None)
        assert probe(serving, "/health_generate") == (200, {})
    finally:
        stop.set()
        thread.join(20)

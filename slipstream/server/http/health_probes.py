"""The health probes `/health`, `/health/ready`, `/ping` and `/health_generate`: 200, or 503.

Servers with OpenAI's API have these routes beside Triton's. `/ping` is the probe of SageMaker,
`/health/ready` that of Triton's OpenAI frontend.

`/health_generate` asks each engine that serves a text model for one token. An engine whose rows are
all in use is not asked: it is working, and its watchdog reports it if it stops.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.engine import TextRequest
from slipstream.server.http.exchange import Exchange
from slipstream.server.http.pages import describe_get
from slipstream.server.http.routes import GET, GET_POST, Parameters, Route, RouteGroup
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.triton_json import write_error
from slipstream.server.models.generating import TIMED_OUT, ServedEngine, run_to_end
from slipstream.server.models.text_model import find_text_models

HEALTH = "/health"
HEALTH_READY = "/health/ready"
PING = "/ping"
HEALTH_GENERATE = "/health_generate"
ANSWER_SECONDS = 10.0
_REPLY_SECONDS = 2.0  # added for an engine to report that it had no time
_HIGHEST_PRIORITY = 2**31 - 1


class HealthProbes:
    def __init__(self, registry: ModelRegistry, state: ServerState) -> None:
        self._registry = registry
        self._state = state

    def group(self) -> RouteGroup:
        """Return these routes for the table of the HTTP port."""
        routes = [
            Route(GET, HEALTH, "health", self._answer_health),
            Route(GET, HEALTH_READY, "health", self._answer_health),
            Route(GET_POST, PING, "health", self._answer_health),
            # it makes the engines work, so it needs a key where inference does
            Route(GET, HEALTH_GENERATE, "inference", self._answer_health_generate),
        ]
        return RouteGroup(routes, describe_routes)

    async def _answer_health(self, exchange: Exchange, parameters: Parameters) -> None:
        await _respond(exchange, self._find_problem())

    async def _answer_health_generate(self, exchange: Exchange, parameters: Parameters) -> None:
        problem = self._find_problem()
        if not problem:
            with exchange.cancel_on_disconnect():
                problem = await find_engine_problems(self._registry)
        await _respond(exchange, problem)

    def _find_problem(self) -> str:
        return "" if self._state.ready else "the server is not ready"


async def _respond(exchange: Exchange, problem: str) -> None:
    if problem:
        await exchange.respond(503, write_error(problem))
    else:
        await exchange.respond(200, b"{}")


def describe_routes() -> dict[str, Any]:
    return {
        HEALTH: describe_get("Whether the server takes work", "Empty; 503 when it does not"),
        HEALTH_READY: describe_get("Whether the server takes work", "Empty; 503 when it does not"),
        PING: describe_get("Whether the server takes work", "Empty; 503 when it does not"),
        HEALTH_GENERATE: describe_get("Whether every engine makes a token", "Empty; 503 when not"),
    }


async def find_engine_problems(registry: ModelRegistry) -> str:
    """Ask every engine for a token. Return what went wrong, or nothing."""
    engines = {
        id(text.engine.generator.client): text.engine for _, text in find_text_models(registry)
    }
    problems = await asyncio.gather(*map(_find_engine_problem, engines.values()))
    return "; ".join(filter(None, problems))


async def _find_engine_problem(engine: ServedEngine) -> str:
    client = engine.generator.client
    if client.info is not None and client.outstanding >= client.info.max_rows:
        return ""
    tokenizer = engine.generator.tokenizer
    prompt = [tokenizer.bos_id if tokenizer.bos_id is not None else 0]
    request = TextRequest(
        prompt,
        SamplingParams(max_tokens=1),
        ignore_end=True,
        priority=_HIGHEST_PRIORITY,
        deadline=time.monotonic() + ANSWER_SECONDS,
    )
    try:
        async with asyncio.timeout(ANSWER_SECONDS + _REPLY_SECONDS):
            await run_to_end(engine.generator, request)
    except TimeoutError:
        return f"{engine.model.name} gave no token in {ANSWER_SECONDS:g} s"
    except InferenceError as error:
        # An engine whose rows were all taken meanwhile times the request out: it is working.
        return "" if error.message == TIMED_OUT else f"{engine.model.name}: {error.message}"
    return ""

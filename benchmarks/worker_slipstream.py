"""Slipstream as in its server: the engine runs in its own process behind the engine link."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvloop
from worker_protocol import Generate, Timed, serve

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.client import EngineClient
from slipstream.server.engine_link.engine import UNASSIGNED
from slipstream.server.engine_link.mailbox import InFlightRequest


def start(options: dict[str, Any]) -> Generate:
    # without draft tokens, which the peers do not have either
    code = options.get("code", "auto")
    settings = EngineSettings(reuse=False, cpu_code=code, adaptive_lookup=False)
    engine = EngineClient(options["model"], settings)
    engine.spawn()
    event_loop = uvloop.new_event_loop()
    event_loop.run_until_complete(engine.start())

    def generate(prompts: list[list[int]], max_tokens: int, sampled: bool = False) -> Timed:
        drawn = {"temperature": 0.7, "top_p": 0.9} if sampled else {}
        parameters = SamplingParams(max_tokens=max_tokens, **drawn)
        return event_loop.run_until_complete(_generate(engine, prompts, parameters))

    return generate


async def _generate(
    engine: EngineClient, prompts: list[list[int]], parameters: SamplingParams
) -> Timed:
    began = time.perf_counter()
    firsts: list[float] = []

    async def read(generation: InFlightRequest) -> list[int]:
        tokens: list[int] = []
        async for delta in generation:
            if delta.error:
                raise RuntimeError(delta.error)
            if not tokens:
                firsts.append(time.perf_counter() - began)
            tokens += delta.tokens
        return tokens

    # No end ids: every request runs to its full length.
    running = [
        read(engine.submit(GenerateRequest(UNASSIGNED, prompt, parameters))) for prompt in prompts
    ]
    tokens = await asyncio.gather(*running)
    return Timed(min(firsts), time.perf_counter() - began, list(tokens))


if __name__ == "__main__":
    serve(start)

"""Clients of a server with the scripted engine, which counts upwards from the prompt."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from tiny_server import MODEL, TinyServer


@dataclass
class Outcome:
    """What one client got."""

    status: int = 0  # 0: no response
    text: str = ""
    error: str = ""
    retry_after: str = ""
    cut: bool = False  # the connection ended within the response
    events: int = 0
    begun: float = 0.0  # time of the first event, by time.monotonic()
    ended: float = 0.0

    @property
    def refused(self) -> bool:
        return self.status == 503 and bool(self.retry_after)


def new_client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(limits=limits, timeout=120, trust_env=False)


async def stream(
    client: httpx.AsyncClient,
    server: TinyServer,
    first: int,
    tokens: int,
    step_ms: int,
    outcome: Outcome | None = None,
) -> Outcome:
    """Stream one answer. The steps of the engine take at least `step_ms`."""
    outcome = outcome or Outcome()
    body = {"text_input": str(first), "max_tokens": tokens, "stream": True, "seed": step_ms}
    url = f"{server.url}/v2/models/{MODEL}/generate_stream"
    try:
        async with client.stream("POST", url, json=body) as response:
            outcome.status = response.status_code
            outcome.retry_after = response.headers.get("retry-after", "")
            async for line in response.aiter_lines():
                if line:
                    _take(outcome, json.loads(line.removeprefix("data:")))
    except httpx.HTTPError:
        outcome.cut = True
    outcome.ended = time.monotonic()
    return outcome


def _take(outcome: Outcome, event: dict[str, str]) -> None:
    outcome.begun = outcome.begun or time.monotonic()
    outcome.events += 1
    outcome.text += event.get("text_output", "")
    outcome.error = event.get("error", outcome.error)


def expected(first: int, tokens: int) -> str:
    return " ".join(str(number) for number in range(first + 1, first + tokens + 1))


async def until(condition: Callable[[], object], seconds: float = 60.0) -> float:
    """Wait for a condition; return how long it took."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise TimeoutError("the condition was not met in time")
        await asyncio.sleep(0.01)
    return time.monotonic() - begun


async def status(client: httpx.AsyncClient, server: TinyServer, path: str) -> int:
    """Return the status of a GET; 0: no connection."""
    try:
        return (await client.get(f"{server.url}{path}")).status_code
    except httpx.HTTPError:
        return 0


async def until_status(
    client: httpx.AsyncClient, server: TinyServer, path: str, wanted: int, seconds: float = 30.0
) -> float:
    """Wait for a status; return how long it took."""
    begun = time.monotonic()
    while await status(client, server, path) != wanted:
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"{path} did not become {wanted} in {seconds:g} s")
        await asyncio.sleep(0.02)
    return time.monotonic() - begun

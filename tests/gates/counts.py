"""What clients count equals what metrics, statistics and traces count."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path

import httpx
from tiny_server import MODEL, TinyServer, make_repository

from gates.table import Row
from gates.traffic import Outcome, new_client, stream, until

_CLIENTS = 16
_TOKENS = "slipstream_output_tokens_total"
_TRACE = ("--trace-config", "level=TIMESTAMPS", "--trace-config", "rate=1")
_KINDS = ("whole", "streamed", "wrong", "left")


async def run(folder: Path, long: bool) -> list[Row]:
    count = 10_000 if long else 400
    traces = folder / "traces.json"
    server = TinyServer(
        make_repository(folder),
        folder / "tmp",
        *("--trace-config", f"triton,file={traces}", *_TRACE),
    )
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            chance = random.Random(1)
            kinds = [chance.choice(_KINDS) for _ in range(count)]
            counted: Counter[str] = Counter()
            waiting = list(enumerate(kinds))

            async def work() -> None:
                while waiting:
                    number, kind = waiting.pop()
                    await _send(client, server, kind, number % 800, counted)

            await asyncio.gather(*(work() for _ in range(_CLIENTS)))
            metrics = await _settled_metrics(client, server, count)
            statistics = await _statistics(client, server)
    finally:
        server.process.terminate()
        await asyncio.to_thread(server.wait_exit)
    return _compare(counted, metrics, statistics, len(_read_traces(traces)))


async def _send(
    client: httpx.AsyncClient, server: TinyServer, kind: str, first: int, counted: Counter[str]
) -> None:
    counted[kind] += 1
    url = f"{server.url}/v2/models/{MODEL}/generate"
    if kind == "wrong":
        body = {"text_input": str(first), "max_tokens": -1}
        counted["wrong answers"] += (await client.post(url, json=body)).status_code != 400
    elif kind == "whole":
        body = {"text_input": str(first), "max_tokens": 3}
        answer = await client.post(url, json=body)
        counted["tokens"] += len(answer.json()["text_output"].split())
    elif kind == "streamed":
        outcome = await stream(client, server, first, 5, 1)
        counted["tokens"] += len(outcome.text.split())
    else:
        await _leave(client, server, first)


async def _leave(client: httpx.AsyncClient, server: TinyServer, first: int) -> None:
    """Leave a long stream after its first event."""
    outcome = Outcome()
    running = asyncio.ensure_future(stream(client, server, first, 3000, 5, outcome))
    await until(lambda: outcome.events)
    running.cancel()
    await asyncio.wait([running])


async def _metrics(client: httpx.AsyncClient, server: TinyServer) -> dict[str, float]:
    place = f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics"
    text = (await client.get(place)).text
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^(\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        of_engine = name == _TOKENS and 'model="tensorrt_llm"' in labels
        if f'model="{MODEL}"' in labels or of_engine:
            reason = re.search(r'reason="(\w+)"', labels)
            found[f"{name} {reason[1]}" if reason else name] = float(value)
    return found


async def _settled_metrics(
    client: httpx.AsyncClient, server: TinyServer, count: int
) -> dict[str, float]:
    """Return the metrics once all requests are counted, or after ten seconds."""
    found: dict[str, float] = {}
    for _ in range(100):
        found = await _metrics(client, server)
        failures = sum(
            value for name, value in found.items() if name.startswith("nv_inference_request_fail")
        )
        if found["nv_inference_request_success"] + failures >= count:
            break
        await asyncio.sleep(0.1)
    return found


async def _statistics(client: httpx.AsyncClient, server: TinyServer) -> dict[str, int]:
    url = f"{server.url}/v2/models/{MODEL}/stats"
    (entry,) = (await client.get(url)).json()["model_stats"]
    return {name: entry["inference_stats"][name]["count"] for name in ("success", "fail")}


def _read_traces(file: Path) -> set[int]:
    found = json.loads(file.read_text())
    return {entry["id"] for entry in found if entry.get("model_name") == MODEL}


def _compare(
    counted: Counter[str], metrics: dict[str, float], statistics: dict[str, int], traces: int
) -> list[Row]:
    answered = counted["whole"] + counted["streamed"]
    rows = [
        _row("answered, by metrics", answered, metrics["nv_inference_request_success"]),
        _row("answered, by statistics", answered, statistics["success"]),
        _row(
            "refused, by metrics",
            counted["wrong"],
            metrics.get("nv_inference_request_failure BACKEND", 0),
        ),
        _row(
            "left, by metrics",
            counted["left"],
            metrics.get("nv_inference_request_failure CANCELED", 0),
        ),
        _row(
            "refused or left, by statistics",
            counted["wrong"] + counted["left"],
            statistics["fail"],
        ),
        _row("requests, by traces", sum(counted[kind] for kind in _KINDS), traces),
    ]
    sent = metrics.get(_TOKENS, 0.0)
    found = f"clients read {counted['tokens']}, the server counts {sent:.0f} with those who left"
    holds = counted["wrong answers"] == 0
    return [*rows, Row("tokens", found, holds and sent >= counted["tokens"] + counted["left"])]


def _row(case: str, clients: int, server: float) -> Row:
    return Row(case, f"clients {clients}, server {server:.0f}", clients == server)

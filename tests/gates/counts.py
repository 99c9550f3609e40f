"""What clients count equals what metrics, statistics and traces count, tokens included."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import httpx
from tiny_server import MODEL, TinyServer, make_repository

from gates.counted_clients import KINDS, CountedClients
from gates.table import Row
from gates.traffic import new_client

_CLIENTS = 16
_ENGINE = "tensorrt_llm"
_TRACE = ("--trace-config", "level=TIMESTAMPS", "--trace-config", "rate=1")
_DISCONNECTING = {"whole": 1, "streamed": 1, "left": 2}
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    """The tokens of clients that leave are not known to them: they have a run of their own."""
    count = 10_000 if long else 400
    counted, found = await _measure(folder / "stay", dict.fromkeys(KINDS, 1), count)
    rows += _compare(counted, found)
    counted, found = await _measure(folder / "leave", _DISCONNECTING, count // 4)
    rows += _compare_disconnecting(counted, found)


class _Found:
    """What the server counts."""

    def __init__(self, metrics: str, statistics: Mapping[str, Mapping[str, int]]) -> None:
        self.statistics = statistics
        self.traces = 0
        self._metrics = metrics

    def metric(self, name: str, model: str, **labels: str) -> float:
        """Return the sum of a metric over the labels that are not given."""
        wanted = {"model": model, **labels}
        total = 0.0
        for text, value in re.findall(
            rf"^{name}\{{([^}}]*)\}} (\S+)$", self._metrics, re.MULTILINE
        ):
            given = dict(re.findall(r'(\w+)="([^"]*)"', text))
            if wanted.items() <= given.items():
                total += float(value)
        return total


async def _measure(
    folder: Path, kinds: Mapping[str, int], count: int
) -> tuple[Counter[str], _Found]:
    """Send requests of kinds with these weights. Return what the clients and the server count."""
    folder.mkdir()
    traces = folder / "traces.json"
    repository = make_repository(folder)
    settings = folder / "engines" / "fine" / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": _TEMPLATE}))
    options = ("--trace-config", f"triton,file={traces}", *_TRACE)
    server = TinyServer(repository, folder / "tmp", *options)
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client, CountedClients(client, server) as clients:
            chosen = random.Random(1).choices([*kinds], [*kinds.values()], k=count)
            waiting = list(enumerate(chosen))

            async def work() -> None:
                while waiting:
                    number, kind = waiting.pop()
                    await clients.send(kind, number % 800)

            await asyncio.gather(*(work() for _ in range(_CLIENTS)))
            found = await _settled(client, server, clients.counted)
    finally:
        server.process.terminate()
        await asyncio.to_thread(server.wait_exit)
    entries = json.loads(traces.read_text())
    served = {entry["id"] for entry in entries if entry.get("model_name") in (MODEL, "ensemble")}
    found.traces = len(served)
    return clients.counted, found


async def _settled(
    client: httpx.AsyncClient, server: TinyServer, counted: Mapping[str, int]
) -> _Found:
    """Return what the server counts once all requests are counted, or after ten seconds."""
    place = f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics"
    for _ in range(100):
        metrics = (await client.get(place)).text
        models = (await client.get(f"{server.url}/v2/models/stats")).json()["model_stats"]
        statistics = {
            model["name"]: {
                name: model["inference_stats"][name]["count"] for name in ("success", "fail")
            }
            for model in models
        }
        found = _Found(metrics, statistics)
        ended = sum(sum(statistics[name].values()) for name in (MODEL, "ensemble"))
        engine = found.metric("slipstream_requests_finished_total", _ENGINE)
        engine += found.metric("slipstream_requests_cancelled_total", _ENGINE)
        if ended >= counted["ended"] and engine >= counted["engine requests"]:
            break
        await asyncio.sleep(0.1)
    return found


def _row(case: str, clients: int, server: float) -> Row:
    return Row(case, f"clients {clients}, server {server:.0f}", clients == server)


def _compare(counted: Counter[str], found: _Found) -> list[Row]:
    success = "nv_inference_request_success"
    tokens = "slipstream_output_tokens_total"
    kinds = ", ".join(f"{counted[kind]} {kind}" for kind in KINDS)
    wrong = counted["wrong answers"]
    return [
        Row("answers", f"{kinds}; {wrong} wrong", not wrong),
        _row("answered, by metrics", counted["answered"], found.metric(success, MODEL)),
        _row("answered, by statistics", counted["answered"], found.statistics[MODEL]["success"]),
        _row("ensemble, by metrics", counted["of ensemble"], found.metric(success, "ensemble")),
        _row(
            "ensemble, by statistics",
            counted["of ensemble"],
            found.statistics["ensemble"]["success"],
        ),
        _row(
            "refused, by metrics",
            counted["refused"],
            found.metric("nv_inference_request_failure", MODEL, reason="BACKEND"),
        ),
        _row("refused, by statistics", counted["refused"], found.statistics[MODEL]["fail"]),
        _row(
            "rows of batches, by metrics",
            counted["rows"] + counted["of ensemble"],
            found.metric("nv_inference_count", "preprocessing"),
        ),
        _row(
            "requests to the engine",
            counted["engine requests"],
            found.metric("slipstream_requests_finished_total", _ENGINE),
        ),
        _row("calls, by traces", counted["calls"], found.traces),
        _row("tokens", counted["tokens"], found.metric(tokens, _ENGINE)),
    ]


def _compare_disconnecting(counted: Counter[str], found: _Found) -> list[Row]:
    tokens = found.metric("slipstream_output_tokens_total", _ENGINE)
    least = counted["tokens"] + counted["left"]
    canceled = found.metric("nv_inference_request_failure", MODEL, reason="CANCELED")
    finished = found.metric("slipstream_requests_finished_total", _ENGINE)
    cancelled = found.metric("slipstream_requests_cancelled_total", _ENGINE)
    return [
        _row(
            "with disconnecting clients: answered",
            counted["answered"],
            found.statistics[MODEL]["success"],
        ),
        _row("with disconnecting clients: left, by metrics", counted["left"], canceled),
        _row(
            "with disconnecting clients: left, by statistics",
            counted["left"],
            found.statistics[MODEL]["fail"],
        ),
        _row("with disconnecting clients: cancelled in the engine", counted["left"], cancelled),
        _row("with disconnecting clients: finished in the engine", counted["answered"], finished),
        _row("with disconnecting clients: calls, by traces", counted["calls"], found.traces),
        Row(
            "with disconnecting clients: tokens",
            f"clients read {counted['tokens']}, the server counts {tokens:.0f}",
            tokens >= least,
        ),
    ]

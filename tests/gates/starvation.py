"""Expensive requests beside a stream and health: the gaps of both stay as without them."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from canary import Canary, Gaps
from large_vocabulary import TEXT
from real_server import RealServer

from gates.site import ADAPTER, MORE_ADAPTERS, MOST_BEAMS, start_site, write_site
from gates.table import Row

_MODEL = "one"
_TIMES_IDLE = 2.0
_LEAST_BOUND = 0.6  # seconds, on a machine without other work
# On a machine with other work the idle gap is longer, and so is the bound: up to this many seconds. A
# request that blocks the server for as long as one did once, 2.3 s, does not hold on any machine.
_MOST_BOUND = 2.0
_TRIES = 3
_IDLE_SECONDS = 1.0
_BLOCK_SECONDS = 2.3
_QUICK = ("prompt of 2 MB", "100,000 messages", "n = 128", "grammars", "reload of another engine")
_JSON = {"content-type": "application/json"}
_GENERATE = f"/v2/models/{_MODEL}/generate"
_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"


class _Answer(NamedTuple):
    status: int
    text: str  # the beginning


# by name: the work, and the statuses that its answers may have
Features = dict[str, tuple[Callable[[], list[_Answer]], tuple[int, ...]]]


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    """`long`: all features, each of them three times."""
    await asyncio.to_thread(_run, folder, long, rows)


def _run(folder: Path, long: bool, rows: list[Row]) -> None:
    repository = write_site(folder, cache_tokens=32768, large=True)
    server = start_site(repository, folder / "server", "--exit-timeout-secs=2")
    try:
        canary = Canary(server.wait().ports["HTTPService"], _MODEL)
        try:
            rows.append(_block(canary, server))
            features = _features(server, repository)
            _idle(canary)
            for name, (work, statuses) in features.items():
                if long or name in _QUICK:
                    rows.append(_measure(canary, name, work, statuses, 3 if long else 1))
        finally:
            canary.close()
    finally:
        server.close()


def _idle(canary: Canary) -> Gaps:
    """Return the gaps beside no other request."""
    start = time.monotonic()
    time.sleep(_IDLE_SECONDS)
    return canary.gaps(start, time.monotonic())


def _bound(idle: float) -> float:
    return min(_MOST_BOUND, max(_LEAST_BOUND, _TIMES_IDLE * idle))


def _block(canary: Canary, server: RealServer) -> Row:
    """The canary sees a server that is stopped for 2.3 s, and its bound does not allow it."""
    idle = _idle(canary)
    start = time.monotonic()
    os.kill(server.process_id, signal.SIGSTOP)
    time.sleep(_BLOCK_SECONDS)
    os.kill(server.process_id, signal.SIGCONT)
    gaps = canary.gaps(start, time.monotonic())
    seen = [gap > _bound(before) for gap, before in zip(gaps, idle, strict=True)]
    text = f"stream {gaps.stream:.2f} s, health {gaps.health:.2f} s: seen as a gap"
    return Row(f"(a server that is stopped for {_BLOCK_SECONDS} s)", text, all(seen))


def _measure(
    canary: Canary,
    name: str,
    work: Callable[[], list[_Answer]],
    statuses: tuple[int, ...],
    rounds: int,
) -> Row:
    """Compare the gaps beside a feature with those before and after it.

    Work of others on the machine makes a gap now and then: a feature that starves others makes
    it each time. It fails if it has in three tries.
    """
    tries = 0
    while True:
        tries += 1
        before = _idle(canary)
        start = time.monotonic()
        answers = [answer for _ in range(rounds) for answer in work()]
        gaps = canary.gaps(start, time.monotonic())
        idle = Gaps(*map(max, before, _idle(canary)))
        wrong = [answer for answer in answers if answer.status not in statuses]
        bounds = [_bound(gap) for gap in idle]
        holds = gaps.stream <= bounds[0] and gaps.health <= bounds[1] and not wrong
        if holds or wrong or tries == _TRIES:
            break
    text = f"stream {gaps.stream:.2f} s, idle {idle.stream:.2f} s; "
    text += f"health {gaps.health:.2f} s, idle {idle.health:.2f} s"
    text += f"; bounds {bounds[0]:.1f} s, {bounds[1]:.1f} s"
    if tries > 1:
        text += f"; {tries} tries"
    if wrong:
        text += f"; {len(wrong)} wrong answers, first: {wrong[0].status} {wrong[0].text[:120]}"
    return Row(name, text, holds)


def _post(server: RealServer, path: str, body: Any) -> _Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["HTTPService"], timeout=300)
    try:
        connection.request("POST", path, data, _JSON)
        response = connection.getresponse()
        start = response.read(300)
        while response.read(1 << 20):
            pass
    finally:
        connection.close()
    return _Answer(response.status, start.decode(errors="replace"))


def _chat(content: str, count: int = 1, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}] * count
    return {"model": _MODEL, "messages": messages, "max_tokens": 4, **fields}


def _text(**fields: Any) -> dict[str, Any]:
    return {"text_input": "\x01" * 200, "max_tokens": 4, **fields}


def _infer_logits(tokens: int) -> dict[str, Any]:
    values = {
        "text_input": ("BYTES", "\x01" * tokens),
        "max_tokens": ("INT32", 1),
        "return_context_logits": ("BOOL", True),
    }
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": datatype, "data": [value]}
        for name, (datatype, value) in values.items()
    ]
    output = {"name": "context_logits", "parameters": {"binary_data": True}}
    return {"inputs": inputs, "outputs": [output]}


def _features(server: RealServer, repository: Path) -> Features:
    def posts(path: str, body: Any, copies: int = 1) -> Callable[[], list[_Answer]]:
        data = json.dumps(body).encode()

        def send() -> list[_Answer]:
            with ThreadPoolExecutor(copies) as pool:
                return list(pool.map(lambda _: _post(server, path, data), range(copies)))

        return send

    refused, right = (400,), (200,)
    words = (TEXT * 80_000)[:2_000_000]
    nested = {"text_input": "a", "max_tokens": 2, "x": [[index] for index in range(400_000)]}
    scored = {"model": _MODEL, "prompt": TEXT * 60, "max_tokens": 20}
    return {
        "prompt of 2 MB": (posts(_GENERATE, _text(text_input=words)), refused),
        "100,000 messages": (posts(_CHAT, _chat("a", 100_000)), refused),
        "JSON of 60 MB": (posts(_GENERATE, _text(text_input="x\n" * 20_000_000)), refused),
        "JSON of 400,000 arrays": (posts(_GENERATE, nested), refused),
        "16 prompts of 1,500 tokens": (
            posts(_GENERATE, _text(text_input="\x01" * 1500), copies=16),
            right,
        ),
        "context logits, binary": (posts("/v2/models/two/infer", _infer_logits(1000)), right),
        "context logits, JSON": (
            posts(_GENERATE, _text(text_input="\x01" * 100, return_context_logits=True)),
            right,
        ),
        "n = 128": (
            posts(_COMPLETIONS, {"model": _MODEL, "prompt": TEXT, "n": 128, "max_tokens": 16}),
            right,
        ),
        f"{MOST_BEAMS} beams": (
            posts(_GENERATE, _text(beam_width=MOST_BEAMS, max_tokens=40), copies=4),
            right,
        ),
        "log-probabilities": (posts(_COMPLETIONS, scored | {"logprobs": 5}, copies=8), right),
        "log-probabilities of the prompt": (
            posts(_COMPLETIONS, scored | {"echo": True, "logprobs": 5}, copies=4),
            right,
        ),
        "grammars": (_grammars(server), (200, 400)),
        "adapter": (posts(_COMPLETIONS, scored | {"model": ADAPTER}, copies=4), right),
        "adapters that are loaded": (_load_adapters(server), right),
        "reload of another engine": (_reload(server, repository), right),
    }


def _grammars(server: RealServer) -> Callable[[], list[_Answer]]:
    """Schemas of 4,000 properties; the library refuses those that are too ambiguous."""
    number = 0

    def send() -> list[_Answer]:
        nonlocal number
        number += 1
        properties = {f"property{index}": {"type": "string"} for index in range(4000)}
        schema = {"type": "object", "properties": properties, "description": str(number)}
        kind = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return [_post(server, _CHAT, _chat("a", response_format=kind))]

    return send


def _load_adapters(server: RealServer) -> Callable[[], list[_Answer]]:
    """The first request that names an adapter loads it."""
    left = list(MORE_ADAPTERS)

    def send() -> list[_Answer]:
        body = {"model": left.pop() if left else ADAPTER, "prompt": TEXT, "max_tokens": 4}
        return [_post(server, _COMPLETIONS, body)]

    return send


def _reload(server: RealServer, repository: Path) -> Callable[[], list[_Answer]]:
    def send() -> list[_Answer]:
        (repository / "two-tensorrt_llm" / "config.pbtxt").touch()
        return [_post(server, "/v2/repository/models/two-tensorrt_llm/load", {})]

    return send

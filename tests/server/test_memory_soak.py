"""The memory of a real server on a real engine stops growing under tens of thousands of requests.

Only anonymous memory of the processes is counted, resident or swapped. File pages are ignored.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
from real_server import RealServer, limit_cache
from tiny_engine import build_tiny_engine
from tiny_server import MODEL, children_of
from tritonclient.grpc import InferInput
from tritonclient.grpc import aio as grpc

from slipstream.repository.templates import write_repository

# requests before the first measurement and between the two
WARM = 10_000
COUNTED = 30_000
CLIENTS = 16
CACHE_TOKENS = 8192
# a share, or bytes if that is less; pools of small objects vary
MAX_GROWTH = 0.01, 2 << 20
KINDS = ("answer", "stream", "left", "refused", "completion", "grpc")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    engine = build_tiny_engine(folder)
    write_repository(folder / "repository", MODEL, engine, engine, 64)
    # The cache is full before the first measurement. Until then the engine stores more and more
    # block hashes.
    limit_cache(folder / "repository", CACHE_TOKENS)
    running = RealServer(folder / "repository", folder / "server").wait()
    yield running
    running.close()


def owned_bytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text()
    return sum(int(size) for size in re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", status)) * 1024


class Clients:
    def __init__(self, server: RealServer) -> None:
        self._http = httpx.AsyncClient(base_url=f"http://{server.http}", timeout=60)
        self._grpc = grpc.InferenceServerClient(server.grpc)
        self._port = server.ports["HTTPService"]

    async def close(self) -> None:
        await self._http.aclose()
        await self._grpc.close()

    async def ask(self, kind: str, draw: random.Random) -> None:
        prompt = " ".join(str(draw.randrange(2, 96)) for _ in range(draw.randrange(1, 40)))
        body = {"text_input": prompt, "max_tokens": draw.randrange(1, 12), "end_id": -1}
        body |= draw.choice(
            [
                {},
                {"temperature": 0.8, "top_p": 1.0, "random_seed": 3},
                {"return_log_probs": True},
                {"stop_words": ["7 8"], "bad_words": ["5"]},
                {"repetition_penalty": 1.2},
            ]
        )
        if kind == "left":
            await self._leave(body)
        elif kind == "grpc":
            await self._ask_grpc(prompt, body["max_tokens"])
        elif kind == "completion":
            wanted = {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": body["max_tokens"],
                "logprobs": 2,
            }
            assert (await self._http.post("/v1/completions", json=wanted)).status_code == 200
        elif kind == "refused":
            wrong = draw.choice([{"max_tokens": -1}, {"text_input": 5}, {"temperature": "hot"}])
            answer = await self._http.post(f"/v2/models/{MODEL}/generate", json=body | wrong)
            # 500 is Triton's status for an error of a model
            assert answer.status_code in (400, 500), answer.text
            assert answer.json()["error"]
        else:
            route = "generate_stream" if kind == "stream" else "generate"
            answer = await self._http.post(
                f"/v2/models/{MODEL}/{route}", json=body | {"stream": kind == "stream"}
            )
            assert answer.status_code == 200
            assert "text_output" in answer.text

    async def _leave(self, body: dict) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        content = json.dumps(body | {"stream": True, "max_tokens": 150}).encode()
        head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        await reader.readuntil(b"data:")
        writer.transport.abort()

    async def _ask_grpc(self, prompt: str, max_tokens: int) -> None:
        inputs = [
            _tensor("text_input", prompt.encode(), "BYTES"),
            _tensor("max_tokens", max_tokens, "INT32"),
        ]

        async def requests():
            yield {"model_name": MODEL, "inputs": inputs, "enable_empty_final_response": True}

        async for result, error in self._grpc.stream_infer(requests()):
            assert error is None
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


def _tensor(name: str, value: bytes | int, kind: str) -> InferInput:
    tensor = InferInput(name, [1, 1], kind)
    tensor.set_data_from_numpy(
        np.array([[value]], dtype=np.object_ if kind == "BYTES" else np.int32)
    )
    return tensor


async def traffic(server: RealServer, count: int, seed: int) -> Counter[str]:
    clients = Clients(server)
    asked = Counter[str]()
    draws = [random.Random(seed + number) for number in range(count)]

    async def one_after_another() -> None:
        while draws:
            draw = draws.pop()
            kind = draw.choice(KINDS)
            await clients.ask(kind, draw)
            asked[kind] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(one_after_another())
    await clients.close()
    return asked


@pytest.mark.slow
def test_memory_does_not_grow_after_warm_up(server):
    processes = [server._process.pid, *children_of(server._process.pid)]
    assert len(processes) == 2
    asked = asyncio.run(traffic(server, WARM, 0))
    assert min(asked[kind] for kind in KINDS) > WARM // 20
    before = [owned_bytes(process) for process in processes]
    asyncio.run(traffic(server, COUNTED, WARM))
    after = [owned_bytes(process) for process in processes]
    print(
        f"owned, KiB: {[b >> 10 for b in before]} → {[b >> 10 for b in after]} in {COUNTED} requests"
    )
    share, few = MAX_GROWTH
    for then, now in zip(before, after, strict=True):
        assert now - then < max(then * share, few)

"""Clients of every kind that count what they send and get."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
from front_ends import grpc_input
from tiny_server import MODEL, TinyServer
from tritonclient.grpc import aio as grpc

from gates.traffic import Outcome, expected, stream, until

_TOKENS = 3


class CountedClients:
    """`counted` has the kinds of requests, their outcomes, and the tokens that clients read."""

    def __init__(self, client: httpx.AsyncClient, server: TinyServer) -> None:
        self.counted: Counter[str] = Counter()
        self._client = client
        self._server = server
        self._grpc = grpc.InferenceServerClient(f"127.0.0.1:{server.ports['GRPCInferenceService']}")

    async def __aenter__(self) -> CountedClients:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._grpc.close()

    async def send(self, kind: str, first: int) -> None:
        self.counted[kind] += 1
        self.counted["calls"] += kind not in ("batch", "gRPC unary")
        await getattr(self, f"_{KINDS.get(kind, kind)}")(first)

    def _add(self, texts: list[str], wanted: list[str], requests: int, outcome: str) -> None:
        """Count right answers. `requests`: those that the server counts for them."""
        self.counted["wrong answers"] += texts != wanted
        self.counted["tokens"] += sum(len(text.split()) for text in texts)
        self.counted["engine requests"] += len(wanted)
        self.counted[outcome] += requests
        self.counted["ended"] += requests

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return (await self._client.post(f"{self._server.url}{path}", json=body)).json()

    async def _whole(self, first: int) -> None:
        body = {"text_input": str(first), "max_tokens": _TOKENS}
        found = await self._post(f"/v2/models/{MODEL}/generate", body)
        self._add([found.get("text_output", "")], [expected(first, _TOKENS)], 1, "answered")

    async def _ensemble(self, first: int) -> None:
        body = {"text_input": str(first), "max_tokens": _TOKENS}
        found = await self._post("/v2/models/ensemble/generate", body)
        self._add([found.get("text_output", "")], [expected(first, _TOKENS)], 1, "of ensemble")

    async def _streamed(self, first: int) -> None:
        outcome = await stream(self._client, self._server, first, 5, 1)
        self._add([outcome.text], [expected(first, 5)], 1, "answered")

    async def _refused(self, first: int) -> None:
        body = {"text_input": str(first), "max_tokens": -1}
        url = f"{self._server.url}/v2/models/{MODEL}/generate"
        answer = await self._client.post(url, json=body)
        self.counted["wrong answers"] += answer.status_code != 400
        self.counted["ended"] += 1

    async def _complete(self, body: dict[str, Any], wanted: list[str], requests: int) -> None:
        found = await self._post("/v1/completions", {"model": MODEL, "max_tokens": _TOKENS, **body})
        choices = found.get("choices", [])
        counted = found.get("usage", {}).get("completion_tokens")
        self.counted["wrong answers"] += counted != _TOKENS * len(wanted)
        self._add([choice["text"].strip() for choice in choices], wanted, requests, "answered")

    async def _completion(self, first: int) -> None:
        await self._complete({"prompt": str(first)}, [expected(first, _TOKENS)], 1)

    async def _choices(self, first: int) -> None:
        await self._complete({"prompt": str(first), "n": 3}, [expected(first, _TOKENS)] * 3, 1)

    async def _prompts(self, first: int) -> None:
        prompts = [first, first + 1]
        wanted = [expected(prompt, _TOKENS) for prompt in prompts]
        await self._complete({"prompt": [str(prompt) for prompt in prompts]}, wanted, 2)

    async def _chat(self, first: int) -> None:
        messages = [{"role": "user", "content": str(first)}]
        body = {"model": MODEL, "messages": messages, "max_tokens": _TOKENS}
        found = await self._post("/v1/chat/completions", body)
        texts = [choice["message"]["content"].strip() for choice in found.get("choices", [])]
        self._add(texts, [expected(first, _TOKENS)], 1, "answered")

    async def _batch(self, first: int) -> None:
        """A batch for the tokenizer's model, without the engine."""
        rows = first % 4 + 1
        inputs = [
            {"name": name, "shape": [rows, 1], "datatype": datatype, "data": [value] * rows}
            for name, datatype, value in (
                ("QUERY", "BYTES", str(first)),
                ("REQUEST_OUTPUT_LEN", "INT32", 3),
            )
        ]
        found = await self._post("/v2/models/preprocessing/infer", {"inputs": inputs})
        shapes = {output["name"]: output["shape"] for output in found.get("outputs", [])}
        self.counted["wrong answers"] += shapes.get("INPUT_ID") != [rows, 1]
        self.counted["rows"] += rows

    async def _grpc_unary(self, first: int) -> None:
        """A unary call for the tokenizer's model, without the engine."""
        inputs = [
            grpc_input("QUERY", np.array([[str(first).encode()]], np.object_)),
            grpc_input("REQUEST_OUTPUT_LEN", np.array([[3]], np.int32)),
        ]
        found = await self._grpc.infer("preprocessing", inputs)
        self.counted["wrong answers"] += found.as_numpy("INPUT_ID").tolist() != [[first]]
        self.counted["rows"] += 1

    async def _grpc_stream(self, first: int) -> None:
        self._add([await self._stream(MODEL, first)], [expected(first, _TOKENS)], 1, "answered")

    async def _grpc_ensemble(self, first: int) -> None:
        text = await self._stream("ensemble", first)
        self._add([text], [expected(first, _TOKENS)], 1, "of ensemble")

    async def _stream(self, model: str, first: int) -> str:
        inputs = [
            grpc_input("text_input", np.array([[str(first).encode()]], np.object_)),
            grpc_input("max_tokens", np.array([[_TOKENS]], np.int32)),
            grpc_input("stream", np.array([[True]])),
        ]

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": model, "inputs": inputs}

        text = b""
        async for result, error in self._grpc.stream_infer(requests()):
            if error is not None:
                return str(error)
            text += b"".join(result.as_numpy("text_output").ravel())
        return text.decode().strip()

    async def _left(self, first: int) -> None:
        """Leave a long stream after its first event."""
        outcome = Outcome()
        running = asyncio.ensure_future(stream(self._client, self._server, first, 3000, 5, outcome))
        await until(lambda: outcome.events)
        running.cancel()
        await asyncio.wait([running])
        self.counted["engine requests"] += 1
        self.counted["ended"] += 1


# by name in the table: the method that sends it
KINDS = {
    "whole": "whole",
    "streamed": "streamed",
    "refused": "refused",
    "ensemble": "ensemble",
    "completion": "completion",
    "n = 3": "choices",
    "two prompts": "prompts",
    "chat": "chat",
    "batch": "batch",
    "gRPC unary": "grpc_unary",
    "gRPC stream": "grpc_stream",
    "gRPC ensemble": "grpc_ensemble",
}

"""Requests of many kinds over both protocols, each with its answer checked."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from real_server import RealServer
from tritonclient.grpc import InferInput
from tritonclient.grpc import aio as grpc

from gates.site import ADAPTER

_LETTERS = "abcdefghijklmnopqrstuvwxyz ABC.,!?0123456789"
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}


class MixedTraffic:
    """Clients that send until they are cancelled. `right` and `wrong` count by kind."""

    def __init__(self, server: RealServer) -> None:
        self.right: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.first_wrong: dict[str, str] = {}  # by kind
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=f"http://{server.http}", timeout=60, limits=limits, trust_env=False
        )
        self._grpc = grpc.InferenceServerClient(server.grpc)
        self._port = server.ports["HTTPService"]
        self._kinds: dict[str, Callable[[random.Random], Awaitable[Any]]] = {
            "generate": self._generate,
            "generate_stream": self._stream,
            "infer": self._infer,
            "completion": self._completion,
            "chat": self._chat,
            "n = 3": self._several,
            "adapter": self._adapter,
            "guide": self._guide,
            "leave": self._leave,
            "malformed": self._malformed,
            "refused": self._refused,
            "statistics": self._statistics,
            "gRPC unary": self._grpc_unary,
            "gRPC stream": self._grpc_stream,
            "gRPC cancel": self._grpc_cancel,
        }

    async def close(self) -> None:
        await self._http.aclose()
        await self._grpc.close()

    async def use(self, chance: random.Random) -> None:
        """Send one request after the other until this is cancelled."""
        with suppress(asyncio.CancelledError):
            while True:
                kind = chance.choice(list(self._kinds))
                await self._try(kind, self._kinds[kind](chance))

    async def reload(self, repository: Path, seconds: float) -> None:
        """Load the engine of `two` again and again, until this is cancelled."""
        config = repository / "two-tensorrt_llm" / "config.pbtxt"
        with suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(seconds)
                config.touch()  # what has not changed would not be loaded again
                await self._try("reload", self._load())

    async def _try(self, kind: str, work: Awaitable[Any]) -> None:
        try:
            problem = await work
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self.first_wrong.setdefault(kind, str(problem)[:300])
            self.wrong[kind] += 1
        else:
            self.right[kind] += 1

    async def _load(self) -> str:
        answer = await self._http.post("/v2/repository/models/two-tensorrt_llm/load", json={})
        return "" if answer.status_code == 200 else answer.text

    async def _post(self, path: str, body: dict[str, Any], wanted: int = 200) -> Any:
        answer = await self._http.post(path, json=body)
        if answer.status_code != wanted:
            raise ValueError(f"{path} answered {answer.status_code} {answer.text}")
        return answer.json()

    async def _generate(self, chance: random.Random) -> str:
        tokens = chance.randrange(1, 24)
        fields: dict[str, Any] = chance.choice(
            [
                {},
                {"temperature": 0.8, "top_p": 0.9, "random_seed": 3},
                {"return_log_probs": True},
                {"stop_words": ["q#"], "bad_words": ["x"]},
                {"repetition_penalty": 1.2},
            ]
        )
        body = {"text_input": _prompt(chance), "max_tokens": tokens, **fields}
        found = await self._post(f"/v2/models/{chance.choice(['one', 'two'])}/generate", body)
        return "" if found["text_output"] else f"no text: {found}"

    async def _stream(self, chance: random.Random) -> str:
        tokens = chance.randrange(1, 40)
        body = {"text_input": _prompt(chance), "max_tokens": tokens, "stream": True}
        answer = await self._http.post("/v2/models/one/generate_stream", json=body)
        pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: "]
        text = "".join(piece.get("text_output", "") for piece in pieces)
        return "" if len(text) == tokens else f"{len(text)} of {tokens} letters: {answer.text}"

    async def _infer(self, chance: random.Random) -> str:
        inputs = [
            {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [_prompt(chance)]},
            {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [6]},
        ]
        found = await self._post("/v2/models/two/infer", {"inputs": inputs})
        return "" if found["outputs"] else "no outputs"

    async def _completion(self, chance: random.Random) -> str:
        body = {"model": "one", "prompt": _prompt(chance), "max_tokens": 8, "logprobs": 2}
        found = await self._post("/v1/completions", body)
        count = found["usage"]["completion_tokens"]
        return "" if count == 8 else f"{count} of 8 tokens"

    async def _chat(self, chance: random.Random) -> str:
        messages = [{"role": "user", "content": _prompt(chance)}]
        body = {"model": "one", "messages": messages, "max_tokens": 5, "temperature": 0}
        found = await self._post("/v1/chat/completions", body)
        return "" if found["choices"][0]["message"]["content"] else "no content"

    async def _several(self, chance: random.Random) -> str:
        body = {"model": "one", "prompt": _prompt(chance), "max_tokens": 6, "n": 3}
        found = await self._post("/v1/completions", body)
        return "" if len(found["choices"]) == 3 else f"{len(found['choices'])} choices"

    async def _adapter(self, chance: random.Random) -> str:
        body = {"model": ADAPTER, "prompt": _prompt(chance), "max_tokens": 8, "temperature": 0}
        found = await self._post("/v1/completions", body)
        return "" if found["usage"]["completion_tokens"] == 8 else f"{found['usage']}"

    async def _guide(self, chance: random.Random) -> str:
        """Every fourth guide is new, so that remembered ones are forgotten."""
        number = chance.choice([1, 1, 1, chance.randrange(10**9)])
        properties = {"n": {"enum": [number, number + 1]}}
        schema = {"name": "s", "schema": _SCHEMA | {"properties": properties}}
        body = {
            "model": "one",
            "messages": [{"role": "user", "content": _prompt(chance)}],
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
        found = await self._post("/v1/chat/completions", body)
        content = found["choices"][0]["message"]["content"]
        right = json.loads(content) in ({"n": number}, {"n": number + 1})
        return "" if right else f"not of the schema: {content}"

    async def _leave(self, chance: random.Random) -> str:
        body = {"text_input": _prompt(chance), "max_tokens": 300, "stream": True}
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.random() / 5):
                await self._http.post("/v2/models/one/generate_stream", json=body)
        return ""

    async def _malformed(self, chance: random.Random) -> str:
        url = f"/v2/models/two/{chance.choice(['generate', 'infer'])}"
        answer = await self._http.post(url, content=b"{" * chance.randrange(1, 500))
        return "" if answer.status_code in (400, 500) else f"{answer.status_code} {answer.text}"

    async def _refused(self, chance: random.Random) -> str:
        wrong = chance.choice([{"max_tokens": -1}, {"text_input": 5}, {"temperature": "hot"}])
        body = {"text_input": "a", "max_tokens": 2, **wrong}
        answer = await self._http.post("/v2/models/one/generate", json=body)
        right = answer.status_code in (400, 500) and answer.json()["error"]
        return "" if right else f"{answer.status_code} {answer.text}"

    async def _statistics(self, chance: random.Random) -> str:
        path = chance.choice(["/v2/models/stats", "/v2", "/v1/models", "/v2/models/one/config"])
        answer = await self._http.get(path)
        return "" if answer.status_code == 200 else f"{answer.status_code} {answer.text}"

    async def _grpc_unary(self, chance: random.Random) -> str:
        result = await self._grpc.infer("two", _tensors(_prompt(chance), 6))
        (text,) = result.as_numpy("text_output").ravel()
        return "" if text else "no text"

    async def _grpc_stream(self, chance: random.Random) -> str:
        tokens = chance.randrange(1, 24)
        count = 0
        async for result, error in self._grpc.stream_infer(self._requests(chance, tokens)):
            if error is not None:
                return str(error)
            text = result.as_numpy("text_output")
            count += 0 if text is None else sum(map(len, text.ravel()))
        return "" if count == tokens else f"{count} of {tokens} letters"

    async def _grpc_cancel(self, chance: random.Random) -> str:
        calls = self._grpc.stream_infer(self._requests(chance, 300))
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.random() / 5):
                async for _, error in calls:
                    if error is not None:
                        return str(error)
        calls.cancel()
        return ""

    async def _requests(self, chance: random.Random, tokens: int) -> Any:
        inputs = _tensors(_prompt(chance), tokens)
        inputs.append(InferInput("stream", [1, 1], "BOOL"))
        inputs[-1].set_data_from_numpy(np.array([[True]]))
        yield {"model_name": "one", "inputs": inputs}


def _prompt(chance: random.Random) -> str:
    """Half of the prompts begin in the same way, so that their blocks are shared."""
    shared = "The same beginning of many prompts, " * 2 if chance.random() < 0.5 else ""
    return shared + "".join(chance.choices(_LETTERS, k=chance.randrange(1, 80)))


def _tensors(text: str, tokens: int) -> list[InferInput]:
    prompt = InferInput("text_input", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
    count = InferInput("max_tokens", [1, 1], "INT32")
    count.set_data_from_numpy(np.array([[tokens]], dtype=np.int32))
    return [prompt, count]

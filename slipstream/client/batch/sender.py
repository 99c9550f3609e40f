"""Sends the requests of a batch to a server, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from slipstream.client.batch.files import BatchRequest, BatchResult

_CONNECT_SECONDS = 10.0
_MOST_TRIES = 8  # of a request that the server has no room for
_LONGEST_WAIT_SECONDS = 15.0
_NO_ROOM = (429, 503)
_LOST_TRIES = 3  # of a request whose connection breaks


class ServerLost(Exception):
    """The server cannot be reached any more."""


@dataclass(frozen=True)
class ModelName:
    """The model of requests that name none, or of all."""

    name: str
    replaces: bool = False  # the names of the lines do not count


@dataclass(frozen=True)
class BatchSender:
    url: str  # of the server: http://HOST:PORT
    key: str
    model: ModelName
    concurrency: int
    on_result: Callable[[BatchResult, int], None]  # takes a result, and its generated tokens

    async def run(self, requests: Iterator[BatchRequest]) -> None:
        """Send all requests. Raises ServerLost if the server ends."""
        limits = httpx.Limits(max_connections=self.concurrency)
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        async with httpx.AsyncClient(
            limits=limits, timeout=timeout, headers=headers, trust_env=False
        ) as client:
            workers = [
                asyncio.create_task(self._work(client, requests)) for _ in range(self.concurrency)
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, client: httpx.AsyncClient, requests: Iterator[BatchRequest]) -> None:
        """Send requests, one after the other. All workers take theirs from the same iterator."""
        for request in requests:
            problem = request.problem()
            if problem:
                self.on_result(BatchResult(request.custom_id, None, problem=problem), 0)
                continue
            body = self._body(request)
            response = await self._send(client, request, body)
            result = BatchResult(request.custom_id, response.status_code, response.content)
            self.on_result(result, _generated_tokens(result))

    def _body(self, request: BatchRequest) -> bytes:
        """Return the body with the model that is asked for. Other bodies are not changed."""
        fields = msgspec.json.decode(request.body)
        if "model" in fields and not self.model.replaces:
            return bytes(request.body)
        return msgspec.json.encode({**fields, "model": self.model.name})

    async def _send(
        self, client: httpx.AsyncClient, request: BatchRequest, body: bytes
    ) -> httpx.Response:
        """Return the response. A request that the server has no room for is sent again."""
        seconds = 0.25
        lost = 0
        for tried in range(1, _MOST_TRIES + 1):
            try:
                response = await client.post(self.url + request.url, content=body)
            except httpx.TransportError as error:
                lost += 1
                if lost == _LOST_TRIES:
                    raise ServerLost(f"{self.url} cannot be reached: {error}") from error
            else:
                if response.status_code not in _NO_ROOM or tried == _MOST_TRIES:
                    return response
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST_WAIT_SECONDS)
        raise ServerLost(f"{self.url} does not answer")


def _generated_tokens(result: BatchResult) -> int:
    """Return the number of tokens that a response reports to be generated."""
    if result.failed:
        return 0
    document: Any = msgspec.json.decode(result.body)
    usage = document.get("usage") if isinstance(document, dict) else None
    if not isinstance(usage, dict):
        return 0
    return usage.get("completion_tokens") or usage.get("output_tokens") or 0

"""Passes requests of Ray Serve to the server of the replica, and its responses back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

CONNECT_SECONDS = 5.0
# headers of one connection
_OF_CONNECTION = frozenset(
    ("connection", "host", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade")
)


class Forwarder:
    def __init__(self, url: str) -> None:
        """`url`: address of the server."""
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None),  # the deployment bounds the requests
            trust_env=False,
        )
        for name in list(self._client.headers):
            del self._client.headers[name]  # the server sees the client's headers only

    async def forward(self, request: Request) -> Response:
        """Return the response of the server. It is cancelled there when this task is cancelled."""
        body = await request.body()
        sent = self._client.build_request(
            request.method, _target(request), headers=_request_headers(request), content=body
        )
        try:
            found = await self._client.send(sent, stream=True)
        except httpx.TransportError as error:
            text = f"the server of this replica did not respond: {error}"
            return JSONResponse({"error": text}, 503, {"retry-after": "1"})
        response = StreamingResponse(_pieces(found), found.status_code)
        response.raw_headers = [
            (name.lower(), value)
            for name, value in found.headers.raw
            if name.decode("latin-1").lower() not in _OF_CONNECTION
        ]
        return response

    async def get(self, url: str) -> httpx.Response:
        return await self._client.get(url)

    async def close(self) -> None:
        await self._client.aclose()


def _target(request: Request) -> str:
    """Return path and query as the client sent them, below the route of the application."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    query = request.scope["query_string"].decode("latin-1")
    return quote(path, safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")


def _request_headers(request: Request) -> list[tuple[bytes, bytes]]:
    return [
        (name, value)
        for name, value in request.headers.raw
        if name.decode("latin-1").lower() not in _OF_CONNECTION
    ]


async def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in response.aiter_raw():
            yield piece
    finally:
        # Also where the client has left, and this task is being cancelled: closing the connection
        # cancels the request in the server.
        await asyncio.shield(response.aclose())

"""One replica of the deployment: an actor that runs a server and passes requests to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import httpx
from starlette.requests import Request
from starlette.responses import Response

from slipstream.ray.forwarding import Forwarder
from slipstream.ray.scaling import CAPACITY
from slipstream.ray.server_process import ServerFailed, ServerProcess

if TYPE_CHECKING:
    from slipstream.ray.nodes import OtherNodes

# requests that an engine runs at once, of each engine in the server
_MAX_REQUESTS = re.compile(
    r'^nv_trt_llm_request_metrics\{[^}]*request_type="max"[^}]*\} (\S+)$', re.MULTILINE
)


class Replica:
    """Ray Serve calls these methods."""

    def __init__(
        self,
        flags: Sequence[str],
        start_timeout_seconds: float,
        exit_timeout_seconds: float,
        nodes: int = 1,
    ) -> None:
        """nodes: of the placement group, which the ranks of the engines are divided among"""
        self._others: OtherNodes | None = None
        if nodes > 1:
            from slipstream.ray.nodes import OtherNodes

            self._others = OtherNodes(flags, exit_timeout_seconds)
        variables = None if self._others is None else self._others.variables
        self._server = ServerProcess(flags, exit_timeout_seconds, variables)
        self._server.wait_started(start_timeout_seconds)
        self._forwarder = Forwarder(self._server.url)
        metrics = httpx.get(f"{self._server.metrics_url}/metrics", trust_env=False)
        self._capacity = sum(float(found) for found in _MAX_REQUESTS.findall(metrics.text))

    async def __call__(self, request: Request) -> Response:
        return await self._forwarder.forward(request)

    async def check_health(self) -> None:
        """Raise if the server has ended or does not answer. Ray then replaces the replica."""
        self._server.check_running()
        if self._others is not None:
            await self._others.check_running()
        found = await self._forwarder.get(f"{self._server.metrics_url}/v2/health/live")
        if found.status_code != 200:
            raise ServerFailed(f"/v2/health/live is {found.status_code}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {CAPACITY: self._capacity}

    async def __del__(self) -> None:
        """Ray calls this when no request is left, or after the exit timeout."""
        await self._server.stop()
        if self._others is not None:
            self._others.kill()
        await self._forwarder.close()

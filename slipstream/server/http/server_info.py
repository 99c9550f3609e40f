"""`/version`, `/load` and, on request of the server's options, `/metrics` on the HTTP port.

The routes are those of vLLM and llama-server. Metrics have a port of their own as well.
"""

from __future__ import annotations

import json
from typing import Any

from slipstream.server.http.exchange import TEXT, Exchange, Handler, Refused, check_site
from slipstream.server.http.pages import describe_get
from slipstream.server.http.routes import GET, Parameters, Route, RouteGroup
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.origins import OriginPolicy
from slipstream.server.kserve.triton_json import write_error
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.version import VERSION

METRICS = "/metrics"
LIVE = "/v2/health/live"
READY = "/v2/health/ready"
METRICS_TYPE = b"text/plain; charset=utf-8"


class ServerInfo:
    def __init__(self, state: ServerState, metrics: ServerMetrics | None = None) -> None:
        """`metrics`: None if the HTTP port does not serve them."""
        self._state = state
        self._metrics = metrics

    def group(self) -> RouteGroup:
        """Return these routes for the table of the HTTP port."""
        routes = [
            Route(GET, "/version", "metadata", self._answer_version),
            Route(GET, "/load", "statistics", self._answer_load),
        ]
        if self._metrics is not None:
            routes.append(Route(GET, METRICS, "statistics", self._answer_metrics, TEXT))
        return RouteGroup(routes, self._describe)

    async def _answer_version(self, exchange: Exchange, parameters: Parameters) -> None:
        await exchange.respond(200, json.dumps({"version": VERSION}).encode())

    async def _answer_load(self, exchange: Exchange, parameters: Parameters) -> None:
        await exchange.respond(200, json.dumps({"server_load": self._state.outstanding}).encode())

    async def _answer_metrics(self, exchange: Exchange, parameters: Parameters) -> None:
        assert self._metrics is not None
        await self._metrics.collect()
        await exchange.respond(200, self._metrics.render().encode(), METRICS_TYPE)

    def _describe(self) -> dict[str, Any]:
        paths = {
            "/version": describe_get("The version of the server", "JSON with version"),
            "/load": describe_get("Requests in flight", "JSON with server_load"),
        }
        if self._metrics is not None:
            paths[METRICS] = describe_get("Metrics", "Prometheus text", empty=True)
        return paths


def serve_metrics(
    metrics: ServerMetrics, state: ServerState, origin_policy: OriginPolicy = OriginPolicy()
) -> Handler:
    """Return the handler of the metrics port. As in Triton, any other path is an empty 200.

    It has the two health probes of the HTTP port, which need no key here: the probes of an
    orchestrator cannot send a secret.
    """

    async def answer(exchange: Exchange) -> None:
        try:
            check_site(origin_policy, exchange)
        except Refused as refusal:
            await exchange.respond(refusal.status, write_error(refusal.message), TEXT)
            return
        if exchange.method != "GET":
            await exchange.respond(405, b'{"error":"Method Not Allowed"}', TEXT)
            return
        if exchange.path in (LIVE, READY):
            well = state.live if exchange.path == LIVE else state.ready
            await exchange.respond(200 if well else 400, b"", TEXT)
            return
        body = b""
        if exchange.path == METRICS:
            await metrics.collect()
            body = metrics.render().encode()
        await exchange.respond(200, body, METRICS_TYPE)

    return answer

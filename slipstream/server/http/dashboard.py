"""The data of the dashboard of the page at `/`: the metrics, and the last steps of the engines."""

from __future__ import annotations

import json
from typing import Any

from slipstream.server.http.exchange import Exchange, Refused
from slipstream.server.http.pages import describe_get
from slipstream.server.http.routes import GET, Parameters, Route, RouteGroup
from slipstream.server.http.server_info import METRICS_TYPE
from slipstream.server.metrics.server_metrics import ServerMetrics

METRICS_PATH = "/dashboard/metrics"
STEPS_PATH = "/dashboard/steps"
_AFTER = "after"


class Dashboard:
    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def group(self) -> RouteGroup:
        """Return these routes for the table of the HTTP port."""
        routes = [
            Route(GET, METRICS_PATH, "statistics", self._answer_metrics),
            Route(GET, STEPS_PATH, "statistics", self._answer_steps),
        ]
        return RouteGroup(routes, describe_routes)

    async def _answer_metrics(self, exchange: Exchange, parameters: Parameters) -> None:
        await self._metrics.collect()
        await exchange.respond(200, self._metrics.render().encode(), METRICS_TYPE)

    async def _answer_steps(self, exchange: Exchange, parameters: Parameters) -> None:
        after = exchange.query().get(_AFTER, "0")
        if not after.isdecimal() or len(after) > 20:
            raise Refused(400, f"{_AFTER} must be a time in microseconds since 1970")
        steps = self._metrics.describe_steps(int(after))
        await exchange.respond(200, json.dumps(steps, separators=(",", ":")).encode())


def describe_routes() -> dict[str, Any]:
    """Return the part of the OpenAPI document for these routes."""
    return {
        METRICS_PATH: describe_get("The metrics, for the dashboard", "Prometheus text", empty=True),
        STEPS_PATH: describe_get(
            "The last steps of the engines, for the dashboard",
            "JSON: of each step its start, rows, epochs, token counts, and which rows sampled",
        ),
    }

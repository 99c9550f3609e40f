"""The handler of the HTTP port, with the routes of all protocols, for every front end."""

from __future__ import annotations

from typing import Any

from slipstream.server.anthropic.routes import AnthropicRoutes
from slipstream.server.http.dashboard import Dashboard
from slipstream.server.http.health_probes import HealthProbes
from slipstream.server.http.routes import HttpRoutes
from slipstream.server.http.server_info import ServerInfo
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.openai.routes import OpenAIRoutes
from slipstream.server.tracing.settings import TraceSettings


def create_context(**settings: Any) -> ServerContext:
    """Return a context with default trace settings. `settings`: its other fields."""
    return ServerContext(**{"trace": TraceSettings(), **settings})


def create_app(
    registry: ModelRegistry,
    state: ServerState,
    context: ServerContext | None = None,
    metrics: ServerMetrics | None = None,
    dashboard: ServerMetrics | None = None,
) -> HttpRoutes:
    """Return the handler of the HTTP port, with Triton's, OpenAI's and Anthropic's routes.

    Without a context the models are fixed and no key is needed. `metrics`: those that the HTTP port
    serves at `/metrics`. `dashboard`: those of the page.
    """
    context = context or create_context()
    anthropic = AnthropicRoutes(registry, state, context)
    openai = OpenAIRoutes(registry, state, context)
    probes = HealthProbes(registry, state)
    info = ServerInfo(state, metrics)
    groups = [anthropic.group(), openai.group(), probes.group(), info.group()]
    if dashboard is not None:
        groups.append(Dashboard(dashboard).group())
    return HttpRoutes(registry, state, context, groups)

"""Write the pages of docs/ that are generated from the code.

    python docs/generate.py

tests/test_docs.py fails when a page is not what this program writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.cli.reference import render_reference
from slipstream.request_fields.markdown import page as render_request_fields
from slipstream.server.anthropic.routes import anthropic_paths
from slipstream.server.http import dashboard, health_probes
from slipstream.server.http.pages import openapi_document
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.openai.describe import openai_paths

DOCS = Path(__file__).parent
HTTP_HEAD = """# HTTP routes

This page is generated from the OpenAPI document that a server returns at `/openapi.json`. `/docs`
on a running server shows the same routes with forms to try them.

[Write requests](../requests.md) explains the fields of `generate`, and
[OpenAI clients](../openai.md) and [Anthropic clients](../anthropic.md) those of `/v1`.
"""


def render_http_routes() -> str:
    """Return the page of HTTP routes, in groups by the first parts of their paths."""
    registry = ModelRegistry()
    others = {
        **anthropic_paths(registry),
        **openai_paths(registry),
        **health_probes.describe_routes(),
        **dashboard.describe_routes(),
    }
    paths = json.loads(openapi_document(registry, others))["paths"]
    names = ("OpenAI", "Anthropic", "Triton", "Health", "Dashboard")
    groups: dict[str, list[str]] = {name: [] for name in names}
    for path, operations in sorted(paths.items()):
        groups[_group(path)] += _rows(path, operations)
    tables = [f"\n## {name}\n\n{_table(rows)}" for name, rows in groups.items()]
    return HTTP_HEAD + "".join(tables)


def _group(path: str) -> str:
    if path.startswith("/v1/messages"):
        return "Anthropic"
    if path.startswith("/v1"):
        return "OpenAI"
    if path.startswith("/dashboard"):
        return "Dashboard"
    return "Triton" if path.startswith("/v2") else "Health"


def _rows(path: str, operations: Mapping[str, Any]) -> list[str]:
    return [
        f"| `{method.upper()} {path}` | {operation['summary']} |\n"
        for method, operation in operations.items()
    ]


def _table(rows: list[str]) -> str:
    return "| route | purpose |\n|---|---|\n" + "".join(rows)


PAGES: dict[str, Callable[[], str]] = {
    "request-fields.md": render_request_fields,
    "reference/cli.md": render_reference,
    "reference/http.md": render_http_routes,
}


def main() -> None:
    for name, render in PAGES.items():
        (DOCS / name).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()

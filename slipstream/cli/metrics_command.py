"""`slipstream metrics`: a server's metrics as JSON, as Triton CLI prints them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.server_address import add_address, get


def main(arguments: Sequence[str]) -> int:
    parser = Parser("slipstream metrics", description="Print a server's metrics as JSON.")
    add_address(parser, "8002")
    response = get(parser.parse(arguments), 8002, "/metrics")
    if not response.is_success:
        raise CommandError(f"the server answered {response.status_code} where its metrics should be")
    print(json.dumps(metrics_document(response.text), indent=2))
    return 0


def metrics_document(text: str) -> dict[str, Any]:
    """Keyed by metric family; the parser drops a counter's `_total`, which is a name people look for."""
    document: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            entry = document.setdefault(sample.name, {"description": family.documentation, "metrics": []})
            entry["metrics"].append({"labels": sample.labels, "value": sample.value})
    return document

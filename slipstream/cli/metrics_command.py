"""`slipstream metrics`: a server's metrics as JSON, as Triton CLI prints them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.keys import read_api_key
from slipstream.cli.server_address import add_address, address_of


def main(arguments: Sequence[str]) -> int:
    parser = Parser("slipstream metrics", description="Print a server's metrics as JSON.")
    add_address(parser, "8002")
    address = address_of(parser.parse(arguments), 8002)
    try:
        key = read_api_key(None)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        response = httpx.get(
            f"http://{address}/metrics", headers=headers, timeout=10.0, trust_env=False
        )
    except httpx.HTTPError as error:
        raise CommandError(
            f"no server answers at {address} ({error}); start one with: slipstream start"
        ) from error
    if not response.is_success:
        raise CommandError(
            f"the server answered {response.status_code} where its metrics should be"
        )
    print(json.dumps(metrics_document(response.text), indent=2))
    return 0


def metrics_document(text: str) -> dict[str, Any]:
    """Keyed by metric family; the parser drops a counter's `_total`, which is a name people look
    for.
    """
    document: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            entry = document.setdefault(
                sample.name, {"description": family.documentation, "metrics": []}
            )
            entry["metrics"].append({"labels": sample.labels, "value": sample.value})
    return document

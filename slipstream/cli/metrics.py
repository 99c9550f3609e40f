"""`slipstream metrics`: print a server's metrics as JSON, as Triton CLI does."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import add_address, server_address
from slipstream.cli.keys import read_api_key

_PORT = 8002


def create_parser() -> Parser:
    parser = Parser("slipstream metrics", "Print a server's metrics as JSON.")
    add_address(parser, str(_PORT))
    return parser


def run(given: Namespace) -> int:
    address = server_address(given, _PORT)
    key = read_api_key(None)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = f"http://{address}/metrics"
    try:
        response = httpx.get(url, headers=headers, timeout=10.0, trust_env=False)
    except httpx.HTTPError as error:
        raise CommandError(
            f"no server answers at {address} ({error}); start one with: slipstream start"
        ) from error
    if not response.is_success:
        raise CommandError(f"the server answered {response.status_code} to GET {url}")
    print(json.dumps(metrics_document(response.text), indent=2))
    return 0


def metrics_document(text: str) -> dict[str, Any]:
    """Return the samples by their full names.

    The names keep a counter's `_total`, which the parser removes from the name of a family.
    """
    document: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            entry = document.setdefault(
                sample.name, {"description": family.documentation, "metrics": []}
            )
            entry["metrics"].append({"labels": sample.labels, "value": sample.value})
    return document

"""`slipstream metrics`: print a server's metrics as JSON, as Triton CLI does."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import httpx

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import add_address, server_address
from slipstream.cli.keys import read_api_key
from slipstream.cli.processes.other_ports import describe_others
from slipstream.client.prometheus import parse_metrics

_PORT = 8002


def create_parser() -> Parser:
    parser = Parser("slipstream metrics", "Print a server's metrics as JSON.")
    add_address(parser, str(_PORT))
    return parser


def run(given: Namespace) -> int:
    address = server_address(given, _PORT)
    key = read_api_key(None)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url_start = address if "://" in address else f"http://{address}"
    url = f"{url_start}/metrics"
    try:
        response = httpx.get(url, headers=headers, timeout=10.0, trust_env=False)
    except httpx.ConnectError as error:
        raise CommandError(
            f"no server answers at {address}; start one with slipstream start"
            f"{describe_others(url_start, 'metrics')}"
        ) from error
    except httpx.HTTPError as error:
        raise CommandError(_other_port(address, str(error))) from error
    if response.status_code == httpx.codes.NOT_FOUND:
        raise CommandError(_other_port(address, "it has no /metrics"))
    if not response.is_success:
        raise CommandError(f"the server answered {response.status_code} to GET {url}")
    try:
        document = metrics_document(response.text)
    except ValueError as error:
        raise CommandError(f"the response of {url} cannot be read: {error}") from error
    print(json.dumps(document, indent=2))
    return 0


def _other_port(address: str, problem: str) -> str:
    return (
        f"{address} is not a metrics port ({problem}); give that of the metrics ({_PORT} by "
        f"default){describe_others(address, 'metrics')}"
    )


def metrics_document(text: str) -> dict[str, Any]:
    """Return the metric families by name, in the form that Triton CLI prints."""
    document: dict[str, Any] = {}
    for sample in parse_metrics(text):
        family = document.setdefault(
            sample.family,
            {
                "name": sample.family,
                "description": sample.help,
                "type": sample.kind,
                "unit": "",
                "metrics": [],
            },
        )
        family["metrics"].append(
            {"name": sample.name, "labels": sample.labels, "value": sample.value}
        )
    return document

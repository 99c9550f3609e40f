"""`slipstream config`: print a served model's configuration as JSON."""

from __future__ import annotations

import json
from argparse import Namespace

from slipstream.cli.arguments import Parser
from slipstream.cli.connections import add_address, add_protocol, connected, read_config


def create_parser() -> Parser:
    parser = Parser("slipstream config", "Print a served model's configuration as JSON.")
    parser.add_argument("-m", "--model", required=True, help="Name of the model.")
    add_protocol(parser, "grpc")
    add_address(parser, "8001, or 8000 with -i http")
    return parser


def run(given: Namespace) -> int:
    with connected(given) as connection:
        print(json.dumps(read_config(connection, given.model), indent=2))
    return 0

"""`genai-perf` and `triton profile`: `slipstream bench` with the log lines of genai-perf."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from slipstream.cli import bench
from slipstream.cli.arguments import Parser
from slipstream.cli.bench_flags import create_parser as create_bench_parser


def create_parser() -> Parser:
    parser = create_bench_parser()
    parser.prog = "genai-perf"
    return parser


def run(given: Namespace) -> int:
    return bench.run(given, announce_file)


def announce_file(kind: str, path: Path) -> None:
    """Print that a report was written, in the form that scripts around genai-perf look for."""
    print(
        f"{time.strftime('%Y-%m-%d %H:%M')} [INFO] "
        f"genai_perf.export_data.{kind}_exporter - Generating {path}"
    )

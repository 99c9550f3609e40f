"""`slipstream prune`: free the disk of what no model and no running process uses."""

from __future__ import annotations

from argparse import Namespace

from slipstream.cli.arguments import Parser, add_verbose
from slipstream.cli.log import log
from slipstream.cli.models.downloads import (
    built_sources,
    remove_unused_downloads,
    unused_downloads,
)
from slipstream.progress import size_text
from slipstream.repository.collection import is_needed
from slipstream.weights.cache.engines import list_engines, remove_engine, remove_remains


def create_parser() -> Parser:
    parser = Parser(
        "slipstream prune",
        "Remove the engines that no repository and no running process uses, what interrupted "
        "builds have left, and downloads without an engine. `slipstream.LLM` builds such an engine "
        "again when it needs it.",
    )
    parser.add_argument(
        "-n",
        "--dry-run",
        action="store_true",
        help="Print what would be removed, and remove nothing.",
    )
    add_verbose(parser)
    return parser


def run(given: Namespace) -> int:
    unneeded = [engine for engine in list_engines() if not is_needed(engine)]
    if given.dry_run:
        left = built_sources(without=[engine.path for engine in unneeded])
        found = [(engine.path, engine.bytes) for engine in unneeded]
        found += unused_downloads(left)
        for path, size in found:
            log("INFO", f"Would remove {path} ({size_text(size)})")
        log("INFO", f"Would free {size_text(sum(size for _, size in found))}")
        return 0
    freed = 0
    for engine in unneeded:
        log("INFO", f"Removing {engine.path} ({size_text(engine.bytes)})")
        freed += remove_engine(engine.path)
    freed += remove_remains()
    for download in remove_unused_downloads():
        log("INFO", f"Removed {download.folder} ({size_text(download.bytes)})")
        freed += download.bytes
    log("INFO", f"Freed {size_text(freed)}")
    return 0

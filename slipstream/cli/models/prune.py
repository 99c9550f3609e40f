"""`slipstream prune`: free the disk of what no model and no running process uses."""

from __future__ import annotations

from argparse import Namespace

from slipstream.cli.arguments import Parser, add_verbose
from slipstream.cli.log import log
from slipstream.cli.models.downloads import remove_unused_downloads
from slipstream.cli.progress import size_text
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
    freed = 0
    for engine in list_engines():
        if is_needed(engine):
            continue
        verb = "Would remove" if given.dry_run else "Removing"
        log("INFO", f"{verb} {engine.path} ({size_text(engine.bytes)})")
        freed += engine.bytes if given.dry_run else remove_engine(engine.path)
    if given.dry_run:
        log("INFO", f"Would free {size_text(freed)}")
        return 0
    freed += remove_remains() + remove_unused_downloads()
    log("INFO", f"Freed {size_text(freed)}")
    return 0

"""`slipstream workspace`: write a folder in which the tutorials' commands work as pasted."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slipstream.cli.arguments import Parser
from slipstream.repository.releases.tables import RELEASES, find_release
from slipstream.repository.workspace import write_workspace


def create_parser() -> Parser:
    parser = Parser(
        "slipstream workspace",
        "Write a folder with the templates and scripts of the repositories that tutorials clone.",
    )
    parser.add_argument(
        "folder", type=Path, help="Folder to write; the tutorials call it tensorrtllm_backend."
    )
    parser.add_argument(
        "--like",
        default="v0.10",
        metavar="RELEASE",
        help=f"Release to take the templates from: {', '.join(RELEASES)}.",
    )
    return parser


def run(given: Namespace) -> int:
    release = find_release(given.like)
    written = write_workspace(given.folder, release)
    for path in written.kept:
        print(
            f"[WARNING] {path} exists and differs: it was kept; delete it to have it written again"
        )
    result = "everything is there already: nothing to do"
    if written.new:
        result = f"{written.new} files written"
    print(f"[INFO] {given.folder} is a workspace like {release}: {result}")
    return 0

"""`slipstream workspace DIR`: a folder in which the tutorials' commands work as pasted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream.cli.arguments import Parser
from slipstream.repository.generations.tables import GENERATIONS, find_generation
from slipstream.repository.workspace import write_workspace


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "slipstream workspace", description="Write a folder like the checkout the tutorials clone."
    )
    parser.add_argument(
        "folder", type=Path, help="Where; tensorrtllm_backend is what the tutorials call it."
    )
    parser.add_argument(
        "--like", default="v0.10", help=f"The release whose templates: {', '.join(GENERATIONS)}."
    )
    given = parser.parse(arguments)
    generation = find_generation(given.like)
    written = write_workspace(given.folder, generation)
    for path in written.kept:
        print(
            f"[WARNING] {path} is there already and differs: left as it is; delete it to have it written anew"
        )
    what = (
        f"{written.new} files written"
        if written.new
        else "everything is there already: nothing to do"
    )
    print(f"[INFO] {given.folder} is a workspace like {generation}: {what}")
    return 0

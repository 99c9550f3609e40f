"""`slipstream list`: print the models. As `triton`, print the repository as Triton CLI does."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser, add_verbose
from slipstream.cli.log import log, program
from slipstream.cli.models.inventory import find_all, table_lines
from slipstream.cli.models.repository_option import add_repository, repository_folder


def create_parser() -> Parser:
    parser = Parser(
        "slipstream list",
        "List the models of the repository, and the other engines of the engine cache: name, "
        "family, size on disk, type of the weights, age, whether a running process serves it, and "
        "source. As `triton`, print the repository as a tree of files.",
    )
    add_repository(parser)
    parser.add_argument(
        "--tree", action="store_true", help="Print the repository as a tree of files."
    )
    add_verbose(parser)
    return parser


def run(given: Namespace) -> int:
    repository = repository_folder(given.repo)
    if program() == "triton" or given.tree:
        if not repository.is_dir() and program() != "triton":
            raise CommandError(f"No model repository exists at {repository}")
        log_repository(repository)
        return 0
    models, others = find_all(repository)
    lines = [f"Models in {repository}:", *(table_lines(models) if models else ["none"])]
    if others:
        lines += ["", "Engines in the cache that none of them uses:", *table_lines(others)]
    print("\n".join(lines), flush=True)
    return 0


def log_repository(repository: Path) -> None:
    """Print the tree of a repository. Triton CLI shows a missing one as an empty one."""
    log("INFO", f"Current repo at {repository}:")
    print(tree_text(repository), flush=True)


def tree_text(folder: Path) -> str:
    """Return the tree of a folder's files, without hidden ones."""
    return "\n".join([f"{folder.resolve().name}/", *_tree_lines(folder, "")]) + "\n"


def _tree_lines(folder: Path, indent: str) -> Iterator[str]:
    found = folder.iterdir() if folder.is_dir() else ()
    visible = [entry for entry in found if not entry.name.startswith(".")]
    entries = sorted(visible, key=lambda entry: entry.name)
    for entry in entries:
        last = entry is entries[-1]
        branch = "└── " if last else "├── "
        yield f"{indent}{branch}{entry.name}{'/' if entry.is_dir() else ''}"
        # a linked folder is not entered: the link may lead back to this tree
        if entry.is_dir() and not entry.is_symlink():
            yield from _tree_lines(entry, indent + ("    " if last else "│   "))

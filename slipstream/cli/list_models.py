"""`slipstream list`: print the model repository as a tree, as Triton CLI does."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser, add_verbose
from slipstream.cli.log import log, program
from slipstream.weights.home import expand_home

DEFAULT_REPOSITORY = Path("~/models")
REPOSITORY_OPTIONS = ("--repo", "--model-repository", "--model-store")


def create_parser() -> Parser:
    parser = Parser("slipstream list", "List the models in the repository as a tree of files.")
    add_repository(parser)
    add_verbose(parser)
    return parser


def run(given: Namespace) -> int:
    repository = repository_folder(given.repo)
    if not repository.is_dir() and program() != "triton":
        raise CommandError(f"No model repository exists at {repository}")
    log_repository(repository)
    return 0


def add_repository(parser: Parser) -> None:
    parser.add_argument(
        *REPOSITORY_OPTIONS,
        type=Path,
        default=DEFAULT_REPOSITORY,
        metavar="FOLDER",
        help="Folder that holds the models.",
    )


def repository_folder(repository: Path) -> Path:
    """Return the folder of --repo with `~` expanded."""
    return expand_home(repository, "--repo")


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

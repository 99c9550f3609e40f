"""`slipstream list`: the model repository as a tree. The tree is Triton CLI's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.log import VerboseOption, fail, log
from slipstream.weights.home import expanded

RepositoryOption = Annotated[
    Path,
    typer.Option(
        "--repo", "--model-repository", "--model-store", help="The folder that holds the models."
    ),
]
DEFAULT_REPOSITORY = Path("~/models")


def list_models(
    repo: RepositoryOption = DEFAULT_REPOSITORY, verbose: VerboseOption = False
) -> None:
    """Show the models of a repository."""
    repo = repository_folder(repo)
    if not repo.is_dir():
        fail(f"No model repository exists at {repo}")
    log_repository(repo)


def repository_folder(repo: Path) -> Path:
    """Where --repo is, from its `~` on."""
    try:
        return expanded(repo, "--repo")
    except ValueError as error:
        fail(str(error))


def log_repository(repo: Path) -> None:
    log("INFO", f"Current repo at {repo}:")
    print(tree_text(repo), flush=True)


def tree_text(folder: Path) -> str:
    return "\n".join([f"{folder.resolve().name}/", *_tree_lines(folder, "")]) + "\n"


def _tree_lines(folder: Path, indent: str) -> Iterator[str]:
    entries = sorted(
        (entry for entry in folder.iterdir() if not entry.name.startswith(".")),
        key=lambda e: e.name,
    )
    for entry in entries:
        last = entry is entries[-1]
        # a linked folder is shown, not followed: it may lead round in a circle
        inside = entry.is_dir() and not entry.is_symlink()
        yield f"{indent}{'└── ' if last else '├── '}{entry.name}{'/' if entry.is_dir() else ''}"
        if inside:
            yield from _tree_lines(entry, indent + ("    " if last else "│   "))

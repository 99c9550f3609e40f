"""`slipstream list`: the model repository as a tree. The tree and the log lines are Triton CLI's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer

RepositoryOption = Annotated[
    Path, typer.Option("--repo", "--model-repository", "--model-store", help="The folder that holds the models.")
]
DEFAULT_REPOSITORY = Path("~/models")


def list_models(repo: RepositoryOption = DEFAULT_REPOSITORY) -> None:
    """Show the models of a repository."""
    repo = repo.expanduser()
    if not repo.is_dir():
        fail(f"No model repository exists at {repo}")
    log_repository(repo)


def log(level: str, message: str) -> None:
    """A line such as `triton - INFO - message`, which scripts around Triton CLI look for."""
    stream = sys.stderr if level == "ERROR" else sys.stdout
    print(f"triton - {level} - {' '.join(message.split())}", file=stream, flush=True)


def fail(message: str) -> NoReturn:
    """One line, and exit code 1."""
    log("ERROR", message)
    raise typer.Exit(1)


def log_repository(repo: Path) -> None:
    log("INFO", f"Current repo at {repo}:")
    print(tree_text(repo), flush=True)


def tree_text(folder: Path) -> str:
    return "\n".join([f"{folder.resolve().name}/", *_tree_lines(folder, "")]) + "\n"


def _tree_lines(folder: Path, indent: str) -> Iterator[str]:
    entries = sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda e: e.name)
    for entry in entries:
        last = entry is entries[-1]
        # a linked folder is shown, not followed: it may lead round in a circle
        inside = entry.is_dir() and not entry.is_symlink()
        yield f"{indent}{'└── ' if last else '├── '}{entry.name}{'/' if entry.is_dir() else ''}"
        if inside:
            yield from _tree_lines(entry, indent + ("    " if last else "│   "))

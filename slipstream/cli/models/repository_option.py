"""The option `--repo` of the commands that work on a repository."""

from __future__ import annotations

from pathlib import Path

from slipstream.cli.arguments import Parser
from slipstream.repository.used_repositories import DEFAULT_REPOSITORY
from slipstream.weights.home import expand_home

REPOSITORY_OPTIONS = ("--repo", "--model-repository", "--model-store")


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

"""`slipstream remove`: take a model, or all of them, out of the repository. Engines stay where they
are.
"""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from slipstream.cli.list_models import (
    DEFAULT_REPOSITORY,
    RepositoryOption,
    log_repository,
    repository_folder,
)
from slipstream.cli.log import VerboseOption, fail, log

_HELPERS = {"preprocessing", "postprocessing", "tensorrt_llm", "ensemble"}


def remove_model(
    model: Annotated[str, typer.Option("-m", "--model", help="The model's name, or all.")],
    repo: RepositoryOption = DEFAULT_REPOSITORY,
    verbose: VerboseOption = False,
) -> None:
    """Remove a model from a repository."""
    repo = repository_folder(repo)
    # only what is a model, and stands in the repository under its own name: the rest may be
    # somebody's home
    models = sorted(path.parent for path in repo.glob("*/config.pbtxt"))
    folders = models if model == "all" else [folder for folder in models if folder.name == model]
    if folders and {folder.name for folder in models} - {model} <= _HELPERS:
        folders = models  # the last model takes along what was imported to serve it
    if not folders and model != "all":
        fail(f"No model folder exists at {repo / model}")
    for folder in folders:
        log("INFO", f"Removing model {folder.name} at {folder}")
        try:
            folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
        except OSError as error:
            fail(f"{folder}: cannot be removed: {error.strerror}")
    if repo.is_dir():
        log_repository(repo)

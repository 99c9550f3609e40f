"""`slipstream remove`: remove one model or all models from the repository. Engines are kept."""

from __future__ import annotations

import shutil
from argparse import Namespace

from slipstream.cli.arguments import CommandError, Parser, add_verbose
from slipstream.cli.list_models import add_repository, log_repository, repository_folder
from slipstream.cli.log import log

_HELPERS = {"preprocessing", "postprocessing", "tensorrt_llm", "ensemble"}


def create_parser() -> Parser:
    parser = Parser(
        "slipstream remove",
        "Remove a model from the repository. Its engine stays in the engine folder.",
    )
    parser.add_argument(
        "-m", "--model", required=True, help="Name of the model, or 'all' for every model."
    )
    add_repository(parser)
    add_verbose(parser)
    return parser


def run(given: Namespace) -> int:
    repository = repository_folder(given.repo)
    # Only folders with a config.pbtxt are removed: --repo may name a folder with other files.
    models = sorted(path.parent for path in repository.glob("*/config.pbtxt"))
    folders = models
    if given.model != "all":
        folders = [folder for folder in models if folder.name == given.model]
        if not folders:
            raise CommandError(f"No model folder exists at {repository / given.model}")
    if {folder.name for folder in models} - {given.model} <= _HELPERS:
        folders = models  # removing the last model also removes its helper models
    for folder in folders:
        log("INFO", f"Removing model {folder.name} at {folder}")
        try:
            folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
        except OSError as error:
            raise CommandError(f"{folder}: cannot be removed: {error.strerror}") from error
    if repository.is_dir():
        log_repository(repository)
    return 0

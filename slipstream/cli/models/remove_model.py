"""`slipstream remove`: remove one model or all models, and the engines that nothing else uses."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser, add_verbose
from slipstream.cli.log import log, program
from slipstream.cli.models.downloads import remove_unused_downloads
from slipstream.cli.models.inventory import FoundModel, add_model_name, find_one, given_name
from slipstream.cli.models.list_models import log_repository
from slipstream.cli.models.repository_option import add_repository, repository_folder
from slipstream.progress import size_text
from slipstream.repository.collection import UserModel, list_models, remove_model, users_of
from slipstream.repository.config import CONFIG_NAME
from slipstream.repository.templates import helpers_among
from slipstream.repository.used_repositories import remember_repository, served_repositories
from slipstream.weights.cache.engines import describe_engine, is_cached, remove_engine
from slipstream.weights.cache.locks import locked


def create_parser() -> Parser:
    parser = Parser(
        "slipstream remove",
        "Remove a model and the models it consists of. Its engine and its download are removed, "
        "too, if no other model and no running process uses them. Other models are not changed.",
    )
    add_model_name(
        parser, "Name of the model, as `slipstream list` prints it, or 'all' for every model."
    )
    add_repository(parser)
    add_verbose(parser)
    return parser


def run(given: Namespace) -> int:
    repository = repository_folder(given.repo)
    name = given_name(given)
    freed = 0
    if repository.is_dir():
        remember_repository(repository)  # its other models may use the same engine
    with locked(f"repository {repository.absolute()}"):
        engines = _remove_models(repository, name)
        for engine in dict.fromkeys(engines):
            freed += _free_engine(engine)
    freed += sum(download.bytes for download in remove_unused_downloads())
    log("INFO", f"Freed {size_text(freed)}")
    if repository.is_dir() and program() == "triton":
        log_repository(repository)
    return 0


def _remove_models(repository: Path, name: str) -> list[Path]:
    """Remove the models of this name and return their engines."""
    models = list_models(repository)
    if name == "all":
        # Only folders with a config.pbtxt are removed: --repo may name a folder with other files.
        folders = sorted(path.parent for path in repository.glob(f"*/{CONFIG_NAME}"))
        _delete(folders)
        return _engines(models.values())
    if name in models:
        _log_removed(remove_model(repository, models[name]))
        return _engines([models[name]])
    # a part of a model, or one whose configuration cannot be read
    folders = [path.parent for path in repository.glob(f"*/{CONFIG_NAME}")]
    named = [folder for folder in folders if folder.name == name]
    if named:
        _delete(named)
        return []
    return _remove_cached(repository, name)


def _remove_cached(repository: Path, name: str) -> list[Path]:
    """Remove a model that is not in the repository, but has an engine in the cache."""
    try:
        found = find_one(repository, name)
    except CommandError as error:
        if program() == "triton":  # scripts look for this text
            text = f"No model folder exists at {repository / name}: {error}"
            raise CommandError(text) from error
        raise
    assert found.engine is not None, "only engines are found outside the repository"
    _remove_served(found)
    return [found.engine.path]


def _remove_served(found: FoundModel) -> None:
    """Remove the repository that `slipstream start MODEL` has written."""
    if found.model is not None:
        folder = found.model.folder.parent
        assert folder.parent == served_repositories(), f"{folder} is not one of start's"
        if found.served:
            raise CommandError(f"{found.name} is served by a running server: stop it first")
        _delete([folder])


def _engines(models: Iterable[UserModel]) -> list[Path]:
    return [model.engine for model in models if model.engine is not None]


def _delete(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
        except OSError as error:
            raise CommandError(f"{folder}: cannot be removed: {error.strerror}") from error
    _log_removed(folders)


def _log_removed(folders: list[Path]) -> None:
    for folder in folders:
        log("INFO", f"Removing model {folder.name} at {folder}")


def _free_engine(engine: Path) -> int:
    """Remove an engine unless something uses it. Returns the bytes that it took."""
    if not is_cached(engine):
        return 0
    users = users_of(engine)
    if users:
        folders = [user.parent for user in users]
        helpers = helpers_among([folder.name for folder in folders])
        named = next((folder for folder in folders if folder.name not in helpers), folders[0])
        log("INFO", f"Its engine stays: {named} uses it, too")
        return 0
    if describe_engine(engine).in_use:
        log(
            "INFO",
            "Its engine stays while a running process uses it; free it later with: "
            f"{program()} prune",
        )
        return 0
    return remove_engine(engine)

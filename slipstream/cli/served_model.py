"""The model that `slipstream start MODEL` names: an engine and a repository for it alone, in
Slipstream's own folder.

Run as a program it makes them, or finds that nothing is to be done. That is a process apart,
because building an engine needs torch, which the server never loads.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from slipstream.cli.import_model import engine_folder_of
from slipstream.cli.log import fail, log
from slipstream.cli.progress import ProgressLines
from slipstream.repository.config import CONFIG_NAME
from slipstream.repository.templates import FIXED_NAMES, write_repository
from slipstream.server.engine_link.child import child_environment
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import EngineFolderError, read_engine_config
from slipstream.weights.home import expanded, slipstream_home
from slipstream.weights.whole_folder import whole_folder

_UNFIT_FOR_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class NamedModel:
    name: str  # to serve it under
    source: str
    engine: Path
    repository: Path


def find_named_model(text: str) -> NamedModel:
    """Two models of one name, from two places, are two: each has folders of its own, and one more
    repository for every place of its engine, which the repository points to.
    """
    path = _path_of(text)
    if path.exists():
        path = path.resolve()
        name, source = path.name if path.is_dir() else path.stem, str(path)
    else:
        name, source = text.removeprefix("hf:").rpartition("/")[2], text
    name = _UNFIT_FOR_A_NAME.sub("-", name).lstrip(".-") or "model"
    if name in (*FIXED_NAMES, "all"):
        name += "-model"
    engine = path if is_engine(path) else engine_folder_of(_key(name, source)).absolute()
    return NamedModel(
        name, source, engine, slipstream_home() / "repositories" / _key(name, str(engine))
    )


def _path_of(text: str) -> Path:
    """What it names if it names something here. ValueError where no path could be meant."""
    given = text.removeprefix("local:")
    if not given:
        raise ValueError(
            f"{text!r} names no model; give a known name, a folder, a GGUF file, or org/name at the hub"
        )
    return expanded(given)


def _key(name: str, place: str) -> str:
    """No name that `slipstream import` takes has an @ in it: its engines, which other repositories
    serve, are safe.
    """
    return f"{name}@{hashlib.sha256(os.fsencode(place)).hexdigest()[:8]}"


def is_engine(path: Path) -> bool:
    try:
        return read_engine_config(path).path == path
    except EngineFolderError:
        return False


def repository_of(text: str) -> Path:
    """Where the model is served from, once it is there. Otherwise why not has been said, and this
    exits.
    """
    try:
        given = _path_of(text)
        if any(given.glob(f"*/{CONFIG_NAME}")):
            return given  # a repository that was named as if it were a model
        if (given / CONFIG_NAME).is_file():
            parent = shlex.quote(str(given.resolve().parent))
            fail(
                f"{text} is one model of a repository; serve the repository in its place: --repo {parent}"
            )
    except (ValueError, OSError) as error:
        fail(str(error))
    code = subprocess.call(
        [sys.executable, "-P", "-m", "slipstream.cli.served_model", text], env=child_environment()
    )
    if code != 0:
        raise typer.Exit(code)
    return find_named_model(text).repository


def make(model: NamedModel) -> None:
    if str(model.engine) != model.source:
        with ProgressLines(lambda text: log("INFO", text)) as display:
            build_engine(model.source, model.engine, dtype="auto", progress=display.update)
    # otherwise its files may have been changed, and stay
    if not (model.repository / model.name).exists():
        _write_repository(model)
    log("INFO", f"{model.name} is served from {model.repository}")


def _write_repository(model: NamedModel) -> None:
    """All of it at once: half of one would be taken for one that somebody has changed."""
    if model.repository.exists():
        if any(model.repository.iterdir()):
            raise ValueError(
                f"{model.repository} has no {model.name} in it; remove the folder, and it is made anew"
            )
        model.repository.rmdir()  # what `slipstream remove` leaves
    limits = read_engine_config(model.engine).build
    try:
        with whole_folder(model.repository, model.name) as staging:
            write_repository(staging, model.name, model.engine, model.engine, limits.max_batch_size)
    except IsADirectoryError:
        log("INFO", f"{model.repository} was written by another process meanwhile")


def main(text: str) -> None:
    try:
        make(find_named_model(text))
    except (ValueError, OSError) as error:  # what weights/ refuses is a ValueError
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; nothing was left behind")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except typer.Exit as end:
        sys.exit(end.exit_code)

"""The model that `slipstream start MODEL` names: an engine and a repository for it alone, in Slipstream's own folder.

Run as a program it makes them, or finds that nothing is to be done. That is a process apart, because building an
engine needs torch, which the server never loads.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from slipstream.cli.import_model import engine_folder_of
from slipstream.cli.log import fail, log
from slipstream.cli.progress import ProgressLines
from slipstream.repository.templates import FIXED_NAMES, write_repository
from slipstream.server.engine_child import child_environment
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import EngineFolderError, read_engine_config
from slipstream.weights.home import slipstream_home
from slipstream.weights.known_models import KNOWN_MODELS

_UNFIT_FOR_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class NamedModel:
    name: str  # to serve it under
    source: str
    engine: Path
    repository: Path


def find_named_model(text: str) -> NamedModel:
    """Two models of one name, from two places, are two: each has folders of its own."""
    path = Path(text.removeprefix("local:")).expanduser()
    if path.exists():
        path = path.resolve()
        name, source = path.name if path.is_dir() else path.stem, str(path)
    else:
        name, source = text.removeprefix("hf:").rpartition("/")[2], text
    name = _UNFIT_FOR_A_NAME.sub("-", name).lstrip(".-") or "model"
    if name in (*FIXED_NAMES, "all"):
        name += "-model"
    key = name if source in KNOWN_MODELS else f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    engine = path if is_engine(path) else engine_folder_of(key)
    return NamedModel(name, source, engine, slipstream_home() / "repositories" / key)


def is_engine(path: Path) -> bool:
    try:
        return read_engine_config(path).path == path
    except EngineFolderError:
        return False


def repository_of(text: str) -> Path:
    """Where the model is served from, once it is there. Otherwise why not has been said, and this exits."""
    given = Path(text).expanduser()
    if any(given.glob("*/config.pbtxt")):
        return given  # a repository that was named as if it were a model
    code = subprocess.call([sys.executable, "-P", "-m", "slipstream.cli.served_model", text], env=child_environment())
    if code != 0:
        raise typer.Exit(code)
    return find_named_model(text).repository


def make(model: NamedModel) -> None:
    if str(model.engine) != model.source:
        with ProgressLines(lambda text: log("INFO", text)) as display:
            build_engine(model.source, model.engine, dtype="auto", progress=display.update)
    if not (model.repository / model.name).exists():  # otherwise its files may have been changed, and stay
        limits = read_engine_config(model.engine).build
        write_repository(model.repository, model.name, model.engine, model.engine, limits.max_batch_size)
    log("INFO", f"{model.name} is served from {model.repository}")


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

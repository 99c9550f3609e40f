"""The model of `slipstream start MODEL`: an engine and a repository for this model only, in
Slipstream's own folder.

Run as a program, this module builds what is missing. It is a separate process because building an
engine needs torch, which the server never loads.
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

from slipstream.cli.arguments import CommandError
from slipstream.cli.import_model import engine_folder
from slipstream.cli.log import log
from slipstream.cli.progress import ProgressLines
from slipstream.repository.config import CONFIG_NAME
from slipstream.repository.templates import FIXED_NAMES, write_repository
from slipstream.server.engine_link.child import child_environment
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import EngineFolderError, read_engine_config
from slipstream.weights.home import expand_home, slipstream_home
from slipstream.weights.whole_folder import whole_folder

_UNFIT_FOR_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ModelToServe:
    name: str  # the name under which it is served
    source: str
    engine: Path
    repository: Path
    weight_only: str | None = None  # int8, int4 or fp8


def find_model_to_serve(text: str, weight_only: str | None = None) -> ModelToServe:
    """Return the name and the folders of the model that a command line names.

    Models of the same name from different places have different folders. A repository belongs to
    one engine folder, because it points to it.
    """
    path = _existing_path(text)
    if path.exists():
        path = path.resolve()
        name = path.name if path.is_dir() else path.stem
        source = str(path)
    else:
        name = text.removeprefix("hf:").rpartition("/")[2]
        source = text
    name = _UNFIT_FOR_A_NAME.sub("-", name).lstrip(".-") or "model"
    if name in (*FIXED_NAMES, "all"):
        name += "-model"
    if not is_engine(path):
        quantised = name if weight_only is None else f"{name}-{weight_only}"
        engine = engine_folder(_key(quantised, source)).absolute()
    elif weight_only is None:
        engine = path
    else:
        raise CommandError(
            f"--weight-only {weight_only}: {text} is a built engine, whose weights cannot be "
            "quantised; give the model that it was built from"
        )
    repository = slipstream_home() / "repositories" / _key(name, str(engine))
    return ModelToServe(name, source, engine, repository, weight_only)


def _existing_path(text: str) -> Path:
    """Return the path that the text names if it is a path. Raises ValueError for an empty one."""
    given = text.removeprefix("local:")
    if not given:
        raise ValueError(
            f"{text!r} names no model; "
            "give a known name, a folder, a GGUF file, or org/name at the hub"
        )
    return expand_home(given)


def _key(name: str, place: str) -> str:
    """Return a folder name that cannot be one of `slipstream import`, which refuses '@'."""
    return f"{name}@{hashlib.sha256(os.fsencode(place)).hexdigest()[:8]}"


def is_engine(path: Path) -> bool:
    try:
        return read_engine_config(path).path == path
    except EngineFolderError:
        return False


def prepare_repository(text: str, weight_only: str | None = None) -> Path:
    """Build what is missing for a model and return the repository that serves it."""
    given = _existing_path(text)
    if any(given.glob(f"*/{CONFIG_NAME}")):  # a repository, which may be named like a model
        if weight_only is not None:
            raise CommandError(
                f"--weight-only {weight_only}: {text} is a repository, whose engines are already "
                "built; give the model that they were built from"
            )
        return given
    if (given / CONFIG_NAME).is_file():
        parent = shlex.quote(str(given.resolve().parent))
        raise CommandError(
            f"{text} is one model of a repository; "
            f"serve the repository in its place: --repo {parent}"
        )
    model = find_model_to_serve(text, weight_only)
    command = [sys.executable, "-P", "-m", "slipstream.cli.served_model", text]
    if weight_only is not None:
        command.append(weight_only)
    code = subprocess.call(command, env=child_environment())
    if code != 0:
        raise SystemExit(code)  # the process has reported the reason
    return model.repository


def make(model: ModelToServe) -> None:
    """Build the engine and write the repository of a model, unless they exist."""
    if str(model.engine) != model.source:
        with ProgressLines(lambda text: log("INFO", text)) as display:
            build_engine(
                model.source,
                model.engine,
                dtype="auto",
                weight_only=model.weight_only,
                progress=display.update,
            )
    # an existing repository is kept: its files may have been edited
    if not (model.repository / model.name).exists():
        _write_repository(model)
    log("INFO", f"{model.name} is served from {model.repository}")


def _write_repository(model: ModelToServe) -> None:
    """Write the whole repository at once: a partial one would be kept as an edited one."""
    if model.repository.exists():
        if any(model.repository.iterdir()):
            raise ValueError(
                f"{model.repository} has no {model.name} in it; "
                "remove the folder, and it is written again"
            )
        model.repository.rmdir()  # `slipstream remove` leaves an empty folder
    limits = read_engine_config(model.engine).build
    try:
        with whole_folder(model.repository, model.name) as staging:
            write_repository(staging, model.name, model.engine, model.engine, limits.max_batch_size)
    except IsADirectoryError:
        log("INFO", f"{model.repository} was written by another process meanwhile")


def main(text: str, weight_only: str | None = None) -> int:
    """Make the model that `text` names. Returns the exit code."""
    try:
        make(find_model_to_serve(text, weight_only))
    except (ValueError, OSError) as error:  # weights/ reports bad input with ValueError
        log("ERROR", str(error))
        return 1
    except KeyboardInterrupt:
        log("ERROR", "interrupted; nothing was left behind")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

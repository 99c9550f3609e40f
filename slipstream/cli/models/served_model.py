"""The model of `slipstream start MODEL`: an engine of the cache, and a repository for this model
only, in Slipstream's own folder.

Run as a program, this module builds what is missing. It is a separate process because building an
engine needs torch, which the server never loads.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from slipstream.cli.arguments import CommandError
from slipstream.cli.interrupts import INTERRUPTED, end_with_the_command, run_part
from slipstream.cli.log import log
from slipstream.cli.models.import_model import build_cached
from slipstream.repository.collection import list_models, point_to_engine, remove_former_engines
from slipstream.repository.config import CONFIG_NAME
from slipstream.repository.templates import FIXED_NAMES, write_repository
from slipstream.repository.used_repositories import DEFAULT_REPOSITORY, served_repositories
from slipstream.server.engine_link.child import child_environment
from slipstream.weights.cache.engines import engines_folder
from slipstream.weights.cache.locks import locked
from slipstream.weights.engine_config import EngineConfig, EngineFolderError, read_engine_config
from slipstream.weights.home import expand_home
from slipstream.weights.whole_folder import whole_folder

_UNFIT_FOR_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ModelToServe:
    name: str  # the name under which it is served
    source: str
    repository: Path
    weight_only: str | None = None  # int8, int4 or fp8
    engine: Path | None = None  # None: the one of the cache, which may have to be built


def find_model_to_serve(text: str, weight_only: str | None = None) -> ModelToServe:
    """Return the name and the repository of the model that a command line names.

    That is a path, a model of the default repository, a known name or a model of the hub, in this
    order. Models of the same name from different places have different repositories.
    """
    path = _existing_path(text)
    engine = None
    if path.exists():
        path = path.resolve()
        engine = path if is_engine(path) else None
        name = path.name if path.is_dir() else path.stem
        source = place = str(path)
    else:
        name = text.removeprefix("hf:").rpartition("/")[2]
        source = place = text
        if (imported := _imported_engine(text)) is not None:
            place = str(DEFAULT_REPOSITORY.expanduser() / text)
            engine = imported.path if weight_only is None else None
            source = imported.source or text
    name = _UNFIT_FOR_A_NAME.sub("-", name).lstrip(".-") or "model"
    if name in (*FIXED_NAMES, "all"):
        name += "-model"
    if engine is not None and weight_only is not None:
        raise CommandError(
            f"--weight-only {weight_only}: {text} is a built engine, whose weights cannot be "
            "quantised; give the model that it was built from"
        )
    if engine is None:
        place = f"{engines_folder()}\n{place}"
    quantised = name if weight_only is None else f"{name}-{weight_only}"
    repository = served_repositories() / _key(quantised, place)
    return ModelToServe(name, source, repository, weight_only, engine)


def _imported_engine(name: str) -> EngineConfig | None:
    """Return the engine of a model of the default repository."""
    repository = DEFAULT_REPOSITORY.expanduser()
    if not (repository / name / CONFIG_NAME).is_file():
        return None
    model = list_models(repository).get(name)
    return None if model is None or model.engine is None else read_engine_config(model.engine)


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
    """Return a folder name for a model of this name from this place."""
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
    command = [sys.executable, "-P", "-m", "slipstream.cli.models.served_model", text]
    if weight_only is not None:
        command.append(weight_only)
    code = run_part(command, child_environment())
    if code != 0:
        raise SystemExit(code)  # the process has reported the reason
    return model.repository


def make(model: ModelToServe) -> None:
    """Build the engine of a model and write its repository, unless they exist."""
    engine = model.engine
    if engine is None:
        engine = build_cached(model.source, weight_only=model.weight_only)
    with locked(f"repository {model.repository}"):
        _write_repository(model, engine)
    remove_former_engines(engine)
    log("INFO", f"{model.name} is served from {model.repository}")


def _write_repository(model: ModelToServe, engine: Path) -> None:
    """Write the whole repository at once, or point the one that exists to this engine.

    An existing repository is kept: its files may have been edited.
    """
    existing = list_models(model.repository).get(model.name)
    if existing is not None:
        if existing.engine is not None and existing.engine != engine:
            point_to_engine(existing, engine)
        return
    if model.repository.exists():
        if any(model.repository.iterdir()):
            raise ValueError(
                f"{model.repository} has no {model.name} in it; "
                "remove the folder, and it is written again"
            )
        model.repository.rmdir()
    limits = read_engine_config(engine).build
    with whole_folder(model.repository, model.name) as staging:
        write_repository(staging, model.name, engine, engine, limits.max_batch_size)


def main(text: str, weight_only: str | None = None) -> int:
    """Make the model that `text` names. Returns the exit code."""
    end_with_the_command()
    try:
        make(find_model_to_serve(text, weight_only))
    except (ValueError, OSError) as error:  # weights/ reports bad input with ValueError
        log("ERROR", str(error))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED  # the command says so
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

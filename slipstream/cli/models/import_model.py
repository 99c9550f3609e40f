"""`slipstream import`: fetch a model, build its engine and write the repository that serves it."""

from __future__ import annotations

import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser, UsageError, add_verbose
from slipstream.cli.engine_flags import WEIGHT_ONLY, add_weight_only
from slipstream.cli.interrupts import INTERRUPTED, end_with_the_command
from slipstream.cli.log import log, program
from slipstream.cli.models.list_models import log_repository
from slipstream.cli.models.repository_option import add_repository, repository_folder
from slipstream.cli.progress import ProgressLines
from slipstream.progress import size_text
from slipstream.repository.collection import (
    UserModel,
    list_models,
    point_to_engine,
    remove_former_engines,
    set_engine_parameter,
)
from slipstream.repository.templates import (
    FIXED_NAMES,
    RepositoryExists,
    check_free,
    write_repository,
)
from slipstream.repository.used_repositories import DEFAULT_REPOSITORY, remember_repository
from slipstream.weights.cache.engines import cached_engine, describe_engine, type_name
from slipstream.weights.cache.locks import locked
from slipstream.weights.engine_config import EngineFolderError, read_engine_config
from slipstream.weights.home import expand_home
from slipstream.weights.sources.known_models import KNOWN_MODELS
from slipstream.weights.sources.source import SourceError

BACKEND = "tensorrtllm"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_UNFIT_FOR_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def create_parser() -> Parser:
    parser = Parser(
        "slipstream import",
        "Add a model to the repository, or replace the one of this name: fetch it, take its engine "
        "from the cache or build it, write its configuration. Other models are not changed.",
    )
    parser.add_argument(
        "-m",
        "--model",
        required=True,
        help=f"Name of a known model ({', '.join(KNOWN_MODELS)}), a folder, a GGUF file or "
        "ORG/NAME on the hub, after which the model is named; or a new name with --source.",
    )
    parser.add_argument(
        "-s",
        "--source",
        help="Model to import: hf:ORG/NAME, local:PATH, a Hugging Face folder or a GGUF file.",
    )
    add_repository(parser)
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="Data type of the weights; auto: as the source stores them in 16 bits or in GGUF "
        "blocks, else bfloat16.",
    )
    add_weight_only(parser)
    parser.add_argument(
        "--use_weight_only",
        action="store_true",
        help="Quantise the linear layers, as TensorRT-LLM's scripts do.",
    )
    parser.add_argument(
        "--weight_only_precision",
        default="int8",
        choices=WEIGHT_ONLY,
        help="Data type of the linear layers with --use_weight_only.",
    )
    parser.add_argument(
        "--lora-dir",
        type=Path,
        metavar="FOLDER",
        help="Folder whose sub-folders are LoRA adapters of this model, which requests can name "
        "(default: as it is, none for a new model).",
    )
    parser.add_argument("--backend", default=BACKEND, help=f"Only {BACKEND} is supported.")
    add_verbose(parser)
    return parser


def run(given: Namespace) -> int:
    if given.backend != BACKEND:
        raise CommandError(f"backend {given.backend!r} is not supported; use {BACKEND}")
    repository = repository_folder(given.repo)
    weight_only = given.weight_only
    if given.use_weight_only:
        if weight_only is not None:
            raise UsageError("--weight-only and --use_weight_only exclude each other: give one")
        weight_only = given.weight_only_precision
    try:
        import_model(
            given.model,
            given.source,
            repository,
            given.dtype,
            weight_only,
            _adapter_folder(given.lora_dir),
        )
    except RepositoryExists as error:
        raise CommandError(str(error)) from error
    log("INFO", f"Serve it with: {program()} start{_repository_option(repository)}")
    return 0


def import_model(
    model: str,
    source: str | None,
    repository: Path,
    dtype: str = "auto",
    weight_only: str | None = None,
    adapters: Path | None = None,
) -> Path:
    """Add a model to a repository, or replace the one of its name. Returns the engine's folder.

    adapters: folder of its LoRA adapters; None: as it is
    """
    source, name = _source_and_name(model, source)
    if name not in list_models(repository):
        check_free(repository, name)  # `_put_in_place` would refuse too, but after the build
    engine = build_cached(source, dtype, weight_only)
    remember_repository(repository)
    with locked(f"repository {repository.absolute()}", _log_wait):
        changed = _put_in_place(repository, name, engine)
        if adapters is not None:
            added = list_models(repository)[name]
            changed |= set_engine_parameter(added, "lora_prefetch_dir", str(adapters))
        if not changed:
            log("INFO", f"{name} is up to date in {repository}: there is nothing to do")
    remove_former_engines(engine)
    if program() == "triton":
        log_repository(repository)
    return engine


def build_cached(source: str, dtype: str = "auto", weight_only: str | None = None) -> Path:
    """Return the engine of a source from the cache. Says whether it is built or found."""
    with ProgressLines(lambda text: log("INFO", text)) as display:
        engine = cached_engine(source, dtype, weight_only, display.update, _log_wait)
    if not display.built:
        log("INFO", f"Found existing engine at {engine}, skipping build.")
    return engine


def _log_wait() -> None:
    log("INFO", "Waiting for another command that works on the same model")


def _adapter_folder(folder: Path | None) -> Path | None:
    if folder is None:
        return None
    folder = expand_home(folder, "--lora-dir").absolute()
    if not folder.is_dir():
        raise CommandError(f"--lora-dir {folder}: no such folder")
    return folder


def _put_in_place(repository: Path, name: str, engine: Path) -> bool:
    """Write the models of a name, or let those that exist use this engine.

    Returns whether anything has changed.
    """
    existing = list_models(repository).get(name)
    if existing is None:
        limits = read_engine_config(engine).build
        write_repository(repository, name, engine, engine, limits.max_batch_size)
        log("INFO", f"Added {name} ({_describe(engine)}) to {repository}")
    elif existing.engine != engine:
        _replace(existing, engine)
    else:
        return False
    return True


def _replace(existing: UserModel, engine: Path) -> None:
    if existing.engine is None:
        raise RepositoryExists(
            f"Found existing model at {existing.folder}, skipping repo add: it has no engine to "
            f"replace. Remove it first (slipstream remove {existing.name}), or choose "
            "another name or --repo."
        )
    former = _describe(existing.engine)
    point_to_engine(existing, engine)
    log("INFO", f"Replaced {existing.name}: was {former}; is {_describe(engine)}")


def _describe(engine: Path) -> str:
    try:
        found = describe_engine(engine)
    except EngineFolderError:
        return f"{engine}, which cannot be read"
    return f"{type_name(found.config)} from {found.config.source}, {size_text(found.bytes)}"


def _repository_option(repository: Path) -> str:
    if repository == DEFAULT_REPOSITORY.expanduser():
        return ""
    return f" --repo {shlex.quote(str(repository))}"


def _source_and_name(model: str, source: str | None) -> tuple[str, str]:
    """Return the source and the name of a model. The name of a hub id is its last part, that of a
    path the name of the folder or of the GGUF file.
    """
    if source is None and _is_path(model):
        source = model
        path = expand_home(model.removeprefix("local:")).resolve()
        model = _fit_name(path.stem if path.is_file() else path.name)
    elif source is None and ("/" in model or model.startswith(("hf:", "ngc:"))):
        source = model
        model = _fit_name(model.rpartition("/")[2])
    if model in (*FIXED_NAMES, "all"):
        raise SourceError(
            f"{model!r} cannot be a model's name: it is reserved "
            f"({', '.join(FIXED_NAMES)} are the models that serve the first imported one); choose "
            "another name with -m, and give the model with --source"
        )
    if not _NAME.fullmatch(model):
        raise SourceError(
            f"{model!r} cannot be a model's name: use letters, digits, '.', '_' and '-'"
        )
    if source is None and model not in KNOWN_MODELS:
        raise SourceError(
            f"{model} is not a known model. Please use a known model, or provide a --source "
            f"(hf:org/name, a folder or a GGUF file); known: {', '.join(KNOWN_MODELS)}"
        )
    return source or model, model


def _is_path(text: str) -> bool:
    """Return whether the text of -m is a folder or a file. A known name is none."""
    if text.startswith(("local:", ".", "/", "~")):
        return True
    if text in KNOWN_MODELS or not ("/" in text or text.endswith(".gguf")):
        return False
    return expand_home(text).exists()


def _fit_name(text: str) -> str:
    """Return a name like this one that a model can have."""
    name = _UNFIT_FOR_A_NAME.sub("-", text).lstrip(".-") or "model"
    return f"{name}-model" if name in (*FIXED_NAMES, "all") else name


def main(model: str, repository: str) -> int:
    """Import a model for `slipstream start`, which serves it next. Returns the exit code."""
    end_with_the_command()
    try:
        import_model(model, None, Path(repository))
    except (CommandError, ValueError, OSError) as error:
        log("ERROR", str(error))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED  # the command says so
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

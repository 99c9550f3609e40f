"""`slipstream import`: fetch a model, build its engine and write the repository that serves it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser, UsageError, add_verbose
from slipstream.cli.engine_flags import WEIGHT_ONLY, add_weight_only
from slipstream.cli.list_models import (
    DEFAULT_REPOSITORY,
    add_repository,
    log_repository,
    repository_folder,
)
from slipstream.cli.log import log, program
from slipstream.cli.progress import ProgressLines
from slipstream.repository.templates import FIXED_NAMES, RepositoryExists, write_repository
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import read_engine_config
from slipstream.weights.home import expand_home, slipstream_home
from slipstream.weights.sources.known_models import KNOWN_MODELS
from slipstream.weights.sources.source import SourceError

BACKEND = "tensorrtllm"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def create_parser() -> Parser:
    parser = Parser(
        "slipstream import",
        "Add a model to the repository: fetch it, build its engine, write its configuration.",
    )
    parser.add_argument(
        "-m",
        "--model",
        required=True,
        help=f"Name of a known model ({', '.join(KNOWN_MODELS)}), or a new name with --source.",
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
        help="Data type of the weights; auto: the source's 16-bit type, or bfloat16.",
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
        import_model(given.model, given.source, repository, given.dtype, weight_only)
    except RepositoryExists as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:
        raise CommandError("interrupted; nothing was left behind") from None
    log("INFO", f"Serve it with: {program()} start{_repository_option(repository)}")
    return 0


def import_model(
    model: str,
    source: str | None,
    repository: Path,
    dtype: str = "auto",
    weight_only: str | None = None,
) -> Path:
    """Build the engine of a model and write its repository. Returns the engine's folder."""
    source, name = _source_and_name(model, source)
    existing = [folder for folder in (name, *FIXED_NAMES) if (repository / folder).exists()]
    if existing:  # write_repository would refuse too, but only after the build
        raise RepositoryExists(
            f"Found existing model at {repository / existing[0]}, skipping repo add; "
            "remove it first (slipstream remove -m all), or choose another --repo"
        )
    engine = engine_folder(name)
    with ProgressLines(lambda text: log("INFO", text)) as display:
        build_engine(source, engine, dtype=dtype, weight_only=weight_only, progress=display.update)
    if not display.built:
        log("WARNING", f"Found existing engine(s) at {engine}, skipping build.")
    limits = read_engine_config(engine).build
    write_repository(repository, name, engine, engine, limits.max_batch_size)
    log_repository(repository)
    return engine


def _repository_option(repository: Path) -> str:
    if repository == DEFAULT_REPOSITORY.expanduser():
        return ""
    return f" --repo {shlex.quote(str(repository))}"


def engine_folder(name: str) -> Path:
    """Return the folder of the engine `name`, below ENGINE_DEST_PATH if it is set."""
    place = os.environ.get("ENGINE_DEST_PATH")
    parent = expand_home(place, "ENGINE_DEST_PATH") if place else slipstream_home() / "engines"
    return parent / name


def _source_and_name(model: str, source: str | None) -> tuple[str, str]:
    """Return the source and the name of a model. For a hub id, the name is its last part."""
    if source is None and "/" in model and not model.startswith((".", "/", "~")):
        source = model
        model = model.rpartition("/")[2]
    if not _NAME.fullmatch(model) or model in FIXED_NAMES or model == "all":
        raise SourceError(
            f"{model!r} cannot be a model's name: use letters, digits, '.', '_' and '-'"
        )
    if source is None and model not in KNOWN_MODELS:
        raise SourceError(
            f"{model} is not a known model. Please use a known model, or provide a --source "
            f"(hf:org/name, a folder or a GGUF file); known: {', '.join(KNOWN_MODELS)}"
        )
    return source or model, model


def main(model: str, repository: str) -> int:
    """Import a model for `slipstream start`, which serves it next. Returns the exit code."""
    try:
        import_model(model, None, Path(repository))
    except (CommandError, ValueError, OSError) as error:
        log("ERROR", str(error))
        return 1
    except KeyboardInterrupt:
        log("ERROR", "interrupted; nothing was left behind")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

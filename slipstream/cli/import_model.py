"""`slipstream import`: a model from its source to an engine and a model repository that serves it."""

from __future__ import annotations

import os
import re
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.list_models import (
    DEFAULT_REPOSITORY,
    RepositoryOption,
    log_repository,
    repository_folder,
)
from slipstream.cli.log import VerboseOption, fail, log, program
from slipstream.cli.progress import ProgressLines
from slipstream.repository.templates import FIXED_NAMES, RepositoryExists, write_repository
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import read_engine_config
from slipstream.weights.home import expanded, slipstream_home
from slipstream.weights.sources.known_models import KNOWN_MODELS
from slipstream.weights.sources.source import SourceError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class WeightType(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class WeightOnlyPrecision(StrEnum):
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


def import_model(
    model: Annotated[
        str, typer.Option("-m", "--model", help="A known model's name, or a name of your own.")
    ],
    source: Annotated[
        str | None,
        typer.Option("-s", "--source", help="hf:org/name, local:path, a folder or a GGUF file."),
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="tensorrtllm; there is no other.")
    ] = "tensorrtllm",
    repo: RepositoryOption = DEFAULT_REPOSITORY,
    dtype: Annotated[
        WeightType, typer.Option("--dtype", help="auto: the weights' own 16-bit type, or bfloat16.")
    ] = WeightType.AUTO,
    use_weight_only: Annotated[
        bool,
        typer.Option(
            "--use_weight_only", "--use-weight-only", help="Keep the linear layers in fewer bits."
        ),
    ] = False,
    weight_only_precision: Annotated[
        WeightOnlyPrecision,
        typer.Option(
            "--weight_only_precision",
            "--weight-only-precision",
            help="How many, with --use_weight_only.",
        ),
    ] = WeightOnlyPrecision.INT8,
    verbose: VerboseOption = False,
) -> None:
    """Bring a model in: fetch it, build its engine, write the model repository."""
    if backend != "tensorrtllm":
        fail(f"backend {backend!r} is not supported; use tensorrtllm")
    repo = repository_folder(repo)
    try:
        bring_in(
            model,
            source,
            repo,
            dtype.value,
            weight_only_precision.value if use_weight_only else None,
        )
        log("INFO", f"Serve it with: {program()} start{_repository_option(repo)}")
    except BrokenPipeError:
        raise  # the reader of our output left; there is nobody to tell
    except (
        ValueError,
        OSError,
        RepositoryExists,
    ) as error:  # what weights/ refuses is a ValueError
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; nothing was left behind")


def bring_in(
    model: str,
    source: str | None,
    repository: Path,
    dtype: str = "auto",
    weight_only: str | None = None,
) -> Path:
    """Build the engine of a model and write its repository; returns the engine's folder."""
    source, name = _source_and_name(model, source)
    taken = [folder for folder in (name, *FIXED_NAMES) if (repository / folder).exists()]
    if taken:  # write_repository would refuse as well, but only after the build
        raise RepositoryExists(
            f"Found existing model at {repository / taken[0]}, skipping repo add; "
            "remove it first (slipstream remove -m all), or choose another --repo"
        )
    engine = engine_folder_of(name)
    with ProgressLines(lambda text: log("INFO", text)) as display:
        build_engine(source, engine, dtype=dtype, weight_only=weight_only, progress=display.update)
    if not display.built:
        log("WARNING", f"Found existing engine(s) at {engine}, skipping build.")
    write_repository(
        repository, name, engine, engine, read_engine_config(engine).build.max_batch_size
    )
    log_repository(repository)
    return engine


def _repository_option(repository: Path) -> str:
    return (
        ""
        if repository == DEFAULT_REPOSITORY.expanduser()
        else f" --repo {shlex.quote(str(repository))}"
    )


def engine_folder_of(name: str) -> Path:
    place = os.environ.get("ENGINE_DEST_PATH")
    return (expanded(place, "ENGINE_DEST_PATH") if place else slipstream_home() / "engines") / name


def _source_and_name(model: str, source: str | None) -> tuple[str, str]:
    """A hub id may stand for a name: its last part is the name then."""
    if source is None and "/" in model and not model.startswith((".", "/", "~")):
        source, model = model, model.rpartition("/")[2]
    if not _NAME.fullmatch(model) or model in FIXED_NAMES or model == "all":
        raise SourceError(
            f"{model!r} cannot be a model's name: use letters, digits, '.', '_' and '-'"
        )
    if source is None and model not in KNOWN_MODELS:
        raise SourceError(
            f"{model} is not a known model; known: {', '.join(KNOWN_MODELS)}; "
            "for any other give --source (hf:org/name, a folder or a GGUF file)"
        )
    return source or model, model

"""`convert_checkpoint.py` as a function: convert a model of any source to a unified checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from slipstream.weights.calibration.settings import Calibration
from slipstream.weights.checkpoint import (
    plan_checkpoint,
    write_checkpoint,
    write_checkpoint_config,
)
from slipstream.weights.engine_config import CONFIG_NAME
from slipstream.weights.rank_split import RankMapping
from slipstream.weights.sources.open_source import open_source
from slipstream.weights.sources.source import Source
from slipstream.weights.stream import Progress, no_progress
from slipstream.weights.whole_folder import whole_folder

DEFAULT_OUTPUT = "tllm_checkpoint"


@dataclass(frozen=True)
class Conversion:
    """The values of the flags. The default of `dtype` is the original script's."""

    model: str
    output: Path = Path(DEFAULT_OUTPUT)
    dtype: str = "float16"
    weight_only: str | None = None
    fp8_kv_cache: bool = False
    mapping: RankMapping = field(default_factory=RankMapping)
    config_only: bool = False
    calibration: Calibration | None = None  # of `weight_only` awq or gptq: the build applies it


class ConversionResult(NamedTuple):
    folder: Path
    source: Source
    wrote: bool  # False if the same checkpoint was already there


def convert(wanted: Conversion, progress: Progress = no_progress) -> ConversionResult:
    """Convert the model. Raises SourceError, UnsupportedModel or ValueError with one line."""
    source = open_source(wanted.model, progress)
    if wanted.config_only:
        plan = plan_checkpoint(
            source,
            wanted.dtype,
            wanted.weight_only,
            wanted.mapping,
            wanted.fp8_kv_cache,
            wanted.calibration,
        )
        with whole_folder(wanted.output, CONFIG_NAME) as staging:
            write_checkpoint_config(source, plan, staging, wanted.calibration)
        return ConversionResult(wanted.output, source, True)
    wrote = False

    def watch(phase: str, done: int, total: int) -> None:
        nonlocal wrote
        wrote = True
        progress(phase, done, total)

    write_checkpoint(
        source,
        wanted.output,
        dtype=wanted.dtype,
        weight_only=wanted.weight_only,
        mapping=wanted.mapping,
        fp8_kv_cache=wanted.fp8_kv_cache,
        progress=watch,
        calibration=wanted.calibration,
    )
    return ConversionResult(wanted.output, source, wrote)

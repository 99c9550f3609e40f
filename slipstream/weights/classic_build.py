"""`trtllm-build` and the old `build.py` as a function: build an engine folder from their flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.model.spec import ModelSpec
from slipstream.weights.build import build_engine
from slipstream.weights.calibration.settings import Calibration
from slipstream.weights.checkpoint import CheckpointSource
from slipstream.weights.engine_config import BuildLimits, EngineConfig, read_engine_config
from slipstream.weights.shards import possible_ranks
from slipstream.weights.sources.open_source import open_source
from slipstream.weights.sources.source import SourceError
from slipstream.weights.stream import Progress, no_progress

DEFAULT_OUTPUT = "engine_outputs"
LIMIT_NAMES = (
    "max_batch_size",
    "max_input_len",
    "max_output_len",
    "max_seq_len",
    "max_num_tokens",
    "max_beam_width",
)


@dataclass(frozen=True)
class BuildFlags:
    """The values of the flags. None for `dtype` and `weight_only` means the checkpoint's."""

    model: str
    output: Path = Path(DEFAULT_OUTPUT)
    dtype: str | None = None
    weight_only: str | None = None
    calibration: Calibration | None = None  # of `weight_only` awq or gptq
    fp8_kv_cache: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)  # name of LIMIT_NAMES → limit
    ranks: int = 1  # ranks that the flags want; a checkpoint may want more
    stages: int = 1  # pipeline stages that the flags want; they are among the ranks


class BuildResult(NamedTuple):
    folder: Path
    wrote: bool  # False if the same build was already there
    notes: tuple[str, ...]  # one line per result that the user may not expect


def build(wanted: BuildFlags, progress: Progress = no_progress) -> BuildResult:
    """Build the engine. Raises SourceError, UnsupportedModel or ValueError with one line."""
    source = open_source(wanted.model, progress)
    dtype = wanted.dtype or "auto"
    weight_only = wanted.weight_only
    calibration = wanted.calibration
    fp8_kv_cache = wanted.fp8_kv_cache
    notes: list[str] = []
    ranks = wanted.ranks
    stages = wanted.stages
    if isinstance(source, CheckpointSource):
        dtype = wanted.dtype or source.stored_dtype
        if weight_only is None:
            weight_only = source.weight_only
            calibration = source.calibration
        fp8_kv_cache = fp8_kv_cache or source.fp8_kv_cache
        ranks = max(ranks, source.ranks)
        stages = max(stages, source.stages)
    limits = choose_limits(source.spec, wanted.limits, notes)
    wrote = False

    def watch(phase: str, done: int, total: int) -> None:
        nonlocal wrote
        wrote = True
        progress(phase, done, total)

    folder = build_engine(
        source,
        wanted.output,
        dtype=dtype,
        weight_only=weight_only,
        fp8_kv_cache=fp8_kv_cache,
        limits=limits,
        progress=watch,
        wanted_ranks=ranks,
        calibration=calibration,
        notes=notes,
    )
    notes += _explain_ranks(read_engine_config(folder), ranks, stages)
    return BuildResult(folder, wrote, tuple(notes))


def _explain_ranks(config: EngineConfig, ranks: int, stages: int) -> Iterator[str]:
    """Yield lines about the ranks that the user wants."""
    if stages > 1:
        yield f"pp_size {stages}: pipeline stages run as tensor ranks, {ranks} ranks in all"
    possible = possible_ranks(config.spec, config.quantisation, ranks)
    if possible < ranks:
        yield f"{ranks} ranks do not divide this model: it runs with {possible} instead"
    elif ranks > 1:
        yield f"the engine is built whole: it runs with {ranks} ranks, or any other number"


def choose_limits(spec: ModelSpec, given: Mapping[str, int], notes: list[str]) -> BuildLimits:
    """Return the limits. Those not given are the model's; those above the model's are lowered.

    Adds a line to `notes` for each limit that was lowered.
    """
    longest = spec.max_positions
    prompt, answer, whole = (
        given.get(name) for name in ("max_input_len", "max_output_len", "max_seq_len")
    )
    if whole is None and prompt is not None and answer is not None:
        whole = prompt + answer
    if prompt is None or (whole is not None and prompt > whole):
        prompt = whole
    sizes = {"max_input_len": prompt or longest, "max_seq_len": whole or longest}
    for name, size in sizes.items():
        if size > longest:
            notes.append(
                f"{name} is lowered from {size} to {longest}, the positions that the model has"
            )
            sizes[name] = longest
    others = {
        name: given[name]
        for name in ("max_batch_size", "max_num_tokens", "max_beam_width")
        if name in given
    }
    return BuildLimits(**sizes, **others, given=tuple(others))


def read_build_config(path: Path) -> dict[str, int]:
    """Return the limits of a `--build_config` file, at its top or under the key `build_config`."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise SourceError(f"{path}: not a table of limits")
    limits = document.get("build_config", document)
    return {name: limits[name] for name in LIMIT_NAMES if isinstance(limits.get(name), int)}

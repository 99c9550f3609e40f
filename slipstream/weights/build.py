"""Build an engine folder from a source.

The weights are streamed: only a few rows of one tensor are in memory at a time. Until something
must be written, only headers are read and torch is not imported.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.version import VERSION
from slipstream.weights.build_plan import BuildPlan, hashed_details, plan_build
from slipstream.weights.calibration.settings import METHODS, Calibration
from slipstream.weights.calibration.source import CalibratedSource
from slipstream.weights.engine_config import (
    CONFIG_NAME,
    BuildLimits,
    EngineFolderError,
    config_document,
    read_engine_config,
)
from slipstream.weights.parameters import (
    DTYPE_NAMES,
    EngineParameter,
    Quantisation,
    engine_layout,
    engine_parameters,
    part_name,
    scales_name,
)
from slipstream.weights.sources.open_source import open_source
from slipstream.weights.sources.source import Source
from slipstream.weights.stored_rows import fp8_pieces, has_fp8, keeps_fp8, stored_pieces
from slipstream.weights.stream import (
    ByteMeter,
    Progress,
    check_disk,
    no_progress,
    parameter_rows,
    tensor_bytes,
)
from slipstream.weights.tensor_file import TensorFileError, file_size, read_header, write_tensors
from slipstream.weights.whole_folder import whole_folder

if TYPE_CHECKING:
    import torch

_WEIGHTS_NAME = "rank0.engine"

EnginePlan = BuildPlan[BuildLimits]


def build_engine(
    source: str | Path | Source,
    output: str | Path,
    *,
    dtype: str = "bfloat16",
    weight_only: str | None = None,
    fp8_kv_cache: bool = False,
    limits: BuildLimits | None = None,
    progress: Progress | None = None,
    wanted_ranks: int = 1,
    calibration: Calibration | None = None,
    notes: list[str] | None = None,
) -> Path:
    """Build an engine folder at `output` and return it. A second identical build does nothing.

    `dtype` "auto" keeps the blocks of a quantised GGUF file and a 16-bit type of other weights; for
    any other type it uses bfloat16. `weight_only` is None, "int8", "int4", "fp8", "awq" or "gptq".
    `calibration` has the text of the last two. Lines about what it cannot do are added to `notes`.
    `fp8_kv_cache` stores the KV cache in FP8 on a GPU. `wanted_ranks` is recorded; the folder runs
    with any number of ranks. Raises SourceError, UnsupportedModel or ValueError with one line that
    gives the reason.
    """
    output = Path(output)
    progress = progress or no_progress
    opened = open_source(str(source), progress) if isinstance(source, str | Path) else source
    opened = calibrated(opened, weight_only, calibration)
    plan = plan_engine(opened, dtype, weight_only, fp8_kv_cache, limits)
    if _is_built(output, plan, wanted_ranks):
        return output
    check_disk(output, file_size(engine_layout(opened.spec, plan.dtype, plan.quantisation)))
    if "torch" not in sys.modules:
        progress("loading torch, which reads the weights", 0, 0)
        import torch  # noqa: F401
    if isinstance(opened, CalibratedSource):
        found = opened.calibrate(progress)
        if notes is not None:
            notes += found
    with whole_folder(output, CONFIG_NAME, _old_files(output)) as staging:
        _write_folder(opened, plan, staging, progress, wanted_ranks)
    return output


def plan_engine(
    source: Source,
    dtype: str,
    weight_only: str | None,
    fp8_kv_cache: bool = False,
    limits: BuildLimits | None = None,
) -> EnginePlan:
    """Return the plan of an engine folder, decided from the source's headers alone."""
    source = calibrated(source, weight_only)
    in_blocks = isinstance(source, CalibratedSource)
    return plan_build(
        source,
        dtype,
        None if in_blocks else weight_only,
        fp8_kv_cache,
        limits or BuildLimits.for_model(source.spec),
        keep_stored=in_blocks or (dtype == "auto" and weight_only is None),
    )


def calibrated(
    source: Source, weight_only: str | None, calibration: Calibration | None = None
) -> Source:
    """Return the source, quantised by calibration if `weight_only` or `calibration` wants that."""
    if isinstance(source, CalibratedSource):
        return source
    if calibration is None and weight_only in METHODS:
        calibration = Calibration(weight_only)
    return source if calibration is None else CalibratedSource(source, calibration)


def _is_built(output: Path, plan: EnginePlan, wanted_ranks: int) -> bool:
    """Return whether the folder holds the complete result of this plan."""
    try:
        config = read_engine_config(output)
        if config.path != output or config.inputs_hash != plan.inputs_hash:
            return False
        if config.wanted_ranks != wanted_ranks:
            return False
        read_header(output / _WEIGHTS_NAME)
    except (EngineFolderError, TensorFileError):
        return False  # no folder, or no usable one: the build replaces it
    return all((output / name).is_file() for name in config.files)


def _old_files(output: Path) -> list[str]:
    try:
        config = read_engine_config(output)
    except EngineFolderError:
        return []
    return list(config.files) if config.path == output else []


def _write_folder(
    source: Source, plan: EnginePlan, staging: Path, progress: Progress, wanted_ranks: int
) -> None:
    files = {}
    for name, content in source.tokenizer_files().items():
        (staging / name).write_bytes(content)
        files[name] = hashlib.sha256(content).hexdigest()
    layout = engine_layout(source.spec, plan.dtype, plan.quantisation)
    meter = ByteMeter(_phase(source, plan), sum(slot.nbytes for slot in layout.values()), progress)
    pieces = _engine_pieces(source, plan)
    files[_WEIGHTS_NAME] = write_tensors(staging / _WEIGHTS_NAME, layout, pieces, meter.add)
    own: dict[str, Any] = {
        "content_hash": _content_hash(source, plan, files),
        "files": files,
        "source": source.label,
        "request": plan.inputs_hash,
    }
    if source.pooling is not None:
        own["pooling"] = asdict(source.pooling)
    document = config_document(
        VERSION,
        source.spec,
        plan.dtype,
        plan.quantisation,
        plan.details,
        source.generation,
        own,
        wanted_ranks,
    )
    (staging / CONFIG_NAME).write_text(json.dumps(document, indent=2) + "\n")


def _content_hash(source: Source, plan: EnginePlan, files: dict[str, str]) -> str:
    """Return a hash that is equal for folders that behave the same, whatever their sources."""
    what = [
        source.spec.to_config(),
        hashed_details(plan.details),
        asdict(source.generation),
        sorted(files.items()),
    ]
    if source.pooling is not None:
        what.append(asdict(source.pooling))
    if plan.quantisation.kv_cache:
        what.append(plan.quantisation.kv_cache)
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _engine_pieces(source: Source, plan: EnginePlan) -> Iterator[tuple[str, memoryview]]:
    """Yield (tensor name, bytes) in the order of the engine's file."""
    layout = engine_layout(source.spec, plan.dtype, plan.quantisation)
    places = {name: place for place, name in enumerate(layout)}
    parameters = engine_parameters(source.spec, plan.quantisation)
    for parameter in sorted(parameters, key=lambda one: _first_place(one, places)):
        parts = plan.quantisation.stored.get(parameter.name)
        if parts is not None:
            for name, stored in stored_pieces(source, parameter, parts):
                yield name, memoryview(np.ascontiguousarray(stored).data)
            continue
        if parameter.bits and plan.quantisation.algorithm == "FP8" and has_fp8(source, parameter):
            for name, kept in fp8_pieces(source, parameter):
                yield name, memoryview(np.ascontiguousarray(kept).data)
            continue
        rows = parameter_rows(source, parameter.parts)
        if parameter.bits:
            yield from _quantised_pieces(parameter, rows, plan.quantisation)
        else:
            code = layout[parameter.name].dtype
            for block in rows:
                yield parameter.name, tensor_bytes(block, DTYPE_NAMES[code])


def _phase(source: Source, plan: EnginePlan) -> str:
    """Return what a build says that it writes."""
    if plan.quantisation.stored or not source.expanded or keeps_fp8(source, plan.quantisation):
        return "weights"
    return f"weights, expanded from {source.expanded}"


def _first_place(parameter: EngineParameter, places: dict[str, int]) -> int:
    """Return the place in the file of a parameter's first tensor."""
    own = places.get(parameter.name)
    return places[part_name(parameter.name, 0)] if own is None else own


def _quantised_pieces(
    parameter: EngineParameter, rows: Iterator[torch.Tensor], quantisation: Quantisation
) -> Iterator[tuple[str, memoryview]]:
    import torch

    from slipstream.weights.quantise import quantise_fp8, quantise_rows

    scales = []
    for block in rows:
        if quantisation.algorithm == "FP8":
            weight, block_scales = quantise_fp8(block)
        else:
            weight, block_scales = quantise_rows(block, parameter.bits, quantisation.group_size)
        scales.append(block_scales)
        yield parameter.name, tensor_bytes(weight, str(weight.dtype).removeprefix("torch."))
    yield scales_name(parameter.name), tensor_bytes(torch.cat(scales), "float32")

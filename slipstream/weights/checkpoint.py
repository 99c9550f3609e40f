"""Read and write unified checkpoints: config.json and one file per rank.

A checkpoint is the result of `slipstream convert` and one of the sources of `build_engine`. Its
tensors have the names of `model/spec.py`. The weights are not quantised: the config only records
the weight-only precision, which the build applies. With awq and gptq the folder holds the text of
the calibration, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.model.families.family import Recipe
from slipstream.model.spec import ModelSpec
from slipstream.version import VERSION
from slipstream.weights.build_plan import BuildPlan, plan_build
from slipstream.weights.calibration.settings import METHODS, Calibration
from slipstream.weights.engine_config import (
    CONFIG_NAME,
    GenerationDefaults,
    read_pooling_defaults,
)
from slipstream.weights.parameters import (
    DTYPE_NAMES,
    Shape,
    TensorSlot,
    checkpoint_shapes,
    plain_code,
)
from slipstream.weights.rank_split import (
    Part,
    RankedTensors,
    RankMapping,
    compute_part,
    rank_file,
    rank_parameters,
    slice_part,
)
from slipstream.weights.sources.source import (
    Source,
    SourceError,
    compute_fingerprint,
    read_json,
    read_tokenizer_files,
)
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

_FORMAT = 1
_PRECISIONS = {
    "W8A16": "int8",
    "W4A16": "int4",
    "FP8": "fp8",
    "W4A16_AWQ": "awq",
    "W4A16_GPTQ": "gptq",
}
_CALIBRATION_TEXT = "calibration.txt"


def is_checkpoint(folder: Path) -> bool:
    return (folder / rank_file(0)).is_file() and (folder / CONFIG_NAME).is_file()


class CheckpointSource:
    """A checkpoint folder as a source. Its tensors already have the names of parameters."""

    stored = None  # its matrices are plain
    expanded = ""

    def __init__(self, folder: Path, label: str) -> None:
        self.label = label
        self.folder = folder
        path = folder / CONFIG_NAME
        self._config = read_json(path)
        own = self._config.get("slipstream")
        if not isinstance(own, dict) or own.get("format") != _FORMAT:
            raise SourceError(f"{path}: {_describe_foreign(self._config)}")
        try:
            self.spec = ModelSpec.from_config(self._config)
            generation = self._config["generation"]
            self.generation = GenerationDefaults(
                tuple(generation["end_ids"]), generation["bos_id"], generation["pad_id"]
            )
            self.pooling = read_pooling_defaults(own)
            mapping = RankMapping(
                self._config["mapping"]["tp_size"], self._config["mapping"]["pp_size"]
            )
            mapping.check(self.spec)
            # may be float32, while `dtype` only names 16-bit types
            self.stored_dtype: str = self._config["dtype"]
            quantisation = self._config["quantization"]
            self.weight_only = _PRECISIONS.get(quantisation["quant_algo"])
            self.fp8_kv_cache = quantisation.get("kv_cache_quant_algo") == "FP8"
            self.calibration: Calibration | None = None
            if self.weight_only in METHODS:
                self.calibration = Calibration(
                    self.weight_only, folder / _CALIBRATION_TEXT, own["calibration_windows"]
                )
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"{path}: damaged: {error}; convert the model again") from error
        self.ranks = mapping.world_size
        self.stages = mapping.pp_size
        self._tensors = RankedTensors(folder, self.spec, mapping)

    @property
    def dtype(self) -> str | None:
        return self._tensors.dtype

    def shapes(self) -> Mapping[str, Shape]:
        return self._tensors.shapes()

    def recipe(self, parameter: str) -> Recipe:
        return Recipe((parameter,))

    def read_rows(self, name: str) -> Iterator[torch.Tensor]:
        return self._tensors.read_rows(name)

    def tokenizer_files(self) -> dict[str, bytes]:
        return read_tokenizer_files(self.folder)

    def fingerprint(self) -> str:
        return compute_fingerprint(
            json.dumps(self._config), self.tokenizer_files(), self._tensors.fingerprint()
        )


def _describe_foreign(config: dict[str, Any]) -> str:
    """Return what a checkpoint is that this release did not write, and what to do."""
    quantised = config.get("quantization")
    algorithm = quantised.get("quant_algo") if isinstance(quantised, dict) else None
    if "slipstream" in config or algorithm is None:
        return "not a checkpoint that this release of Slipstream wrote; convert the model again"
    return (
        f"a checkpoint of TensorRT-LLM, quantised as {algorithm}, whose scales and order of rows "
        "belong to its release; give the Hugging Face folder that it was made from, or one "
        "quantised by GPTQ, AWQ, compressed-tensors or ModelOpt"
    )


CheckpointPlan = BuildPlan[RankMapping]


def plan_checkpoint(
    source: Source,
    dtype: str,
    weight_only: str | None,
    mapping: RankMapping,
    fp8_kv_cache: bool = False,
    calibration: Calibration | None = None,
) -> CheckpointPlan:
    """Return the plan of a checkpoint. Raises like `plan_build`."""
    mapping.check(source.spec)
    if calibration is None:
        return plan_build(source, dtype, weight_only, fp8_kv_cache, mapping)
    plan = plan_build(source, dtype, "int4", fp8_kv_cache, mapping)
    algorithm = f"W4A16_{calibration.method.upper()}"
    inputs = f"{plan.inputs_hash}:{calibration.fingerprint()}"
    return replace(
        plan,
        quantisation=replace(plan.quantisation, algorithm=algorithm),
        inputs_hash=hashlib.sha256(inputs.encode()).hexdigest(),
    )


def _rank_layout(plan: CheckpointPlan, spec: ModelSpec, rank: int) -> dict[str, TensorSlot]:
    """Return the tensors of a rank's file."""
    whole = checkpoint_shapes(spec)
    return {
        stored: TensorSlot(
            plain_code(name, plan.dtype),
            _rank_part(plan, spec, name, whole[name], rank).shape(whole[name]),
        )
        for stored, name in rank_parameters(spec, plan.details, rank).items()
    }


def _rank_part(plan: CheckpointPlan, spec: ModelSpec, name: str, whole: Shape, rank: int) -> Part:
    """Return the part of a parameter that a rank's file holds."""
    tp_size = plan.details.tp_size
    return compute_part(spec, name, whole, rank % tp_size, tp_size)


def write_checkpoint(
    source: Source,
    output: Path,
    *,
    dtype: str = "auto",
    weight_only: str | None = None,
    mapping: RankMapping = RankMapping(),
    fp8_kv_cache: bool = False,
    progress: Progress = no_progress,
    calibration: Calibration | None = None,
) -> Path:
    """Write a source as a unified checkpoint with its tokenizer files, and return the folder.

    A second identical conversion does nothing. The folder appears complete or not at all.
    """
    plan = plan_checkpoint(source, dtype, weight_only, mapping, fp8_kv_cache, calibration)
    if _is_written(output, plan):
        return output
    layouts = [_rank_layout(plan, source.spec, rank) for rank in range(mapping.world_size)]
    check_disk(output, sum(map(file_size, layouts)))
    with whole_folder(output, CONFIG_NAME, _old_ranks(output)) as staging:
        for name, content in source.tokenizer_files().items():
            (staging / name).write_bytes(content)
        meter = ByteMeter(
            "checkpoint",
            sum(slot.nbytes for layout in layouts for slot in layout.values()),
            progress,
        )
        for rank, layout in enumerate(layouts):
            write_tensors(
                staging / rank_file(rank), layout, _rank_pieces(source, plan, rank), meter.add
            )
        write_checkpoint_config(source, plan, staging, calibration)
    return output


def write_checkpoint_config(
    source: Source, plan: CheckpointPlan, folder: Path, calibration: Calibration | None = None
) -> None:
    document = _document(source, plan)
    if calibration is not None:
        document["slipstream"]["calibration_windows"] = calibration.windows
        (folder / _CALIBRATION_TEXT).write_text(calibration.content, encoding="utf-8")
    (folder / CONFIG_NAME).write_text(json.dumps(document, indent=2) + "\n")


def _rank_pieces(
    source: Source, plan: CheckpointPlan, rank: int
) -> Iterator[tuple[str, memoryview]]:
    whole = checkpoint_shapes(source.spec)
    for stored, name in rank_parameters(source.spec, plan.details, rank).items():
        part = _rank_part(plan, source.spec, name, whole[name], rank)
        for block in slice_part(parameter_rows(source, (name,)), part):
            yield stored, tensor_bytes(block, DTYPE_NAMES[plain_code(name, plan.dtype)])


def _is_written(output: Path, plan: CheckpointPlan) -> bool:
    """Return whether the folder holds the result of this plan, with all ranks complete."""
    try:
        own = json.loads((output / CONFIG_NAME).read_text(encoding="utf-8"))["slipstream"]
        if own["request"] != plan.inputs_hash:
            return False
        for rank in range(plan.details.world_size):
            read_header(output / rank_file(rank))
    except (OSError, ValueError, KeyError, TypeError, TensorFileError):
        return False  # no checkpoint, or no usable one: it is written again
    return True


def _old_ranks(output: Path) -> list[str]:
    return [path.name for path in output.glob("rank*.safetensors")] if is_checkpoint(output) else []


def _document(source: Source, plan: CheckpointPlan) -> dict[str, Any]:
    pooling = {} if source.pooling is None else {"pooling": asdict(source.pooling)}
    return {
        **source.spec.to_config(),
        "dtype": plan.dtype,
        "logits_dtype": "float32",
        "mapping": {"world_size": plan.details.world_size, **asdict(plan.details)},
        "quantization": {
            "quant_algo": plan.quantisation.algorithm,
            "kv_cache_quant_algo": plan.quantisation.kv_cache,
        },
        "generation": {**asdict(source.generation), "end_ids": list(source.generation.end_ids)},
        "slipstream": {
            "format": _FORMAT,
            "version": VERSION,
            "source": source.label,
            "request": plan.inputs_hash,
            **pooling,
        },
    }

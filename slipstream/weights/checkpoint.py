"""The unified checkpoint: config.json and rank0.safetensors under the names of `model/spec.py`.

The step between converting and building in the classic flow. `build_engine` takes any source, and this is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.model.families.family import Recipe
from slipstream.model.spec import ModelSpec
from slipstream.version import VERSION
from slipstream.weights.engine_config import CONFIG_NAME, GenerationDefaults
from slipstream.weights.hf_folder import read_json
from slipstream.weights.mapped_tensors import MappedTensors
from slipstream.weights.parameters import DTYPE_CODES, Shape, TensorSlot, checkpoint_shapes
from slipstream.weights.source import Source, SourceError, check_source, fingerprint_of, read_tokenizer_files
from slipstream.weights.stream import ByteMeter, Progress, check_disk, no_progress, parameter_rows, tensor_bytes
from slipstream.weights.tensor_file import file_size, write_tensors
from slipstream.weights.whole_folder import whole_folder

if TYPE_CHECKING:
    import torch

_FORMAT = 1
_WEIGHTS_NAME = "rank0.safetensors"


def is_checkpoint(folder: Path) -> bool:
    return (folder / _WEIGHTS_NAME).is_file() and (folder / CONFIG_NAME).is_file()


class CheckpointSource:
    """A checkpoint folder, whose tensors already have the names they are asked by."""

    def __init__(self, folder: Path, label: str) -> None:
        self.label = label
        self.folder = folder
        path = folder / CONFIG_NAME
        self._config = read_json(path)
        own = self._config.get("slipstream")
        if not isinstance(own, dict) or own.get("format") != _FORMAT:
            raise SourceError(f"{path}: not a checkpoint that this release of Slipstream wrote; "
                              "convert the model again")
        try:
            self.spec = ModelSpec.from_config(self._config)
            generation = self._config["generation"]
            self.generation = GenerationDefaults(
                tuple(generation["end_ids"]), generation["bos_id"], generation["pad_id"])
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"{path}: damaged: {error}; convert the model again") from error
        self._tensors = MappedTensors([folder / _WEIGHTS_NAME], lambda name: name)

    @property
    def dtype(self) -> str | None:
        return self._tensors.dtype

    def shapes(self) -> Mapping[str, Shape]:
        return {name: slot.shape for name, slot in self._tensors.slots.items()}

    def recipe(self, parameter: str) -> Recipe:
        return Recipe((parameter,))

    def read_rows(self, name: str) -> Iterator[torch.Tensor]:
        return self._tensors.read_rows(name)

    def tokenizer_files(self) -> dict[str, bytes]:
        return read_tokenizer_files(self.folder)

    def fingerprint(self) -> str:
        return fingerprint_of(json.dumps(self._config), self.tokenizer_files(), self._tensors.fingerprint())


def write_checkpoint(
    source: Source, output: Path, *, dtype: str = "auto", progress: Progress = no_progress
) -> Path:
    """Write a source as a unified checkpoint, tokenizer files beside it; the folder appears whole or not at all."""
    dtype = (source.dtype or "bfloat16") if dtype == "auto" else dtype
    if dtype not in DTYPE_CODES:
        raise ValueError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPE_CODES)}")
    check_source(source)
    layout = {name: TensorSlot(DTYPE_CODES[dtype], shape) for name, shape in checkpoint_shapes(source.spec).items()}
    check_disk(output, file_size(layout))
    with whole_folder(output, CONFIG_NAME) as staging:
        for name, content in source.tokenizer_files().items():
            (staging / name).write_bytes(content)
        meter = ByteMeter("checkpoint", sum(slot.nbytes for slot in layout.values()), progress)
        pieces = ((name, tensor_bytes(block, dtype)) for name in layout for block in parameter_rows(source, (name,)))
        write_tensors(staging / _WEIGHTS_NAME, layout, pieces, meter.add)
        (staging / CONFIG_NAME).write_text(json.dumps(_document(source, dtype), indent=2) + "\n")
    return output


def _document(source: Source, dtype: str) -> dict[str, Any]:
    return {
        **source.spec.to_config(),
        "dtype": dtype,
        "logits_dtype": "float32",
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None},
        "generation": {**asdict(source.generation), "end_ids": list(source.generation.end_ids)},
        "slipstream": {"format": _FORMAT, "version": VERSION, "source": source.label},
    }

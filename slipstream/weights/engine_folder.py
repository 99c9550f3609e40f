"""Read an engine folder: its config, and its tensors mapped from the file.

This module needs only torch and safetensors, so it runs on a GPU machine without other packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from slipstream.weights.engine_config import EngineConfig, EngineFolderError, read_engine_config
from slipstream.weights.parameters import TensorSlot, engine_layout
from slipstream.weights.tensor_file import TensorFileError, read_header

_REBUILD = "copy the file again, or import the model again"


@dataclass(frozen=True)
class EngineFolder(EngineConfig):
    def tensors(self, rank: int = 0) -> dict[str, torch.Tensor]:
        """Return the tensors of one rank, mapped from its file. They use no private memory."""
        path = rank_file(self.path, rank)
        self.check_tensors(rank)
        with safe_open(path, framework="pt") as file:
            # `file` is not a dict: it has no iterator
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def check_tensors(self, rank: int = 0) -> None:
        """Raise EngineFolderError if a rank's file is cut short, damaged or of another model."""
        path = rank_file(self.path, rank)
        if not path.is_file():
            raise EngineFolderError(f"{path}: missing; {_REBUILD}")
        try:
            found = read_header(path).slots
        except TensorFileError as error:
            raise EngineFolderError(f"{error}; {_REBUILD}") from error
        problem = f"{self.spec.layers} layers, {len(found)} tensors"
        # a damaged layer count could make engine_layout run for ever
        if self.spec.layers <= len(found):
            problem = _describe_difference(
                engine_layout(self.spec, self.dtype, self.quantisation), found
            )
        if problem:
            raise EngineFolderError(
                f"{path}: does not fit {self.path / 'config.json'}: {problem}; {_REBUILD}"
            )


def read_engine_folder(path: str | Path) -> EngineFolder:
    """Open and check an engine folder, or raise EngineFolderError with one line."""
    folder = EngineFolder(**vars(read_engine_config(path)))
    folder.check_tensors()
    return folder


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.engine"


def _describe_difference(expected: dict[str, TensorSlot], found: dict[str, TensorSlot]) -> str:
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    wrong = [name for name, slot in expected.items() if name in found and found[name] != slot]
    parts = [
        f"{label} {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
        for label, names in (
            ("lacks", missing),
            ("has unknown", extra),
            ("has another shape or type for", wrong),
        )
        if names
    ]
    return "; ".join(parts)

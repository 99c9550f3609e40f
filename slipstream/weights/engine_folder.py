"""Read an engine folder: its config, and its weights mapped from the file. Needs no torch.

`EngineFolder.tensors` makes tensors of torch from them, for those who need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.kernels.blocks import matrix_of
from slipstream.kernels.stored import StoredArray, Weight
from slipstream.weights.engine_config import EngineConfig, EngineFolderError, read_engine_config
from slipstream.weights.parameters import PLAIN_FORMS, TensorSlot, engine_layout, part_name
from slipstream.weights.tensor_file import TensorFileError, map_tensors, read_header

if TYPE_CHECKING:
    import torch

_REBUILD = "copy the file again, or import the model again"


@dataclass(frozen=True)
class EngineFolder(EngineConfig):
    def weights(self, rank: int = 0) -> dict[str, Weight]:
        """Return the weights of one rank, mapped from its file. They use no private memory."""
        self.check_tensors(rank)
        found: dict[str, Weight] = dict(map_tensors(rank_file(self.path, rank)))
        for name, parts in self.quantisation.stored.items():
            if parts[0].form in PLAIN_FORMS:
                continue
            rows = []
            for index, part in enumerate(parts):
                tensor = found.pop(part_name(name, index))
                assert isinstance(tensor, StoredArray)
                rows.append((part.form, tensor.array))
            found[name] = matrix_of(rows)
        return found

    def tensors(self, rank: int = 0, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return the weights of one rank as tensors. Blocks are expanded to `dtype`; None: to the
        type of the engine.
        """
        import torch

        from slipstream.weights.torch_tensors import to_tensor

        wanted = dtype or getattr(torch, self.dtype)
        return {name: to_tensor(weight, wanted) for name, weight in self.weights(rank).items()}

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
            problem = self._describe_problem(found)
        if problem:
            raise EngineFolderError(
                f"{path}: does not fit {self.path / 'config.json'}: {problem}; {_REBUILD}"
            )

    def _describe_problem(self, found: dict[str, TensorSlot]) -> str:
        try:
            expected = engine_layout(self.spec, self.dtype, self.quantisation)
        except ValueError as error:  # its parts are not those of this model
            return str(error)
        return _describe_difference(expected, found)


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

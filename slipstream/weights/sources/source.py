"""What every source of a model offers, and the check that its tensors are exactly the model's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slipstream.model.families.family import Recipe, collapse_layer
from slipstream.model.families.registry import name_list
from slipstream.model.spec import ModelSpec
from slipstream.weights.engine_config import GenerationDefaults
from slipstream.weights.parameters import DTYPE_CODES, Shape, checkpoint_shapes

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "generation_config.json",
)
BLOCK_BYTES = 64 << 20  # how much of a tensor is in memory at once while it is converted


class SourceError(ValueError):
    """The source cannot be used. The text is one line: what is wrong, and what to do about it."""


class Source(Protocol):
    """A model that can be read tensor by tensor. Opening one reads headers only and does not import
    torch.
    """

    @property
    def label(self) -> str:
        """What the engine folder records as its origin."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def generation(self) -> GenerationDefaults: ...

    @property
    def dtype(self) -> str | None:
        """The 16-bit type of the weights, where they have one."""

    def shapes(self) -> Mapping[str, Shape]:
        """The tensors there are, buffers left out."""

    def recipe(self, parameter: str) -> Recipe:
        """How a unified parameter is made of those tensors."""

    def read_rows(self, name: str) -> Iterator[torch.Tensor]:
        """One tensor as runs of whole rows, in order."""

    def tokenizer_files(self) -> dict[str, bytes]: ...

    def fingerprint(self) -> str:
        """Changes when the source does; found without reading the weights."""


def choose_dtype(source: Source, wanted: str) -> str:
    """The type that weights are stored in: "auto" keeps a 16-bit type that they have already."""
    dtype = (source.dtype or "bfloat16") if wanted == "auto" else wanted
    if dtype not in DTYPE_CODES:
        raise ValueError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPE_CODES)}")
    return dtype


def check_source(source: Source) -> None:
    """Every parameter of the model has its tensors, of the right shape, and no tensor is left over."""
    shapes = source.shapes()
    # or a damaged count would have us list parameters for ever
    if source.spec.layers > len(shapes):
        raise SourceError(
            f"{source.label}: the config says {source.spec.layers} layers, "
            f"the weights are only {len(shapes)} tensors"
        )
    used: set[str] = set()
    missing: list[str] = []
    for parameter, expected in checkpoint_shapes(source.spec).items():
        recipe = source.recipe(parameter)
        absent = [name for name in recipe.sources if name not in shapes]
        missing += absent
        used.update(recipe.sources)
        if not absent:
            _check_shape(source.label, expected, recipe, [shapes[name] for name in recipe.sources])
    if source.spec.tied_embeddings:
        # a copy of the embedding that some files carry
        used.update(source.recipe("lm_head.weight").sources)
    extra = [name for name in shapes if name not in used]
    problems = [
        f"{label} {name_list(map(collapse_layer, names))}"
        for label, names in (("missing", missing), ("unexpected", extra))
        if names
    ]
    if problems:
        raise SourceError(
            f"{source.label}: the weights do not fit {source.spec.architecture}: "
            f"tensors {'; '.join(problems)}"
        )


def _check_shape(label: str, expected: Shape, recipe: Recipe, shapes: list[Shape]) -> None:
    if recipe.transposed:
        shapes = [shape[::-1] for shape in shapes]
    rows = sum(shape[0] for shape in shapes if shape)
    if recipe.rows is not None and expected[0] <= rows:
        taken = recipe.rows()
        rows = len(taken) if max(taken) < rows else rows
    joined = all(shape[1:] == expected[1:] for shape in shapes) and rows == expected[0]
    if not joined or any(not prod(shape) for shape in shapes):
        found = " + ".join(str(list(shape)) for shape in shapes)
        raise SourceError(
            f"{label}: tensor {' + '.join(recipe.sources)} has shape {found}, "
            f"the model's config says {list(expected)}"
        )


def row_blocks(rows: int, row_bytes: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Cut `rows` into runs of about BLOCK_BYTES, each a multiple of `multiple` rows but the last."""
    step = max(BLOCK_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    return {
        name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()
    }


def compute_fingerprint(config: str, files: Mapping[str, bytes], tensors: str) -> str:
    digest = hashlib.sha256(config.encode())
    for name, content in sorted(files.items()):
        digest.update(f"\n{name}:{hashlib.sha256(content).hexdigest()}".encode())
    digest.update(f"\n{tensors}".encode())
    return digest.hexdigest()

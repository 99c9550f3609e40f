"""The interface of a model source, and the check that its tensors are exactly the model's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.model.families.family import Recipe, collapse_layer
from slipstream.model.families.registry import name_list
from slipstream.model.spec import ModelSpec
from slipstream.weights.engine_config import GenerationDefaults, PoolingDefaults
from slipstream.weights.parameters import DTYPE_CODES, Shape, checkpoint_shapes

if TYPE_CHECKING:
    import numpy as np
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
BLOCK_BYTES = 64 << 20  # bytes of a tensor in memory at once during a conversion


class SourceError(ValueError):
    """The source cannot be used. The text is one line with the problem and a remedy."""


def read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: damaged: not JSON") from error
    if not isinstance(document, dict):
        raise SourceError(f"{path}: damaged: not a JSON object")
    return document


class StoredMatrices(Protocol):
    """The matrices of a file that an engine can keep as they are."""

    def forms(self) -> Mapping[str, str]:
        """Return the form of each such tensor: see `parameters.StoredRows`."""

    def read_stored(self, name: str) -> np.ndarray:
        """Return all rows of such a tensor as stored: uint8 [rows, row bytes]."""


class Source(Protocol):
    """A model that can be read tensor by tensor.

    Opening a source reads headers only and does not import torch.
    """

    @property
    def label(self) -> str:
        """The origin that the engine folder records."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def generation(self) -> GenerationDefaults: ...

    @property
    def pooling(self) -> PoolingDefaults | None:
        """What the source says about embeddings and scores."""

    @property
    def dtype(self) -> str | None:
        """The 16-bit type of the weights, or None."""

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shapes of the tensors, without buffers."""

    def recipe(self, parameter: str) -> Recipe:
        """Return how a parameter of a checkpoint is made from the tensors."""

    def read_rows(self, name: str) -> Iterator[torch.Tensor]:
        """Yield one tensor in blocks of complete rows, in order."""

    @property
    def stored(self) -> StoredMatrices | None:
        """The matrices that an engine can keep as they are; None: it has none in blocks."""

    @property
    def expanded(self) -> str:
        """How quantised matrices are stored that are read expanded; empty: there are none."""

    def tokenizer_files(self) -> dict[str, bytes]: ...

    def fingerprint(self) -> str:
        """Return a text that changes with the source, found without reading the weights."""


def choose_dtype(source: Source, wanted: str) -> str:
    """Return the type to store weights in. "auto" keeps a 16-bit type of the source."""
    dtype = (source.dtype or "bfloat16") if wanted == "auto" else wanted
    if dtype not in DTYPE_CODES:
        raise ValueError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPE_CODES)}")
    return dtype


def check_source(source: Source) -> None:
    """Raise SourceError if a tensor of the model is missing, has a wrong shape or is left over."""
    shapes = source.shapes()
    # a damaged layer count could make checkpoint_shapes run for ever
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
        # some files hold a copy of the embedding
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
    joined = recipe.parameter_shape(shapes)
    if joined is not None and recipe.rows is not None and expected[0] <= joined[0]:
        taken = recipe.rows()
        joined = (len(taken), *joined[1:]) if max(taken) < joined[0] else joined
    if joined != expected:
        found = " + ".join(str(list(shape)) for shape in shapes)
        raise SourceError(
            f"{label}: tensor {' + '.join(recipe.sources)} has shape {found}, "
            f"the model's config says {list(expected)}"
        )


def row_blocks(rows: int, row_bytes: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of blocks of about BLOCK_BYTES.

    The number of rows of each block but the last is a multiple of `multiple`.
    """
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

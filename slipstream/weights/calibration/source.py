"""A source whose linear layers are quantised by calibration.

Its tensors have the names of a checkpoint's parameters. Making it reads headers only; `calibrate`
does the work, and has to be called before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from slipstream.model.families.family import Recipe
from slipstream.model.spec import ModelSpec
from slipstream.weights.calibration.settings import Calibration
from slipstream.weights.engine_config import GenerationDefaults, PoolingDefaults
from slipstream.weights.parameters import (
    Quantisation,
    Shape,
    checkpoint_shapes,
    choose_quantisation,
    engine_parameters,
)
from slipstream.weights.sources.source import Source, SourceError, check_source
from slipstream.weights.stream import Progress, parameter_rows

if TYPE_CHECKING:
    import torch

    from slipstream.weights.calibration.layers import CalibratedLayers

_LINEAR_FORM = "Q4_1"
_HEAD_FORM = "Q8_0"  # as the output layer decides between tokens, it keeps 8 bits
_EMBEDDING = "transformer.vocab_embedding.weight"
_HEAD = "lm_head.weight"
_BLOCK = 32


class CalibratedSource:
    """A model with linear layers in blocks of four bits, and an output layer of eight."""

    expanded = ""

    def __init__(self, source: Source, calibration: Calibration) -> None:
        """Raises SourceError or ValueError if the model cannot be quantised so."""
        if source.expanded:
            raise SourceError(
                f"{source.label}: its weights are quantised already ({source.expanded}); build it "
                f"without --quantize {calibration.method}, which keeps their bits where it can"
            )
        check_source(source)
        self.inner = source
        self.calibration = calibration
        self._shapes = checkpoint_shapes(source.spec)
        self._forms = dict(_forms(source.spec, self._shapes))
        self._found: CalibratedLayers | None = None

    def calibrate(self, progress: Progress) -> list[str]:
        """Quantise the layers. Returns a line for each thing that the user may not expect."""
        from slipstream.weights.calibration.layers import calibrate_layers

        self._found = calibrate_layers(self.inner, self.calibration, progress)
        return self._found.notes

    @property
    def label(self) -> str:
        return self.inner.label

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    @property
    def generation(self) -> GenerationDefaults:
        return self.inner.generation

    @property
    def pooling(self) -> PoolingDefaults | None:
        return self.inner.pooling

    @property
    def dtype(self) -> str | None:
        return self.inner.dtype

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def recipe(self, parameter: str) -> Recipe:
        return Recipe((parameter,))

    def read_rows(self, name: str) -> Iterator[torch.Tensor]:
        changed = self._result().changed.get(name)
        if changed is None:
            yield from parameter_rows(self.inner, (name,))
        else:
            yield changed

    @property
    def stored(self) -> CalibratedSource:
        return self

    def forms(self) -> Mapping[str, str]:
        return self._forms

    def read_stored(self, name: str) -> np.ndarray:
        if name in (_EMBEDDING, _HEAD):
            from slipstream.weights.calibration.rounding import q8_0_rows

            rows = parameter_rows(self.inner, (name,))
            return np.concatenate([q8_0_rows(block.float()) for block in rows])
        return self._result().blocks[name]

    def tokenizer_files(self) -> dict[str, bytes]:
        return self.inner.tokenizer_files()

    def fingerprint(self) -> str:
        return f"{self.inner.fingerprint()}:{self.calibration.fingerprint()}"

    def _result(self) -> CalibratedLayers:
        assert self._found is not None, "calibrate() comes first"
        return self._found


def _forms(spec: ModelSpec, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a checkpoint that are stored in blocks, with their forms."""
    quantisation: Quantisation = choose_quantisation(spec, "int4")  # raises if groups do not fit
    for parameter in engine_parameters(spec, quantisation):
        if parameter.bits and parameter.name != _HEAD:
            yield from ((part, _LINEAR_FORM) for part in parameter.parts)
    head = _EMBEDDING if spec.tied_embeddings else _HEAD
    if shapes[head][1] % _BLOCK == 0:
        yield head, _HEAD_FORM

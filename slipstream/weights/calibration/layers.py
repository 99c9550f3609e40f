"""Quantise the layers of a model one after the other, each on what the quantised ones before it
make of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from slipstream.weights.calibration.awq import apply_folds
from slipstream.weights.calibration.gptq import gptq_levels
from slipstream.weights.calibration.rounding import (
    Groups,
    fitted_groups,
    q4_1_rows,
    whole_groups,
)
from slipstream.weights.calibration.runner import LayerRunner, read_layer
from slipstream.weights.calibration.settings import NEAREST, Calibration
from slipstream.weights.calibration.statistics import InputStatistics
from slipstream.weights.calibration.tokens import token_windows
from slipstream.weights.parameters import choose_quantisation, engine_parameters
from slipstream.weights.sources.source import Source
from slipstream.weights.stream import Progress


@dataclass
class CalibratedLayers:
    """The quantised layers, by the names of a checkpoint's parameters."""

    blocks: dict[str, np.ndarray] = field(default_factory=dict)  # uint8 [rows, row bytes]
    changed: dict[str, Tensor] = field(default_factory=dict)  # other parameters, float32
    notes: list[str] = field(default_factory=list)


def calibrate_layers(
    source: Source, calibration: Calibration, progress: Progress
) -> CalibratedLayers:
    """Return the quantised layers of a model. Progress is counted in layers."""
    spec = source.spec
    result = CalibratedLayers()
    quantisation = choose_quantisation(spec, "int4")
    parts = {
        parameter.name: parameter.parts
        for parameter in engine_parameters(spec, quantisation)
        if parameter.bits
    }
    runner = None
    if calibration.method != NEAREST:
        windows = token_windows(source, calibration)
        runner = LayerRunner(source, windows)
    not_observed: set[str] = set()
    phase = f"layers, quantised by {calibration.method}"
    for layer in range(spec.layers):
        progress(phase, layer, spec.layers)
        quantised = _LayerQuantiser(source, layer, parts, calibration.method)
        if runner is not None:
            quantised.observe(runner)
        quantised.quantise()
        if runner is not None:
            runner.advance(runner.run(layer, quantised.tensors))
        quantised.collect(result)
        not_observed |= quantised.not_observed
    progress(phase, spec.layers, spec.layers)
    result.notes += _notes(calibration.method, not_observed)
    return result


class _LayerQuantiser:
    """One layer: its tensors, by the names of an engine, change from exact to quantised."""

    def __init__(
        self, source: Source, layer: int, parts: dict[str, tuple[str, ...]], method: str
    ) -> None:
        """parts: the names in a checkpoint of each matrix that is quantised"""
        self._spec = source.spec
        self._layer = layer
        self._method = method
        self._original = read_layer(source, layer)
        self.tensors = dict(self._original)
        self._parts = {name: parts[name] for name in self.tensors if name in parts}
        self._found: dict[str, InputStatistics] = {}
        self._rows: dict[str, np.ndarray] = {}
        self.not_observed: set[str] = set()

    def observe(self, runner: LayerRunner) -> None:
        """Run the text through the exact layer."""
        statistics = {
            name.removesuffix(".weight"): InputStatistics.empty(self.tensors[name].shape[1])
            for name in self._parts
        }
        runner.run(self._layer, self.tensors, statistics)
        self._found = {name: found for name, found in statistics.items() if found.tokens}
        self.not_observed = {
            name.split(".", 3)[3] for name in statistics if name not in self._found
        }

    def quantise(self) -> None:
        if self._method == "awq":
            apply_folds(self._spec, self._layer, self.tensors, self._found)
        for name in self._parts:
            found = self._found.get(name.removesuffix(".weight"))
            weight = self.tensors[name]
            levels, groups = self._round(weight, found)
            self._rows[name] = q4_1_rows(levels, groups)
            self.tensors[name] = groups.values(levels)

    def _round(self, weight: Tensor, found: InputStatistics | None) -> tuple[Tensor, Groups]:
        if found is None:
            groups = whole_groups(weight)
            return groups.levels(weight), groups
        if self._method == "gptq":
            return gptq_levels(weight, found.hessian)
        groups = fitted_groups(weight, found.hessian)
        return groups.levels(weight), groups

    def collect(self, result: CalibratedLayers) -> None:
        """Add what this layer has become, by the names of a checkpoint's parameters."""
        for name, parts in self._parts.items():
            result.blocks.update(zip(parts, np.split(self._rows[name], len(parts)), strict=True))
        for name, tensor in self.tensors.items():
            if name in self._parts or tensor is self._original[name]:
                continue
            names = [name]
            if ".mlp.gate_up." in name:
                names = [name.replace("gate_up", part) for part in ("fc", "gate")]
            result.changed.update(zip(names, tensor.chunk(len(names)), strict=True))


def _notes(method: str, not_observed: set[str]) -> list[str]:
    if not not_observed or method == NEAREST:
        return []
    return [
        f"{method} is not applied to {', '.join(sorted(not_observed))}: these linear layers are "
        "rounded to the nearest of 16 levels in groups of 32"
    ]

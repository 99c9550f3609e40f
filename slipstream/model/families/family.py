"""What a model family is: the architectures it serves, how its config reads, and where its tensors
go.

A family is data and one function. Adding one is a file like `llama.py` and a line in `registry.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from slipstream.model.spec import ModelSpec

_LAYER_NAME = re.compile(r"transformer\.layers\.(\d+)\.(.+)\.(weight|bias)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class UnsupportedModel(ValueError):
    """The model cannot be served: its architecture or one of its options is not known here."""


RowOrder = Callable[[ModelSpec], Sequence[int]]


@dataclass(frozen=True)
class Recipe:
    """How one parameter is made: source tensors in order, their rows joined.

    `transposed`: the source stores [in_features, out_features], as GPT-2's Conv1D does. `rows`
    tells which of the joined rows are taken, in which order; None: all of them as they come. It is
    called only once the sizes were found to fit, because a damaged config may have a list without
    end.
    """

    sources: tuple[str, ...]
    transposed: bool = False
    rows: Callable[[], Sequence[int]] | None = None


@dataclass(frozen=True)
class WeightMap:
    """Where a family keeps the tensors of `model/spec.py`. Names here carry no `.weight` or
    `.bias`.

    `layer_prefix` holds `{layer}`; `layers` maps a module of a layer to the source modules whose
    rows it joins, once for every expert where they hold `{expert}`; `outer` does the same outside
    the layers. `rows` gives the order of a module's rows where it is not the source's own.
    `ignored` are patterns of whole names that are not parameters. Files may lack `optional_prefix`
    on all their names; `aliases` are pairs of an other beginning or part of a name and what stands
    for it here.
    """

    layer_prefix: str
    layers: Mapping[str, tuple[str, ...]]
    outer: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    rows: Mapping[str, RowOrder] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    optional_prefix: str = ""
    aliases: tuple[tuple[str, str], ...] = ()

    def recipe(self, parameter: str, spec: ModelSpec) -> Recipe:
        """The sources of a unified parameter; KeyError when the family has no such parameter."""
        match = _LAYER_NAME.fullmatch(parameter)
        if match is None:
            module, _, kind = parameter.rpartition(".")
            sources: tuple[str, ...] = (f"{self.outer[module]}.{kind}",)
        else:
            layer, module, kind = match.groups()
            prefix = self.layer_prefix.format(layer=layer)
            sources = tuple(f"{prefix}{source}.{kind}" for source in self._modules(module, spec))
        order = self.rows.get(module)
        transposed = kind == "weight" and module in self.transposed
        return Recipe(sources, transposed, partial(order, spec) if order is not None else None)

    def _modules(self, module: str, spec: ModelSpec) -> Sequence[str]:
        sources = self.layers[module]
        if spec.experts is None or not any("{expert}" in source for source in sources):
            return sources
        return [
            source.format(expert=expert)
            for expert in range(spec.experts.count)
            for source in sources
        ]

    def ignores(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def canonical(self, name: str) -> str:
        """The name with its aliases replaced and the optional prefix put back, outside which
        `lm_head` stands.
        """
        for alias, ours in self.aliases:
            name = name.replace(alias, ours, 1)
        if not self.optional_prefix or name.startswith((self.optional_prefix, "lm_head.")):
            return name
        return self.optional_prefix + name

    def knows(self, name: str) -> bool:
        """Whether a source tensor has a place in this family, whatever the model's options."""
        name = self.canonical(name)
        return self.ignores(name) or collapse_layer(name) in self._known_names

    @cached_property
    def _known_names(self) -> set[str]:
        modules = list(self.outer.values())
        prefix = self.layer_prefix.format(layer="N")
        modules += [
            prefix + source.format(expert="N")
            for sources in self.layers.values()
            for source in sources
        ]
        return {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}


@dataclass(frozen=True)
class Family:
    name: str
    architectures: tuple[str, ...]
    spec: Callable[[dict[str, Any]], ModelSpec]  # from a Hugging Face config.json
    weights: WeightMap
    model_types: tuple[str, ...] = field(default=())  # for a config.json that names no architecture


def collapse_layer(name: str) -> str:
    """The name with its numbers replaced by N, as messages show it: one line for all layers."""
    return _NUMBER.sub("N", name)

"""Model families: the architectures a family serves, how to read its config, and its tensor names.

A family is data and one function. To add one, write a file like `llama.py` and add it to
`registry.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

from slipstream.model.spec import ModelSpec

_LAYER_NAME = re.compile(r"transformer\.layers\.(\d+)\.(.+)\.(weight|bias)")
SCORE_WEIGHT = "score.weight"  # of a classifier, in checkpoints and in sources of all families
_MAX_PREDICTION_LAYERS = 64  # several times what any model has
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class UnsupportedModel(ValueError):
    """The model cannot be served: its architecture or one of its options is not supported."""


RowOrder = Callable[[ModelSpec], Sequence[int]]


@dataclass(frozen=True)
class Recipe:
    """The recipe of one parameter: the rows of the source tensors, concatenated in order.

    transposed: the source stores [in_features, out_features], as GPT-2's Conv1D does. rows: returns
    the order of the concatenated rows; None: unchanged. It is called only after the sizes have been
    checked, because a damaged config may ask for an endless list. stacked: each source holds this
    many matrices, one after the other; 0: it is one matrix or vector. flat: the source is a matrix,
    the parameter a vector. unit_rows: rows are scaled to length 1.
    """

    sources: tuple[str, ...]
    transposed: bool = False
    rows: Callable[[], Sequence[int]] | None = None
    stacked: int = 0
    flat: bool = False
    unit_rows: bool = False

    def parameter_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Return the shape of the concatenated rows, before `rows` chooses from them; None: the
        sources do not fit together.
        """
        rows = 0
        columns: set[tuple[int, ...]] = set()
        for shape in shapes:
            made = self._made_shape(shape)
            if made is None or 0 in made:
                return None
            rows += made[0]
            columns.add(made[1:])
        return (rows, *columns.pop()) if len(columns) == 1 else None

    def _made_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if self.flat:
            return (prod(shape),)
        if self.stacked and len(shape) > 1:
            rows = prod(shape[:-1])
            if rows % self.stacked:
                return None
            if self.transposed:
                return (self.stacked * shape[-1], rows // self.stacked)
            return (rows, shape[-1])
        if not shape:
            return None
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True)
class WeightMap:
    """The source names of the tensors of `model/spec.py`, without `.weight` and `.bias`.

    layer_prefix: contains `{layer}`. layers: maps a module of a layer to the source modules whose
    rows it concatenates, once per expert or head if they contain `{expert}` or `{head}`. outer: the
    same outside the layers. rows: the order of a module's rows where it differs from the source's.
    flat: modules whose source is a matrix in place of a vector. unit_rows: modules whose rows are
    scaled to length 1, in the models for which the function returns True. ignored: patterns of
    whole names that are not parameters. optional_prefix: files may lack it on all names. aliases:
    pairs of an alternative part of a name and its usual form. bare_weights: the ends of the names
    of weights that do not end in `.weight`.
    """

    layer_prefix: str
    layers: Mapping[str, tuple[str, ...]]
    outer: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    rows: Mapping[str, RowOrder] = field(default_factory=dict)
    flat: frozenset[str] = frozenset()
    unit_rows: Mapping[str, Callable[[ModelSpec], bool]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    optional_prefix: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    bare_weights: tuple[str, ...] = ()

    def recipe(self, parameter: str, spec: ModelSpec) -> Recipe:
        """Return the sources of a parameter; KeyError if the family has no such parameter."""
        match = _LAYER_NAME.fullmatch(parameter)
        if match is None:
            module, _, kind = parameter.rpartition(".")
            source = module if parameter == SCORE_WEIGHT else self.outer[module]
            sources: tuple[str, ...] = (f"{source}.{kind}",)
        else:
            layer, module, kind = match.groups()
            prefix = self.layer_prefix.format(layer=layer)
            sources = tuple(f"{prefix}{source}.{kind}" for source in self._modules(module, spec))
        stacked = self._stacked(module, spec)
        order = self.rows.get(module)
        has_unit_rows = self.unit_rows.get(module)
        return Recipe(
            sources,
            transposed=kind == "weight" and module in self.transposed,
            rows=partial(order, spec) if order is not None else None,
            stacked=0 if kind == "bias" else stacked,
            flat=module in self.flat or (kind == "bias" and stacked > 0),
            unit_rows=has_unit_rows is not None and has_unit_rows(spec),
        )

    def _modules(self, module: str, spec: ModelSpec) -> Sequence[str]:
        sources = self.layers[module]
        modules: list[str] = []
        if any("{head}" in source for source in sources):
            heads = spec.heads if module == "attention.q_layernorm" else spec.kv_heads
            for head in range(heads):
                modules += [source.format(head=head) for source in sources]
            return modules
        if spec.experts is None or not any("{expert}" in source for source in sources):
            return sources
        for expert in range(spec.experts.count):
            modules += [source.format(expert=expert) for source in sources]
        return modules

    def _stacked(self, module: str, spec: ModelSpec) -> int:
        """Return the number of experts of a module whose sources hold all of them."""
        if spec.experts is None or not module.startswith("mlp.experts."):
            return 0
        single = any("{expert}" in source for source in self.layers[module])
        return 0 if single else spec.experts.count

    def ignores(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def canonical(self, name: str) -> str:
        """Return the name with its aliases replaced and the optional prefix added. `lm_head` and
        `score` have no prefix.
        """
        for alias, ours in self.aliases:
            name = name.replace(alias, ours, 1)
        if name.endswith(self.bare_weights):
            name += ".weight"
        if not self.optional_prefix or name.startswith(
            (self.optional_prefix, "lm_head.", "score.")
        ):
            return name
        return self.optional_prefix + name

    def stored_name(self, name: str) -> str:
        """Return the name of a weight without the end that `canonical` adds."""
        bare = name.removesuffix(".weight")
        return bare if self.bare_weights and bare.endswith(self.bare_weights) else name

    def knows(self, name: str) -> bool:
        """Return whether a source tensor is part of this family, whatever the model's options."""
        name = self.canonical(name)
        return self.ignores(name) or collapse_layer(name) in self._known_names

    @cached_property
    def _known_names(self) -> set[str]:
        modules = list(self.outer.values())
        prefix = self.layer_prefix.format(layer="N")
        for sources in self.layers.values():
            modules += [prefix + source.format(expert="N", head="N") for source in sources]
        weights = {f"{module}.weight" for module in modules}
        return weights | {f"{module}.bias" for module in modules}


@dataclass(frozen=True)
class Family:
    name: str
    architectures: tuple[str, ...]
    spec: Callable[[dict[str, Any]], ModelSpec]  # from a Hugging Face config.json
    weights: WeightMap
    model_types: tuple[str, ...] = field(default=())  # for a config.json without an architecture

    def weights_of(self, config: dict[str, Any]) -> WeightMap:
        """Return the map of a checkpoint. It leaves out the layers of multi-token prediction, which
        follow the last layer.
        """
        layers = prediction_layers(config)
        ignored = (
            re.escape(self.weights.layer_prefix.format(layer=layer)) + ".*" for layer in layers
        )
        return replace(self.weights, ignored=(*self.weights.ignored, *ignored))


def prediction_layers(config: dict[str, Any]) -> range:
    """Return the numbers of a checkpoint's layers of multi-token prediction."""
    first = config.get("num_hidden_layers")
    count = config.get("num_nextn_predict_layers")
    if not isinstance(first, int) or not isinstance(count, int):
        return range(0)
    return range(first, first + min(count, _MAX_PREDICTION_LAYERS))


def collapse_layer(name: str) -> str:
    """Return the name with its numbers replaced by N: messages show one line for all layers."""
    return _NUMBER.sub("N", name)


def bare_names(weights: WeightMap) -> WeightMap:
    """Return a map that also reads files of a bare model, whose names lack the first part."""
    prefix, dot, _ = weights.layer_prefix.partition(".")
    return replace(weights, optional_prefix=weights.optional_prefix or prefix + dot)

"""A Hugging Face model folder as a source: config.json, safetensors and tokenizer files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.model.families.family import (
    SCORE_WEIGHT,
    Family,
    Recipe,
    UnsupportedModel,
    WeightMap,
    bare_names,
    prediction_layers,
)
from slipstream.model.families.registry import find_family
from slipstream.model.spec import ModelSpec
from slipstream.weights.engine_config import GenerationDefaults
from slipstream.weights.parameters import Shape, checkpoint_shapes
from slipstream.weights.sources.mapped_tensors import MappedTensors
from slipstream.weights.sources.quantised.settings import (
    QuantisationSettings,
    read_quantisation,
    unread,
)
from slipstream.weights.sources.quantised_tensors import QuantisedTensors
from slipstream.weights.sources.sentence_transformers import (
    has_output_layer,
    has_score_layer,
    read_pooling,
)
from slipstream.weights.sources.source import (
    SourceError,
    StoredMatrices,
    compute_fingerprint,
    read_json,
    read_tokenizer_files,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


class HuggingFaceFolder:
    """A model folder. Opening it reads the config and the headers of the shards only."""

    def __init__(self, folder: Path, label: str) -> None:
        self.label = label
        self.folder = folder
        self._config = read_json(folder / "config.json")
        try:
            family = _find_family(folder, self._config)
            quantised = read_quantisation(folder, self._config)
            if quantised is not None and quantised.problem():
                raise unread(label, quantised.problem())
            if self._config.get("is_causal") is False:
                raise SourceError(
                    f"{label}: its attention goes in both directions (is_causal is false), which "
                    "is not supported"
                )
            spec = family.spec(self._config)
        except (SourceError, UnsupportedModel):
            raise
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise SourceError(f"{folder / 'config.json'}: damaged: {error}") from error
        # some families call the model that generates "…Model", as others call a bare one
        architectures = [
            family.architectures[0] if name in family.architectures else name
            for name in self._config.get("architectures") or []
        ]
        self.generation = _generation(folder, self._config)
        self.pooling = read_pooling(folder, architectures)
        weights = family.weights_of(self._config)
        self._map = weights if has_output_layer(architectures) else bare_names(weights)
        if prediction_layers(self._config):
            logger.warning(
                "%s: its layers of multi-token prediction are not read; speculative decoding works "
                "with draft tokens from the prompt or a draft model",
                label,
            )
        self._tensors = self._open_tensors(quantised)
        self.spec = self._without_output_layer(spec, architectures)

    def _open_tensors(
        self, quantised: QuantisationSettings | None
    ) -> MappedTensors | QuantisedTensors:
        tensors = MappedTensors(
            _shard_paths(self.folder), lambda name: _rename_tensor(self._map, name)
        )
        return tensors if quantised is None else QuantisedTensors(tensors, quantised, self.label)

    @property
    def stored(self) -> StoredMatrices | None:
        """The quantised matrices whose bits an engine can keep; None: it has none."""
        tensors = self._tensors
        return tensors if isinstance(tensors, QuantisedTensors) and tensors.forms() else None

    @property
    def expanded(self) -> str:
        """How the weights of a quantised checkpoint are stored; empty: they are not quantised."""
        return self._tensors.method if isinstance(self._tensors, QuantisedTensors) else ""

    def _without_output_layer(self, spec: ModelSpec, architectures: list[str]) -> ModelSpec:
        """Return the spec of a checkpoint that may have a score layer, or none, for logits."""
        if has_output_layer(architectures):
            return spec
        score = self._tensors.slots.get(SCORE_WEIGHT)
        labels = score.shape[0] if score is not None and has_score_layer(architectures) else 0
        # The embedding stands in for the output layer: engines need one, requests do not see it.
        return replace(spec, tied_embeddings=True, labels=labels)

    @property
    def dtype(self) -> str | None:
        return self._tensors.dtype

    def shapes(self) -> Mapping[str, Shape]:
        return {name: slot.shape for name, slot in self._tensors.slots.items()}

    def recipe(self, parameter: str) -> Recipe:
        recipe = self._map.recipe(parameter, self.spec)
        if all(map(self._is_quantised, recipe.sources)):
            # GPT-2's layers store [in, out]; all libraries write [out, in] once they quantise them
            return replace(recipe, transposed=False)
        return recipe

    def read_rows(self, name: str) -> Iterator[torch.Tensor]:
        return self._tensors.read_rows(name)

    def write_expanded(self, folder: Path) -> None:
        """Write a quantised model to a folder as the unquantised model that it stands for."""
        import torch
        from safetensors.torch import save_file

        plain = {
            key: value
            for key, value in self._config.items()
            if key not in ("quantization_config", "compression_config")
        }
        (folder / "config.json").write_text(json.dumps(plain))
        stored_by_inputs = {
            name
            for parameter in checkpoint_shapes(self.spec)
            if (recipe := self._map.recipe(parameter, self.spec)).transposed
            for name in recipe.sources
        }
        tensors = {}
        for name in self._tensors.slots:
            tensor = torch.cat(list(self.read_rows(name)))
            if self._is_quantised(name) and name in stored_by_inputs:
                tensor = tensor.t()
            tensors[self._map.stored_name(name)] = tensor.contiguous()
        save_file(tensors, folder / _WHOLE, {"format": "pt"})

    def _is_quantised(self, name: str) -> bool:
        """Return whether a tensor is a quantised matrix."""
        return isinstance(self._tensors, QuantisedTensors) and self._tensors.is_linear(name)

    def tokenizer_files(self) -> dict[str, bytes]:
        return read_tokenizer_files(self.folder)

    def fingerprint(self) -> str:
        return compute_fingerprint(
            json.dumps(self._config), self.tokenizer_files(), self._tensors.fingerprint()
        )


def _rename_tensor(weights: WeightMap, stored: str) -> str | None:
    """Return the canonical name of a stored tensor, or None for a tensor to ignore."""
    name = weights.canonical(stored)
    return None if weights.ignores(name) else name


def _find_family(folder: Path, config: dict[str, Any]) -> Family:
    try:
        return find_family(config)
    except UnsupportedModel:
        try:
            names = list(MappedTensors(_shard_paths(folder), lambda name: name).slots)
        except SourceError:
            names = []  # names only add detail to the error
        return find_family(config, names)


def _generation(folder: Path, config: dict[str, Any]) -> GenerationDefaults:
    """Return the special tokens of generation_config.json, or of config.json if it lacks them.

    The files hold one end id or a list.
    """
    path = folder / "generation_config.json"
    preferred = read_json(path) if path.is_file() else {}

    def value(key: str) -> Any:
        return preferred[key] if preferred.get(key) is not None else config.get(key)

    ends = value("eos_token_id")
    end_ids = [_token_id(end) for end in (ends if isinstance(ends, list) else [ends])]
    return GenerationDefaults(
        tuple(dict.fromkeys(end for end in end_ids if end is not None)),
        _token_id(value("bos_token_id")),
        _token_id(value("pad_token_id")),
    )


def _token_id(value: Any) -> int | None:
    # some configs write -1 for no token
    return value if isinstance(value, int) and value >= 0 else None


def _shard_paths(folder: Path) -> list[Path]:
    """Return the shards that the index names, or the single weights file. Without these, the only
    file has any name: older libraries for quantisation chose their own.

    Other files are copies in another layout.
    """
    if (folder / _INDEX).is_file():
        return _indexed_shards(folder)
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    files = list(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    pickled = sorted(
        path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern)
    )
    if pickled:
        raise SourceError(
            f"{folder}: holds only pickled weights ({pickled[0]}), which can run code when loaded; "
            "convert them to safetensors (transformers' save_pretrained does) and import that"
        )
    raise SourceError(f"{folder}: has no {_WHOLE} and no {_INDEX}")


def _indexed_shards(folder: Path) -> list[Path]:
    table = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise SourceError(f"{folder / _INDEX}: damaged: it has no weight_map")
    names = sorted(set(table.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise SourceError(f"{folder / _INDEX}: names a file outside the folder: {outside[0]}")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise SourceError(
            f"{folder}: {len(absent)} of {len(names)} shards are missing "
            f"({', '.join(absent[:4])}); download them again"
        )
    return [folder / name for name in names]

"""The list of model families, and the choice of the one that serves a config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slipstream.model.families import (
    falcon,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    gptj,
    llama,
    mistral,
    mixtral,
    opt,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from slipstream.model.families.family import Family, UnsupportedModel, collapse_layer

FAMILIES: tuple[Family, ...] = tuple(
    family.FAMILY
    for family in (
        llama,
        mistral,
        mixtral,
        qwen2,
        qwen3,
        qwen2_moe,
        qwen3_moe,
        gemma,
        gemma2,
        gemma3,
        phi3,
        gpt2,
        gptj,
        gpt_neox,
        opt,
        falcon,
    )
)
_NAMES_SHOWN = 8


def supported_architectures() -> list[str]:
    return [family.architectures[0] for family in FAMILIES]


def find_family(config: dict[str, Any], tensor_names: Iterable[str] = ()) -> Family:
    """Return the family of a Hugging Face config.

    tensor_names: for the error about an unknown architecture
    """
    architectures = [_causal_name(name) for name in config.get("architectures") or []]
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
        if not architectures and config.get("model_type") in family.model_types:
            return family
    named = (
        ", ".join(config.get("architectures") or []) or config.get("model_type") or "(none named)"
    )
    raise UnsupportedModel(
        f"architecture {named} is not supported; supported: {', '.join(supported_architectures())}"
        + _unmatched_text(list(tensor_names))
    )


def _causal_name(architecture: str) -> str:
    """Return the name of the model that generates, for a bare model or a classifier."""
    for ending in ("ForSequenceClassification", "Model"):
        if architecture.endswith(ending):
            name = f"{architecture.removesuffix(ending)}ForCausalLM"
            if any(name in family.architectures for family in FAMILIES):
                return name
    return architecture


def _unmatched_text(names: list[str]) -> str:
    """Return a text with the names that are unknown to the nearest supported family."""
    examples = {collapse_layer(name): name for name in names}
    unmatched = min((_unknown_names(family, examples) for family in FAMILIES), key=len)
    if not unmatched:
        return ""
    return f"; tensors that match no known name: {name_list(unmatched)}"


def _unknown_names(family: Family, examples: dict[str, str]) -> list[str]:
    """examples: collapsed name → one full name"""
    return [shape for shape, name in examples.items() if not family.weights.knows(name)]


def name_list(names: Iterable[str]) -> str:
    """Return a few of the names in order, and the number of the others."""
    ordered = sorted(set(names))
    more = f" and {len(ordered) - _NAMES_SHOWN} more" if len(ordered) > _NAMES_SHOWN else ""
    return ", ".join(ordered[:_NAMES_SHOWN]) + more

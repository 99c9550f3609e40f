"""Every family, and finding the one that serves a config."""

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
    """The family of a Hugging Face config. `tensor_names` only make the refusal of an unknown one
    say more.
    """
    architectures = config.get("architectures") or []
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
        if not architectures and config.get("model_type") in family.model_types:
            return family
    named = ", ".join(architectures) or config.get("model_type") or "(none named)"
    raise UnsupportedModel(
        f"architecture {named} is not supported; supported: {', '.join(supported_architectures())}"
        + _unmatched_text(list(tensor_names))
    )


def _unmatched_text(names: list[str]) -> str:
    """The names no supported family has a place for, judged by the family that comes nearest."""
    examples = {collapse_layer(name): name for name in names}
    unmatched = min(
        (
            [shape for shape, name in examples.items() if not family.weights.knows(name)]
            for family in FAMILIES
        ),
        key=len,
    )
    if not unmatched:
        return ""
    return f"; tensors that match no known name: {name_list(unmatched)}"


def name_list(names: Iterable[str]) -> str:
    """A few of the names in order, and how many more there are."""
    ordered = sorted(set(names))
    more = f" and {len(ordered) - _NAMES_SHOWN} more" if len(ordered) > _NAMES_SHOWN else ""
    return ", ".join(ordered[:_NAMES_SHOWN]) + more

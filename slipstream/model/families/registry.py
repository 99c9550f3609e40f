"""The list of model families, and the choice of the one that serves a config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slipstream.model.families import (
    baichuan,
    cohere,
    dbrx,
    deepseek,
    encoders,
    exaone,
    glm,
    granite,
    internlm,
    llama,
    llama4,
    nemotron,
    olmo,
    phi,
    phi3,
    smollm3,
    stablelm,
    starcoder2,
)
from slipstream.model.families.family import Family, UnsupportedModel, collapse_layer
from slipstream.model.families.gemma import gemma, gemma2, gemma3
from slipstream.model.families.gpt import (
    bloom,
    falcon,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    mpt,
    opt,
)
from slipstream.model.families.mistral import ministral, mistral, mixtral
from slipstream.model.families.qwen import qwen, qwen2, qwen2_moe, qwen3, qwen3_moe
from slipstream.model.families.refused import describe_draft, describe_refused

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    *llama4.FAMILIES,
    mistral.FAMILY,
    *ministral.FAMILIES,
    mixtral.FAMILY,
    qwen.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi.FAMILY,
    phi3.FAMILY,
    smollm3.FAMILY,
    *granite.FAMILIES,
    *olmo.FAMILIES,
    *cohere.FAMILIES,
    dbrx.FAMILY,
    stablelm.FAMILY,
    nemotron.FAMILY,
    *glm.FAMILIES,
    *internlm.FAMILIES,
    baichuan.FAMILY,
    *exaone.FAMILIES,
    *deepseek.FAMILIES,
    gpt_oss.FAMILY,
    gpt2.FAMILY,
    gpt_bigcode.FAMILY,
    starcoder2.FAMILY,
    gptj.FAMILY,
    gpt_neox.FAMILY,
    opt.FAMILY,
    falcon.FAMILY,
    bloom.FAMILY,
    mpt.FAMILY,
    *encoders.FAMILIES,
)
_NAMES_SHOWN = 8
_LINEAR_STATE = (
    "its layers of linear attention keep a state for each sequence, which the blocks of the KV "
    "cache cannot hold"
)
_GEMMA_3N = "its layers share keys and values, and exchange several residual streams"
# architectures that are asked for → why they are not served, and what to use instead
_NOT_SERVED = {
    "Gemma3nForCausalLM": (_GEMMA_3N, "Gemma 3"),
    "Gemma3nForConditionalGeneration": (_GEMMA_3N, "Gemma 3"),
    "Qwen3NextForCausalLM": (_LINEAR_STATE, "Qwen3 with experts (Qwen3MoeForCausalLM)"),
    "DeepseekV32ForCausalLM": (
        "its sparse attention chooses the keys of each query by an index of its own",
        "DeepSeek V3 or V3.1",
    ),
}


def supported_architectures() -> list[str]:
    return [family.architectures[0] for family in FAMILIES]


def find_family(config: dict[str, Any], tensor_names: Iterable[str] = ()) -> Family:
    """Return the family of a Hugging Face config.

    tensor_names: for the error about an unknown architecture
    """
    if draft := describe_draft(config):
        raise UnsupportedModel(draft)
    architectures = [_causal_name(name) for name in config.get("architectures") or []]
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
        if not architectures and config.get("model_type") in family.model_types:
            return family
    for name in config.get("architectures") or []:
        if name in _NOT_SERVED:
            reason, other = _NOT_SERVED[name]
            raise UnsupportedModel(f"architecture {name} is not supported: {reason}; use {other}")
    named = (
        ", ".join(config.get("architectures") or []) or config.get("model_type") or "(none named)"
    )
    if reason := describe_refused(config):
        raise UnsupportedModel(f"architecture {named} is not supported: {reason}")
    raise UnsupportedModel(
        f"architecture {named} is not supported; supported: {', '.join(supported_architectures())}"
        + _unmatched_text(list(tensor_names))
    )


def _causal_name(architecture: str) -> str:
    """Return the name of the model that generates, for a bare model or a classifier. For a
    classifier of an encoder, the name of the bare model.
    """
    for ending in ("ForSequenceClassification", "Model"):
        if architecture.endswith(ending):
            stem = architecture.removesuffix(ending)
            for name in (f"{stem}ForCausalLM", f"{stem}Model"):
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

"""Kinds of models that are not served, and what to use instead."""

from __future__ import annotations

import re
from typing import Any

_DRAFTS = re.compile(r"medusa|eagle|hydra(?!gen)|mlp_?speculator|speculator", re.IGNORECASE)
_DRAFT_KEYS = ("medusa_num_heads", "medusa_choices", "eagle_config", "speculators_config")
_ENCODERS = re.compile(
    r"(Distil|Modern|Nomic|New|Camem|XLM)?(Bert|Roberta|BERT)\w*|XLMRoberta\w*|Electra\w*"
    r"|Deberta\w*|MPNet\w*|GteModel|NewModel"
)
_ENCODER_DECODERS = re.compile(
    r"(M?T5|UMT5|Bart|MBart|Marian|Pegasus|Whisper|M2M100|BlenderBot)\w*"
)
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_VISION_KEYS = ("vision_config", "vision_tower", "mm_vision_tower", "visual")
_VISION = re.compile(r"Llava\w*|\w*VL(Moe)?ForConditionalGeneration|Mllama\w*|Pali\w*|Idefics\w*")


def describe_draft(config: dict[str, Any]) -> str:
    """Return why draft heads are not served; empty: a config is not one of draft heads.

    Some such configs name the architecture of the model that they are made for.
    """
    names = [*(config.get("architectures") or []), str(config.get("model_type") or "")]
    named = next((name for name in names if _DRAFTS.search(name)), "")
    if not named and not any(config.get(key) for key in _DRAFT_KEYS):
        return ""
    base = config.get("base_model_name_or_path")
    served = f"serve {base}" if base else "serve the model that they are made for"
    return (
        f"these are draft heads ({named or 'Medusa'}) of another model, which are not supported: "
        f"{served} with decoding_mode lookahead, or with a smaller model as its draft model"
    )


def describe_refused(config: dict[str, Any]) -> str:
    """Return why a kind of model is not served, and what is; empty: its kind is not known."""
    names = config.get("architectures") or []
    if any(_VISION.fullmatch(name) for name in names) or _has(config, _VISION_KEYS):
        return (
            "it reads images, and only text models are served: use the text model that it "
            "contains, or Gemma 3, Mistral 3 or Llama 4, whose text part is read"
        )
    if any(_ENCODERS.fullmatch(name) for name in names):
        return (
            "it is an encoder of a kind that is not read; for embeddings and scores use BERT, "
            "RoBERTa or XLM-RoBERTa, or a decoder such as Qwen3-Embedding or Qwen3-Reranker"
        )
    if config.get("is_encoder_decoder") or any(_ENCODER_DECODERS.fullmatch(one) for one in names):
        return "it has an encoder and a decoder, and only decoder models are served"
    if _has(config, _EXPERT_KEYS):
        return (
            "its experts are of a kind that is not read; models with experts that are: Mixtral, "
            "Qwen2 MoE, Qwen3 MoE, DBRX, Llama 4, DeepSeek V2 and V3, gpt-oss"
        )
    return ""


def _has(config: dict[str, Any], keys: tuple[str, ...]) -> bool:
    return any(config.get(key) for key in keys)

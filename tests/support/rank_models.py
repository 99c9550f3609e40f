"""Engines of tiny models of every family whose sizes can be divided among four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import config_of, random_model

from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import EngineFolder, read_engine_folder

VOCABULARY = 515  # it divides by no number of ranks
# int4 has groups of 32 columns, and a quarter of every size must be whole groups
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
}
_GPT2_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 128}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 32, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    "gemma3": {"head_dim": 32},
    "olmo3": {"sliding_window": 24},
    "opt": {"ffn_dim": 256, "do_layer_norm_before": True},
    "qwen2_moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {"moe_intermediate_size": 128},
}
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "opt",
    "gptj",
    "gpt_neox",
    "falcon",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmo2",
    "olmo3",
)
FORMATS = (None, "int8", "int4", "fp8")


def save_rank_model(family: str, folder: Path, **options: Any) -> Path:
    sizes = _GPT2_SIZES if family in ("gpt2", "gptj") else _SIZES
    config = config_of(family, **{**sizes, **_OWN_SIZES.get(family, {}), **options})
    random_model(config).save_pretrained(folder)
    return folder


def build_rank_engine(model: Path, engine: Path, weight_only: str | None = None) -> EngineFolder:
    return read_engine_folder(build_engine(model, engine, dtype="float32", weight_only=weight_only))

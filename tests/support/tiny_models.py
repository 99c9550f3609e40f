"""Tiny random models of every family, made by transformers, and the tensors of their engines."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from slipstream.model.spec import ModelSpec
from slipstream.weights.parameters import Quantisation, engine_parameters
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.sources.source import check_source
from slipstream.weights.stream import parameter_rows

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}


GEMMA2_OPTIONS = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "mixtral": {"num_local_experts": 5},
    "gemma": {"head_dim": 32, "num_key_value_heads": 1},
    # caps close to the values they bound, so that they have an effect
    "gemma2": {**GEMMA2_OPTIONS, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0},
    "gemma3": {
        **GEMMA2_OPTIONS,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "opt": {"ffn_dim": 96},
    "gptj": {"rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2},
}


def config_of(family: str, **options: Any) -> Any:
    import transformers as hf

    classes = {
        "llama": hf.LlamaConfig,
        "mistral": hf.MistralConfig,
        "qwen2": hf.Qwen2Config,
        "qwen3": hf.Qwen3Config,
        "gpt2": hf.GPT2Config,
        "gemma": hf.GemmaConfig,
        "gemma2": hf.Gemma2Config,
        "gemma3": hf.Gemma3TextConfig,
        "phi3": hf.Phi3Config,
        "opt": hf.OPTConfig,
        "gptj": hf.GPTJConfig,
        "gpt_neox": hf.GPTNeoXConfig,
        "falcon": hf.FalconConfig,
        "mixtral": hf.MixtralConfig,
        "qwen2_moe": hf.Qwen2MoeConfig,
        "qwen3_moe": hf.Qwen3MoeConfig,
        "olmo2": hf.Olmo2Config,
        "olmo3": hf.Olmo3Config,
    }
    sizes = dict(GPT2_SIZES if family in ("gpt2", "gptj") else SIZES) | OWN_SIZES.get(family, {})
    if family in ("opt", "gpt_neox", "falcon"):
        del sizes["num_key_value_heads"]
    return classes[family](**{**sizes, **options})


def positions_of(family: str, length: int) -> dict[str, int]:
    """Return the config field of a family's longest sequence."""
    return {"n_positions" if family in ("gpt2", "gptj") else "max_position_embeddings": length}


def engine_tensors(model: Any) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """Return the spec and the tensors of the model's engine, without building it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return folder_tensors(Path(folder))


def folder_tensors(folder: Path) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """Return the same of a model folder."""
    source = HuggingFaceFolder(folder, "tiny")
    check_source(source)
    return source.spec, {
        parameter.name: torch.cat(list(parameter_rows(source, parameter.parts)))
        for parameter in engine_parameters(source.spec, Quantisation())
    }


def random_model(config: Any) -> Any:
    """Return a model with random weights: no two tensors are alike, and biases are not zero."""
    import transformers as hf

    torch.manual_seed(7)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def expected_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors an engine must hold, written out by hand from transformers' tensors."""
    state = model.state_dict()
    gpt2 = model.config.model_type == "gpt2"
    tensors = (
        _expected_gpt2(state) if gpt2 else _expected_decoder(state, model.config.num_hidden_layers)
    )
    if not model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = state["lm_head.weight"]
    return tensors


def _expected_decoder(state: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    tensors = {
        "transformer.vocab_embedding.weight": state["model.embed_tokens.weight"],
        "transformer.ln_f.weight": state["model.norm.weight"],
    }
    names = {
        "input_layernorm": ["input_layernorm"],
        "post_layernorm": ["post_attention_layernorm"],
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.dense": ["self_attn.o_proj"],
        "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.proj": ["mlp.down_proj"],
        "attention.q_layernorm": ["self_attn.q_norm"],
        "attention.k_layernorm": ["self_attn.k_norm"],
    }
    for layer in range(layers):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                found = [
                    state[f"model.layers.{layer}.{name}.{kind}"]
                    for name in theirs
                    if f"model.layers.{layer}.{name}.{kind}" in state
                ]
                if found:
                    tensors[f"transformer.layers.{layer}.{ours}.{kind}"] = torch.cat(found)
    return tensors


def _expected_gpt2(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {
        "transformer.vocab_embedding.weight": state["transformer.wte.weight"],
        "transformer.position_embedding.weight": state["transformer.wpe.weight"],
    }
    names = {
        "ln_1": "input_layernorm",
        "ln_2": "post_layernorm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.dense",
        "mlp.c_fc": "mlp.fc",
        "mlp.c_proj": "mlp.proj",
    }
    for kind in ("weight", "bias"):
        tensors[f"transformer.ln_f.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for layer in range(2):
            for theirs, ours in names.items():
                tensor = state[f"transformer.h.{layer}.{theirs}.{kind}"]
                tensors[f"transformer.layers.{layer}.{ours}.{kind}"] = (
                    tensor.t() if tensor.dim() == 2 else tensor
                )
    return tensors

"""Tiny random models of every family, made by transformers, and what an engine made of one must hold."""

from __future__ import annotations

from typing import Any

import torch

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
GPT2_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}


def config_of(family: str, **options: Any) -> Any:
    import transformers as hf

    classes = {"llama": hf.LlamaConfig, "mistral": hf.MistralConfig, "qwen2": hf.Qwen2Config,
               "qwen3": hf.Qwen3Config, "gpt2": hf.GPT2Config}
    sizes = dict(GPT2_SIZES if family == "gpt2" else SIZES)
    if family == "qwen3":
        sizes["head_dim"] = 32
    return classes[family](**{**sizes, **options})


def random_model(config: Any) -> Any:
    """Weights far from their initial values, so that no two tensors are alike and biases are not zero."""
    import transformers as hf

    torch.manual_seed(7)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def expected_tensors(model: Any) -> dict[str, torch.Tensor]:
    """What an engine must hold, written out by hand from transformers' own tensors."""
    state = model.state_dict()
    gpt2 = model.config.model_type == "gpt2"
    tensors = _expected_gpt2(state) if gpt2 else _expected_decoder(state, model.config.num_hidden_layers)
    if not model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = state["lm_head.weight"]
    return tensors


def _expected_decoder(state: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    tensors = {"transformer.vocab_embedding.weight": state["model.embed_tokens.weight"],
               "transformer.ln_f.weight": state["model.norm.weight"]}
    names = {"input_layernorm": ["input_layernorm"], "post_layernorm": ["post_attention_layernorm"],
             "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
             "attention.dense": ["self_attn.o_proj"], "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
             "mlp.proj": ["mlp.down_proj"], "attention.q_layernorm": ["self_attn.q_norm"],
             "attention.k_layernorm": ["self_attn.k_norm"]}
    for layer in range(layers):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                found = [state[f"model.layers.{layer}.{name}.{kind}"] for name in theirs
                         if f"model.layers.{layer}.{name}.{kind}" in state]
                if found:
                    tensors[f"transformer.layers.{layer}.{ours}.{kind}"] = torch.cat(found)
    return tensors


def _expected_gpt2(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {"transformer.vocab_embedding.weight": state["transformer.wte.weight"],
               "transformer.position_embedding.weight": state["transformer.wpe.weight"]}
    names = {"ln_1": "input_layernorm", "ln_2": "post_layernorm", "attn.c_attn": "attention.qkv",
             "attn.c_proj": "attention.dense", "mlp.c_fc": "mlp.fc", "mlp.c_proj": "mlp.proj"}
    for kind in ("weight", "bias"):
        tensors[f"transformer.ln_f.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for layer in range(2):
            for theirs, ours in names.items():
                tensor = state[f"transformer.h.{layer}.{theirs}.{kind}"]
                tensors[f"transformer.layers.{layer}.{ours}.{kind}"] = tensor.t() if tensor.dim() == 2 else tensor
    return tensors

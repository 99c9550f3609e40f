"""Shapes of known models with random weights, for benchmarks of the engine. Needs only torch."""

from __future__ import annotations

import torch

from slipstream.model.spec import ModelSpec
from slipstream.weights.parameters import choose_quantisation, engine_parameters, scales_name
from slipstream.weights.quantise import quantise_fp8

SHAPES = {
    "tiny": ModelSpec("LlamaForCausalLM", 1000, 64, 2, 4, 2, 16, 128, 4096),
    "llama3-8b": ModelSpec(
        "LlamaForCausalLM", 128256, 4096, 32, 32, 8, 128, 14336, 8192, rope_theta=500000.0
    ),
    "llama3-70b": ModelSpec(
        "LlamaForCausalLM", 128256, 8192, 80, 64, 8, 128, 28672, 8192, rope_theta=500000.0
    ),
    "llama2-7b": ModelSpec("LlamaForCausalLM", 32000, 4096, 32, 32, 32, 128, 11008, 4096),
    "qwen3-0.6b": ModelSpec(
        "Qwen3ForCausalLM",
        151936,
        1024,
        28,
        16,
        8,
        128,
        3072,
        8192,
        rope_theta=1e6,
        qk_norm=True,
        tied_embeddings=True,
    ),
}


def random_tensors(
    spec: ModelSpec, fp8: bool = False, device: str = "cuda", dtype: str = "bfloat16"
) -> dict[str, torch.Tensor]:
    """Return random weights, small enough that activations stay finite."""
    torch.manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=kind, device=device) * 0.02

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=kind, device=device)

    tensors = {
        "transformer.vocab_embedding.weight": weight(spec.vocab_size, spec.hidden_size),
        "transformer.ln_f.weight": ones(spec.hidden_size),
    }
    if not spec.tied_embeddings:
        tensors["lm_head.weight"] = weight(spec.vocab_size, spec.hidden_size)
    for layer in range(spec.layers):
        name = f"transformer.layers.{layer}."
        tensors[f"{name}input_layernorm.weight"] = ones(spec.hidden_size)
        tensors[f"{name}post_layernorm.weight"] = ones(spec.hidden_size)
        tensors[f"{name}attention.qkv.weight"] = weight(spec.qkv_size, spec.hidden_size)
        tensors[f"{name}attention.dense.weight"] = weight(spec.hidden_size, spec.q_size)
        tensors[f"{name}mlp.gate_up.weight"] = weight(2 * spec.ffn_size, spec.hidden_size)
        tensors[f"{name}mlp.proj.weight"] = weight(spec.hidden_size, spec.ffn_size)
        if spec.qk_norm:
            tensors[f"{name}attention.q_layernorm.weight"] = ones(spec.head_size)
            tensors[f"{name}attention.k_layernorm.weight"] = ones(spec.head_size)
    for one in engine_parameters(spec, choose_quantisation(spec, "fp8" if fp8 else None)):
        if one.bits:
            tensors[one.name], tensors[scales_name(one.name)] = quantise_fp8(tensors[one.name])
    return tensors


def vllm_config(spec: ModelSpec) -> dict[str, object]:
    return {
        "architectures": [spec.architecture],
        "model_type": "qwen3" if spec.qk_norm else "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "intermediate_size": spec.ffn_size,
        "max_position_embeddings": spec.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

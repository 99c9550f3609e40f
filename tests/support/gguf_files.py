"""Write transformers models as GGUF files, in the layout of llama.cpp's converter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.out_proj": "attn_output",
    "mlp.fc_in": "ffn_up",
    "mlp.fc_out": "ffn_down",
    "transformer.word_embeddings": "token_embd",
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


_ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_neox": "gptneox",
}
_OUTPUT_NORM = {"post_attention_layernorm": "post_attention_norm"}  # norm of Gemma 2 and 3


def gguf_name(name: str, output_norms: bool = False) -> str:
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    renamed = _OUTPUT_NORM.get(inner) if output_norms else None
    return f"blk.{layer}.{renamed or _NAMES[inner]}.{kind}"


def interleave_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of q or k with the halves of each head interleaved, as in files of Llama."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def ungroup_heads(rows: np.ndarray, config: Any) -> np.ndarray:
    """Return the rows of a fused q, k and v ordered as all queries, all keys, all values.

    The model stores them grouped by KV head.
    """
    size = config.hidden_size // config.num_attention_heads
    groups = (rows.shape[0] // size - config.num_attention_heads) // 2
    by_group = rows.reshape(groups, -1, size, *rows.shape[1:])
    parts = by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:]
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    config = model.config
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.float().numpy()
        if ".mlp.experts." in name:
            tensors |= _expert_tensors(name, array)
            continue
        if ".c_" in name and array.ndim == 2:
            array = np.ascontiguousarray(array.T)
        if config.model_type in ("llama", "mixtral") and ".q_proj" in name:
            array = interleave_halves(array, config.num_attention_heads)
        if config.model_type in ("llama", "mixtral") and ".k_proj" in name:
            array = interleave_halves(array, config.num_key_value_heads)
        if "query_key_value" in name:
            array = ungroup_heads(array, config)
        if "gemma" in config.model_type and name.endswith("norm.weight"):
            array = array + 1  # the converter adds the offset of Gemma's norms
        tensors[gguf_name(name, config.model_type in ("gemma2", "gemma3_text"))] = array
    return tensors


def _expert_tensors(name: str, stacked: np.ndarray) -> dict[str, np.ndarray]:
    """Return the expert tensors of a layer, [experts, out, in], with gate and up separate."""
    layer = f"blk.{name.split('.')[2]}"
    kind = name.split(".")[-1]
    if kind == "down_proj":
        return {f"{layer}.ffn_down_exps.weight": stacked}
    gate, up = np.split(stacked, 2, axis=1)
    return {f"{layer}.ffn_gate_exps.weight": gate, f"{layer}.ffn_up_exps.weight": up}


def gguf_architecture(config: Any) -> str:
    return _ARCHITECTURES.get(config.model_type, config.model_type)


def write_gguf(
    path: Path,
    model: Any,
    kind: Kind = Kind.F32,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    packed: dict[str, tuple[np.ndarray, Kind]] | None = None,
) -> dict[str, np.ndarray]:
    """Write the model and return the tensors that a reader should find.

    Matrices have type `kind`, vectors F32, and `packed` tensors are written as they are.
    `metadata` overrides values of the model's config.
    """
    entries = {**_sizes(model.config), **(metadata or {})}
    writer = gguf.GGUFWriter(path, gguf_architecture(model.config))
    for key, value in entries.items():
        _write_value(writer, key, value)
    stored = {}
    for name, array in {**gguf_tensors(model), **(extra or {})}.items():
        used = kind if array.ndim > 1 else Kind.F32
        rows, used = (packed or {}).get(name, (gguf.quants.quantize(array, used), used))
        writer.add_tensor(name, rows, raw_dtype=used)
        stored[name] = gguf.quants.dequantize(rows, used).reshape(array.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _sizes(config: Any) -> dict[str, Any]:
    kind = gguf_architecture(config)
    sizes = {
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
    }
    if kind == "gpt2":
        return {
            **sizes,
            "gpt2.feed_forward_length": 4 * config.n_embd,
            "gpt2.attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    if kind == "gptj":
        return {
            **sizes,
            "gptj.feed_forward_length": config.n_inner or 4 * config.n_embd,
            "gptj.attention.layer_norm_epsilon": config.layer_norm_epsilon,
            "gptj.rope.dimension_count": config.rotary_dim,
        }
    if kind == "gptneox":
        rotary_fraction = config.rope_parameters.get("partial_rotary_factor", 0.25)
        return {
            **sizes,
            "gptneox.feed_forward_length": config.intermediate_size,
            "gptneox.attention.layer_norm_epsilon": config.layer_norm_eps,
            "gptneox.rope.dimension_count": int(
                rotary_fraction * config.hidden_size // config.num_attention_heads
            ),
            "gptneox.use_parallel_residual": config.use_parallel_residual,
        }
    if kind == "falcon":
        return {
            **sizes,
            "falcon.feed_forward_length": config.ffn_hidden_size,
            "falcon.attention.layer_norm_epsilon": config.layer_norm_epsilon,
            "falcon.attention.head_count_kv": config.num_kv_heads
            if config.new_decoder_architecture
            else 1,
        }
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    rope = config.rope_parameters.get("full_attention") or config.rope_parameters
    own = {f"{kind}.attention.sliding_window": getattr(config, "sliding_window", None) or 0}
    if kind == "gemma2":
        own |= {
            f"gemma2.{place}_logit_softcapping": getattr(config, f"{place}_logit_softcapping")
            for place in ("attn", "final")
        }
    if getattr(config, "num_experts_per_tok", None):
        own |= {
            f"{kind}.expert_count": config.num_local_experts,
            f"{kind}.expert_used_count": config.num_experts_per_tok,
            f"{kind}.expert_feed_forward_length": getattr(config, "moe_intermediate_size", 0),
        }
    if kind == "phi3":
        factor = config.max_position_embeddings / config.original_max_position_embeddings
        original = config.original_max_position_embeddings
        own["phi3.rope.scaling.original_context_length"] = original
        if factor > 1:
            own["phi3.rope.scaling.attn_factor"] = math.sqrt(
                1 + math.log(factor) / math.log(original)
            )
    return {
        **sizes,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.attention.key_length": head_size,
        f"{kind}.rope.dimension_count": int(head_size * rope.get("partial_rotary_factor", 1.0)),
        f"{kind}.rope.freq_base": rope["rope_theta"],
        **own,
    }


def _write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def plain_tokenizer(vocabulary: int) -> dict[str, Any]:
    """Return the smallest metadata of a tokenizer that a file needs."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"t{number}" for number in range(vocabulary)],
        "tokenizer.ggml.eos_token_id": 5,
    }


def as_tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))

"""Writes models of transformers under the names of families whose checkpoints come with code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Writer:
    write: Callable[[Any, Path], None]
    # changes the reference before anything else
    prepare: Callable[[Any], None] | None = None
    # returns the forward pass of the reference; None: the model's own
    forward: Callable[[Any], Callable[..., Any]] | None = None


def _save(folder: Path, config: dict[str, Any], tensors: State) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, _file(folder))


def _file(folder: Path) -> Path:
    return folder / "model.safetensors"


def _renamed(state: State, names: list[tuple[str, str]]) -> State:
    """Return the tensors with the parts of their names replaced."""
    tensors = {}
    for name, tensor in state.items():
        for theirs, ours in names:
            name = name.replace(theirs, ours)
        tensors[name] = tensor
    return tensors


def _fuse(state: State, parts: list[str], fused: str, kind: str = "weight") -> State:
    """Return the tensors with some modules of each layer fused by rows."""
    tensors = dict(state)
    first = f"{parts[0]}.{kind}"
    for name in [name for name in state if name.endswith(first)]:
        prefix = name.removesuffix(first)
        rows = [tensors.pop(f"{prefix}{part}.{kind}") for part in parts]
        tensors[f"{prefix}{fused}.{kind}"] = torch.cat(rows)
    return tensors


_QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
_HEADS = "num_attention_heads"


def _llama_config(model: Any, architecture: str, **options: Any) -> dict[str, Any]:
    config = model.config
    rope = dict(config.rope_parameters)
    return {
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        **options,
    }


def _write_internlm2(model: Any, folder: Path) -> None:
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    state = dict(model.state_dict())
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.self_attn."
        queries, keys, values = (state.pop(f"{prefix}{kind}_proj.weight") for kind in "qkv")
        kv_heads = config.num_key_value_heads
        grouped = (
            queries.view(kv_heads, group * size, -1),
            keys.view(kv_heads, size, -1),
            values.view(kv_heads, size, -1),
        )
        fused = torch.cat(grouped, dim=1).flatten(0, 1)
        state[f"model.layers.{layer}.attention.wqkv.weight"] = fused
    names = [
        ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attention_norm"),
        ("embed_tokens", "tok_embeddings"),
        ("lm_head", "output"),
    ]
    rope = dict(config.rope_parameters)
    options: dict[str, Any] = {"bias": False}
    if rope["rope_type"] != "default":
        options["rope_scaling"] = {"type": rope["rope_type"], "factor": rope["factor"]}
    _save(folder, _llama_config(model, "InternLM2ForCausalLM", **options), _renamed(state, names))


def _write_exaone(model: Any, folder: Path) -> None:
    names = [
        ("model.layers", "transformer.h"),
        ("self_attn.o_proj", "attn.attention.out_proj"),
        ("self_attn.", "attn.attention."),
        ("mlp.gate_proj", "mlp.c_fc_0"),
        ("mlp.up_proj", "mlp.c_fc_1"),
        ("mlp.down_proj", "mlp.c_proj"),
        ("post_attention_layernorm", "ln_2"),
        ("input_layernorm", "ln_1"),
        ("model.embed_tokens", "transformer.wte"),
        ("model.norm", "transformer.ln_f"),
    ]
    config = _llama_config(model, "ExaoneForCausalLM", activation_function="silu")
    config["num_layers"] = config.pop("num_hidden_layers")
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    _save(folder, config, _renamed(model.state_dict(), names))


def _write_qwen(model: Any, folder: Path) -> None:
    state = _fuse(model.state_dict(), _QKV, "attn.c_attn")
    state = _fuse(state, _QKV, "attn.c_attn", "bias")
    names = [
        ("model.layers", "transformer.h"),
        ("self_attn.o_proj", "attn.c_proj"),
        ("mlp.gate_proj", "mlp.w2"),
        ("mlp.up_proj", "mlp.w1"),
        ("mlp.down_proj", "mlp.c_proj"),
        ("post_attention_layernorm", "ln_2"),
        ("input_layernorm", "ln_1"),
        ("model.embed_tokens", "transformer.wte"),
        ("model.norm", "transformer.ln_f"),
    ]
    size = model.config.hidden_size // model.config.num_attention_heads
    config = _llama_config(
        model, "QWenLMHeadModel", no_bias=True, kv_channels=size, use_logn_attn=True
    )
    config["intermediate_size"] *= 2
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    config["seq_length"] = config.pop("max_position_embeddings")
    config["rotary_emb_base"] = config.pop("rope_theta")
    _save(folder, config, _renamed(state, names))


def _write_chatglm(model: Any, folder: Path) -> None:
    state = _fuse(model.state_dict(), _QKV, "self_attention.query_key_value")
    state = _fuse(state, _QKV, "self_attention.query_key_value", "bias")
    names = [
        ("model.layers", "transformer.encoder.layers"),
        ("self_attn.o_proj", "self_attention.dense"),
        ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ("model.embed_tokens", "transformer.embedding.word_embeddings"),
        ("model.norm", "transformer.encoder.final_layernorm"),
        ("lm_head", "transformer.output_layer"),
    ]
    config = model.config
    written = {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "padded_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "multi_query_attention": True,
        "multi_query_group_num": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "seq_length": config.max_position_embeddings,
        "layernorm_epsilon": config.rms_norm_eps,
        "rope_ratio": config.rope_parameters["rope_theta"] / 10000.0,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "original_rope": True,
        "post_layer_norm": True,
        "tie_word_embeddings": False,
    }
    tensors = _renamed(state, names)
    tensors["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    _save(folder, written, tensors)


def _write_baichuan(model: Any, folder: Path) -> None:
    config = _llama_config(model, "BaiChuanForCausalLM")
    _save(folder, config, _fuse(model.state_dict(), _QKV, "self_attn.W_pack"))


def _write_baichuan_13b(model: Any, folder: Path) -> None:
    config = _llama_config(model, "BaichuanForCausalLM")
    config["model_max_length"] = config.pop("max_position_embeddings")
    _save(folder, config, _fuse(model.state_dict(), _QKV, "self_attn.W_pack"))


def _write_baichuan2(model: Any, folder: Path) -> None:
    config = _llama_config(model, "BaichuanForCausalLM")
    state = _fuse(model.state_dict(), _QKV, "self_attn.W_pack")
    lengths = torch.arange(1, config["vocab_size"] + 1)[:, None].float()
    state["lm_head.weight"] = state["lm_head.weight"] * lengths  # only directions count
    _save(folder, config, state)


def _normalise_head(model: Any) -> None:
    head = model.lm_head.weight
    with torch.no_grad():
        head.copy_(torch.nn.functional.normalize(head))


def _remove_rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq.zero_()


def _with_position_biases(model: Any) -> Callable[..., Any]:
    """Return a forward pass that adds a bias per head and distance to the scores."""

    def forward(tokens: torch.Tensor) -> Any:
        count = tokens.shape[1]
        heads = model.config.num_attention_heads
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
        distance = torch.arange(count)[None, :] - torch.arange(count)[:, None]
        biases = slopes[:, None, None] * distance
        biases = biases.masked_fill(distance > 0, -math.inf)
        return model(tokens, attention_mask=biases[None])

    return forward


def _write_mistral3(model: Any, folder: Path) -> None:
    tensors = {f"language_model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors["vision_tower.patch_conv.weight"] = torch.ones(2, 3, 4, 4)
    tensors["multi_modal_projector.linear_1.weight"] = torch.ones(2, 2)
    text = _llama_config(model, "MistralForCausalLM", model_type="mistral", sliding_window=None)
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": text,
    }
    _save(folder, config, tensors)


WRITERS = {
    "internlm2": Writer(_write_internlm2),
    "exaone": Writer(_write_exaone),
    "qwen": Writer(_write_qwen),
    "chatglm": Writer(_write_chatglm),
    "baichuan": Writer(_write_baichuan),
    "baichuan-13b": Writer(_write_baichuan_13b, _remove_rope, _with_position_biases),
    "baichuan2": Writer(_write_baichuan2, _normalise_head),
    "mistral3": Writer(_write_mistral3),
}

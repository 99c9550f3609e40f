"""An engine of a tiny random Llama with a tokenizer whose words are its token ids."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream.weights.build import build_engine

VOCABULARY = 96
HIDDEN = 32
FFN = 48
LAYERS = 2
POSITIONS = 256


def build_tiny_engine(folder: Path) -> Path:
    """Write `folder/model` and `folder/engine`. Return the folder of the engine."""
    source = folder / "model"
    source.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    (source / "config.json").write_text(json.dumps(config))
    torch.manual_seed(5)
    shapes = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "lm_head": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        parts = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        parts |= {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    tensors = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    save_file(tensors, source / "model.safetensors")
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(VOCABULARY)}, "unk_token": "0"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": words,
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    return build_engine(source, folder / "engine", dtype="float32")

"""Tiny random models of the families that have one test of parity each, by variant.

A family whose class is in transformers is written by transformers. The checkpoints of the others
come with code of their own, which is never run: a model of a class with the same mathematics is
written under the family's names, by `renamed_models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from renamed_models import WRITERS
from tiny_models import GPT2_SIZES, SIZES, VOCABULARY, random_model

_SMALL = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT_SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
# the config field of the longest sequence, where it has another name
_POSITIONS = {
    "DbrxConfig": "max_seq_len",
    "GPT2Config": "n_positions",
    "GPTBigCodeConfig": "n_positions",
    "MptConfig": "max_seq_len",
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}
_DEEPSEEK2 = {
    **_DEEPSEEK,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
}
_GPT_OSS = {
    "head_dim": 16,
    "intermediate_size": 32,
    "sliding_window": 24,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "rope_parameters": {**_YARN, "truncate": False},
}
_LLAMA4 = {
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "num_local_experts": 3,
    "attention_chunk_size": 16,
    "floor_scale": 8,
}


@dataclass(frozen=True)
class Variant:
    family: str
    config_class: str  # in transformers; of the class with the same mathematics
    options: dict[str, Any] = field(default_factory=dict)
    written_as: str = ""  # a name of `renamed_models.WRITERS`; empty: as transformers writes it
    sizes: dict[str, Any] = field(default_factory=lambda: _SMALL)

    def with_positions(self, length: int) -> Variant:
        """Return the variant with sequences of this length."""
        field_name = _POSITIONS.get(self.config_class, "max_position_embeddings")
        return replace(self, options={**self.options, field_name: length})

    def model(self) -> Any:
        """Return the random model of transformers."""
        import transformers

        config = getattr(transformers, self.config_class)(**{**self.sizes, **self.options})
        model = random_model(config).eval()
        _enlarge_norms(model)
        _fill_corrections(model)
        prepare = WRITERS[self.written_as].prepare if self.written_as else None
        if prepare is not None:
            prepare(model)
        return model

    def write(self, model: Any, folder: Path) -> None:
        """Write the checkpoint."""
        if self.written_as:
            WRITERS[self.written_as].write(model, folder)
        else:
            model.save_pretrained(folder)

    def logits(self, model: Any, tokens: list[int]) -> torch.Tensor:
        """Return the logits of the reference: [tokens, vocabulary]."""
        forward: Callable[..., Any] = model
        if self.written_as and WRITERS[self.written_as].forward is not None:
            forward = WRITERS[self.written_as].forward(model)
        with torch.inference_mode():
            return forward(torch.tensor([tokens])).logits[0].float()


def _enlarge_norms(model: Any) -> None:
    """Give norms weights near 1, so that every option changes the logits by more than rounding."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            vector = parameter.dim() == 1 or name.endswith(("q_norm.weight", "k_norm.weight"))
            if vector and name.endswith(".weight"):
                parameter.add_(1.0)


def _fill_corrections(model: Any) -> None:
    """Give routers corrections that change which experts are chosen."""
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)


VARIANTS: dict[str, Variant] = {
    "smollm3": Variant("SmolLM3", "SmolLM3Config", {"num_hidden_layers": 4}),
    "smollm3-window": Variant(
        "SmolLM3",
        "SmolLM3Config",
        {
            "no_rope_layers": [0, 1],
            "use_sliding_window": True,
            "sliding_window": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granite": Variant(
        "Granite 3",
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
            "logits_scaling": 5.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite4": Variant(
        "Granite 4",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
        },
    ),
    "granite4-no-rope": Variant(
        "Granite 4",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "tie_word_embeddings": True,
        },
    ),
    "olmo": Variant("OLMo", "OlmoConfig", {"clip_qkv": 0.5}),
    "olmo2": Variant("OLMo 2", "Olmo2Config"),
    "olmo3": Variant("OLMo 3", "Olmo3Config", {"num_hidden_layers": 4, "sliding_window": 24}),
    "olmo3-yarn": Variant(
        "OLMo 3",
        "Olmo3Config",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": _YARN,
            },
        },
    ),
    "ministral": Variant(
        "Ministral",
        "MinistralConfig",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ministral3": Variant(
        "Ministral 3",
        "Ministral3Config",
        {"head_dim": 16, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}},
    ),
    "mistral3-text": Variant(
        "Mistral 3", "MistralConfig", {"sliding_window": None}, written_as="mistral3"
    ),
    "starcoder2": Variant("StarCoder 2", "Starcoder2Config", {"sliding_window": 24}),
    "starcoder2-no-bias": Variant(
        "StarCoder 2", "Starcoder2Config", {"use_bias": False, "tie_word_embeddings": False}
    ),
    "starcoder": Variant(
        "StarCoder",
        "GPTBigCodeConfig",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
        sizes=_GPT_SIZES,
    ),
    "starcoder-multi-head": Variant(
        "StarCoder",
        "GPTBigCodeConfig",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "multi_query": False},
        sizes=_GPT_SIZES,
    ),
    "internlm2": Variant("InternLM 2", "LlamaConfig", written_as="internlm2"),
    "internlm2-linear": Variant(
        "InternLM 2", "LlamaConfig", {"rope_parameters": _LINEAR}, written_as="internlm2"
    ),
    "internlm3": Variant(
        "InternLM 3",
        "InternLM3Config",
        {"head_dim": 24, "attention_bias": True, "mlp_bias": True},
    ),
    "phi": Variant("Phi 1 and 2", "PhiConfig"),
    "phi-qk-norm": Variant("Phi 1 and 2", "PhiConfig", {"qk_layernorm": True}),
    "stablelm": Variant("StableLM", "StableLmConfig", {"use_qkv_bias": True}),
    "stablelm-12b": Variant(
        "StableLM", "StableLmConfig", {"qk_layernorm": True, "use_parallel_residual": True}
    ),
    "nemotron": Variant("Nemotron", "NemotronConfig", {"head_dim": 24}),
    "nemotron-biases": Variant(
        "Nemotron", "NemotronConfig", {"attention_bias": True, "mlp_bias": True}
    ),
    "cohere": Variant("Cohere", "CohereConfig", {"attention_bias": True}),
    "cohere-qk-norm": Variant("Cohere", "CohereConfig", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": Variant("Cohere 2", "Cohere2Config", {"num_hidden_layers": 4, "sliding_window": 24}),
    "baichuan": Variant(
        "Baichuan 1", "LlamaConfig", {"num_key_value_heads": 4}, written_as="baichuan"
    ),
    "baichuan-13b": Variant(
        "Baichuan 1",
        "LlamaConfig",
        {"num_key_value_heads": 4},
        written_as="baichuan-13b",
    ),
    "baichuan2": Variant(
        "Baichuan 2",
        "LlamaConfig",
        {"num_key_value_heads": 4, "vocab_size": 125696, "hidden_size": 32},
        written_as="baichuan2",
    ),
    "mpt": Variant(
        "MPT",
        "MptConfig",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
        sizes=_GPT_SIZES,
    ),
    "mpt-six-heads": Variant(
        "MPT",
        "MptConfig",
        {
            "d_model": 96,
            "n_heads": 6,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3},
        },
        sizes=_GPT_SIZES,
    ),
    "bloom": Variant(
        "BLOOM", "BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, sizes=_GPT_SIZES
    ),
    "bloom-six-heads": Variant(
        "BLOOM", "BloomConfig", {"hidden_size": 96, "n_layer": 2, "n_head": 6}, sizes=_GPT_SIZES
    ),
    "falcon-rw": Variant(
        "Falcon-RW",
        "FalconConfig",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
        },
        sizes=_GPT_SIZES,
    ),
    "chatglm": Variant(
        "ChatGLM 2 and 3",
        "GlmConfig",
        {"head_dim": 16, "rms_norm_eps": 1e-5},
        written_as="chatglm",
    ),
    "glm4-9b": Variant("GLM-4", "GlmConfig", {"head_dim": 24}),
    "glm4-0414": Variant("GLM-4", "Glm4Config", {"head_dim": 16, "attention_bias": False}),
    "exaone3": Variant("EXAONE 3", "LlamaConfig", written_as="exaone"),
    "exaone4": Variant("EXAONE 4", "Exaone4Config", {"num_hidden_layers": 4, "sliding_window": 24}),
    "exaone4-no-window": Variant(
        "EXAONE 4",
        "Exaone4Config",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "qwen": Variant(
        "Qwen 1",
        "Qwen2Config",
        {"num_key_value_heads": 4},
        written_as="qwen",
    ),
    "dbrx": Variant(
        "DBRX",
        "DbrxConfig",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 5000.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 5, "moe_top_k": 3},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
        sizes=_GPT_SIZES,
    ),
    "deepseek2": Variant("DeepSeek V2", "DeepseekV2Config", _DEEPSEEK2),
    "deepseek2-lite": Variant(
        "DeepSeek V2",
        "DeepseekV2Config",
        {
            **_DEEPSEEK2,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek3": Variant(
        "DeepSeek V3",
        "DeepseekV3Config",
        {
            **_DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek3-one-group": Variant(
        "DeepSeek V3",
        "DeepseekV3Config",
        {
            **_DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "q_lora_rank": None,
        },
    ),
    "gptoss": Variant("gpt-oss", "GptOssConfig", _GPT_OSS),
    "gptoss-bounds": Variant(
        "gpt-oss",
        "GptOssConfig",
        {
            **_GPT_OSS,
            "attention_bias": False,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.4,  # close to the values it bounds
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": _LINEAR,
        },
    ),
    "gpt2-scaled-by-layer": Variant(
        "gpt2",
        "GPT2Config",
        {**GPT2_SIZES, "scale_attn_by_inverse_layer_idx": True},
        sizes=_GPT_SIZES,
    ),
    "gpt2-unscaled": Variant(
        "gpt2", "GPT2Config", {**GPT2_SIZES, "scale_attn_weights": False}, sizes=_GPT_SIZES
    ),
    "opt-plain-norms": Variant(
        "opt",
        "OPTConfig",
        {"ffn_dim": 96, "layer_norm_elementwise_affine": False},
        sizes={name: size for name, size in _SMALL.items() if name != "num_key_value_heads"},
    ),
    "opt-plain-post-norms": Variant(
        "opt",
        "OPTConfig",
        {
            "ffn_dim": 96,
            "layer_norm_elementwise_affine": False,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 32,
        },
        sizes={name: size for name, size in _SMALL.items() if name != "num_key_value_heads"},
    ),
    "llama4": Variant("Llama 4", "Llama4TextConfig", _LLAMA4),
    "llama4-some-dense": Variant(
        "Llama 4",
        "Llama4TextConfig",
        {
            **_LLAMA4,
            "use_qk_norm": False,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 1],
            "num_experts_per_tok": 2,
        },
    ),
}

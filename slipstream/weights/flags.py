"""Every flag of the classic tools, v0.5 to v0.18, and its effect here: one row each.

The commands `slipstream convert` and `slipstream build` make their parsers from these tables.
`releases` names the releases of the old tools that had the flag. The values of `effect`:

    used       the flag has an effect; `text` is its help
    explained  the flag is accepted and has no effect; `text` says why
    refused    the flag asks for an unsupported model; `text` says what to do instead
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Takes = Literal["nothing", "value", "maybe", "values"]
Effect = Literal["used", "explained", "refused"]


@dataclass(frozen=True)
class Flag:
    name: str  # name without leading dashes; the parser accepts '-' and '_' in it
    releases: str  # first and last release that had the flag
    takes: Takes
    effect: Effect
    text: str


def _rows(effect: Effect, takes: Takes, releases: str, text: str, names: str) -> tuple[Flag, ...]:
    return tuple(Flag(name, releases, takes, effect, text) for name in names.split())


_PLUGIN = "there are no plugins: kernels are chosen for the weights' type and the device"
_ALWAYS = "it is always on"
_AUTOMATIC = "it is chosen at run time for the device"
_FROM_CONFIG = "it is read from the model's config.json"
_TENSORRT = "it belongs to the TensorRT compiler, which is not used"
_WHOLE = "weights are read a few rows at a time"
_ONE_SHARD = "embeddings are stored whole"
_NO_PREPARATION = "an engine needs no preparation for it"
_QUANTISED = (
    "this quantisation is not available; "
    "use --use_fp8, or --use_weight_only with --weight_only_precision"
)
_FP8 = "store the linears in FP8 (e4m3, one scale per row); GPUs with FP8 multiply in it"
_OTHER_SOURCE = (
    "only Hugging Face folders of safetensors and GGUF files are read; give one as --model_dir"
)

LIMITS = (
    *_rows(
        "used",
        "value",
        "0.5-0.18",
        "maximum number of requests that run at the same time; also the batch size of a request, "
        "unless config.pbtxt sets it",
        "max_batch_size",
    ),
    *_rows("used", "value", "0.5-0.18", "maximum number of prompt tokens", "max_input_len"),
    *_rows(
        "used",
        "value",
        "0.5-0.10",
        "maximum number of generated tokens; added to max_input_len to give max_seq_len",
        "max_output_len",
    ),
    *_rows(
        "used",
        "value",
        "0.11-0.18",
        "maximum number of prompt and generated tokens together",
        "max_seq_len max_decoder_seq_len",
    ),
    *_rows("used", "value", "0.7-0.18", "maximum number of tokens in a step", "max_num_tokens"),
    *_rows("used", "value", "0.5-0.18", "maximum number of beams of a request", "max_beam_width"),
)

_SHARED = (
    *_rows("used", "value", "0.5-0.18", "folder for the result", "output_dir"),
    *_rows("explained", "value", "0.5-0.18", "there is one level of log lines", "log_level"),
    *_rows(
        "explained",
        "nothing",
        "0.5-0.18",
        _ONE_SHARD,
        "use_parallel_embedding use_embedding_sharing",
    ),
    *_rows("explained", "value", "0.5-0.18", _ONE_SHARD, "embedding_sharding_dim"),
    *_rows(
        "explained",
        "nothing",
        "0.5-0.18",
        "the KV cache has the type of the weights",
        "int8_kv_cache",
    ),
    *_rows("explained", "nothing", "0.5-0.18", _AUTOMATIC, "disable_weight_only_quant_plugin"),
    *_rows("explained", "nothing", "0.5-0.18", _WHOLE, "load_by_shard load_model_on_cpu"),
    *_rows(
        "explained",
        "value",
        "0.5-0.18",
        _FROM_CONFIG,
        "vocab_size n_positions n_layer n_head n_kv_head n_embd inter_size rms_norm_eps "
        "layer_norm_eps hidden_act rotary_base rotary_pct rotary_dim multiple_of "
        "ffn_dim_multiplier moe_num_experts moe_top_k moe_tp_mode moe_renorm_mode moe_tp_size "
        "moe_ep_size gpt_variant",
    ),
    *_rows("explained", "values", "0.5-0.18", _FROM_CONFIG, "rotary_scaling"),
    *_rows("explained", "nothing", "0.5-0.18", _FROM_CONFIG, "no_bias multi_query_mode"),
    *_rows("refused", "nothing", "0.5-0.18", _QUANTISED, "use_smooth_quant per_group"),
    *_rows("refused", "nothing", "0.5-0.18", "use --quantize awq", "use_int4_awq"),
    *_rows("used", "nothing", "0.5-0.18", _FP8, "enable_fp8 use_fp8 use_fp8_rowwise"),
    *_rows(
        "used",
        "nothing",
        "0.5-0.18",
        "store the KV cache in FP8 on devices that support it",
        "fp8_kv_cache",
    ),
    *_rows(
        "refused",
        "value",
        "0.5-0.18",
        _QUANTISED,
        "smoothquant quant_ckpt_path ammo_quant_ckpt_path modelopt_quant_ckpt_path "
        "quantized_fp8_model_path",
    ),
    *_rows(
        "explained",
        "nothing",
        "0.5-0.18",
        "it belongs to SmoothQuant, which is not used",
        "per_channel per_token",
    ),
    *_rows("explained", "value", "0.5-0.18", "int4 groups hold 32 weights", "group_size"),
    *_rows(
        "explained",
        "value",
        "0.5-0.18",
        "nothing is fetched for a calibration, whose windows have 512 tokens",
        "dataset_cache_dir calib_max_seq_length",
    ),
    *_rows(
        "used",
        "value",
        "0.5-0.18",
        "text file that --quantize awq and gptq observe the model on (default: a text of the "
        "package)",
        "calib_dataset",
    ),
    *_rows(
        "used",
        "value",
        "0.5-0.18",
        "most windows of 512 tokens of the calibration text that are run (default: 128)",
        "calib_size",
    ),
    *_rows(
        "refused",
        "value",
        "0.5-0.18",
        _OTHER_SOURCE,
        "meta_ckpt_dir nemo_ckpt_path ft_model_dir bin_model_dir",
    ),
    *_rows(
        "used",
        "nothing",
        "0.5-0.18",
        "quantise the linears to --weight_only_precision",
        "use_weight_only",
    ),
    *_rows(
        "used",
        "value",
        "0.5-0.18",
        "data type of quantised linears: int8 (default), int4 or fp8",
        "weight_only_precision",
    ),
    *_rows("used", "value", "0.5-0.18", "number of tensor-parallel ranks (default: 1)", "tp_size"),
    *_rows(
        "used", "value", "0.5-0.18", "number of pipeline-parallel ranks (default: 1)", "pp_size"
    ),
    *_rows("explained", "value", "0.16-0.18", "prompts are not divided over ranks", "cp_size"),
    *_rows(
        "explained",
        "value",
        "0.8-0.18",
        "files are written by one process",
        "workers",
    ),
)

CONVERT_FLAGS = (
    *_SHARED,
    *_rows(
        "used",
        "value",
        "0.8-0.18",
        "model to read: a Hugging Face folder, a GGUF file or a hub id",
        "model_dir",
    ),
    *_rows(
        "used",
        "value",
        "0.5-0.18",
        "data type of the weights: float16 (default), bfloat16, float32, auto, "
        "or fp8 for the linears",
        "dtype",
    ),
    *_rows(
        "used", "nothing", "0.9-0.18", "write config.json only, without weights", "save_config_only"
    ),
    *_rows("explained", "value", "0.13-0.18", "logits are float32", "logits_dtype"),
    *_rows("explained", "nothing", "0.8-0.18", _WHOLE, "load_nemo_on_gpu"),
)

_BUILD_SHARED = (
    *_SHARED,
    *LIMITS,
    *_rows(
        "explained",
        "value",
        "0.5-0.18",
        "steps have no fixed size",
        "opt_num_tokens opt_batch_size",
    ),
    *_rows(
        "explained",
        "value",
        "0.5-0.18",
        _NO_PREPARATION,
        "max_prompt_embedding_table_size max_multimodal_len max_draft_len max_encoder_input_len",
    ),
    *_rows(
        "explained",
        "value",
        "0.8-0.18",
        "draft tokens come from a draft model or from decoding_mode lookahead in config.pbtxt, for "
        "which an engine needs no preparation; Medusa and EAGLE heads are not supported",
        "speculative_decoding_mode",
    ),
    *_rows(
        "explained",
        "nothing",
        "0.5-0.18",
        _NO_PREPARATION,
        "gather_all_token_logits gather_context_logits gather_generation_logits",
    ),
    *_rows("explained", "values", "0.8-0.18", _NO_PREPARATION, "lora_target_modules"),
    *_rows("explained", "value", "0.8-0.18", _NO_PREPARATION, "max_lora_rank lora_ckpt_source"),
    *_rows(
        "refused",
        "values",
        "0.8-0.18",
        "adapters are not built into an engine; convert them with slipstream lora "
        "and send them with requests",
        "lora_dir hf_lora_dir",
    ),
    *_rows(
        "explained",
        "value",
        "0.5-0.18",
        "the block size of the KV cache is chosen for the device",
        "tokens_per_block",
    ),
    *_rows(
        "explained",
        "maybe",
        "0.5-0.18",
        _PLUGIN,
        "gpt_attention_plugin bert_attention_plugin gemm_plugin gemm_swiglu_plugin "
        "fp8_rowwise_gemm_plugin qserve_gemm_plugin lookup_plugin lora_plugin dora_plugin "
        "moe_plugin mamba_conv1d_plugin nccl_plugin identity_plugin gemm_allreduce_plugin "
        "low_latency_gemm_plugin low_latency_gemm_swiglu_plugin smooth_quant_gemm_plugin "
        "smooth_quant_plugins layernorm_quantization_plugin rmsnorm_quantization_plugin "
        "weight_only_groupwise_quant_matmul_plugin weight_only_quant_matmul_plugin "
        "quantize_per_token_plugin quantize_tensor_plugin use_gpt_attention_plugin "
        "use_gemm_plugin use_rmsnorm_plugin use_layernorm_plugin use_lookup_plugin "
        "use_lora_plugin",
    ),
    *_rows(
        "explained",
        "maybe",
        "0.5-0.18",
        _ALWAYS,
        "remove_input_padding paged_kv_cache context_fmha enable_context_fmha "
        "use_paged_context_fmha use_inflight_batching enable_chunked_context paged_state",
    ),
    *_rows("explained", "value", "0.12-0.18", "the cache is always paged", "kv_cache_type"),
    *_rows(
        "explained",
        "maybe",
        "0.5-0.18",
        _AUTOMATIC,
        "context_fmha_fp32_acc enable_context_fmha_fp32_acc bert_context_fmha_fp32_acc "
        "multi_block_mode enable_xqa disable_xqa attention_qk_half_accumulation "
        "use_fp8_context_fmha use_context_fmha_for_generation dense_context_fmha "
        "multiple_profiles use_fused_mlp use_custom_all_reduce reduce_fusion user_buffer "
        "norm_quant_fusion pp_reduce_scatter weight_streaming fast_build fuse_fp4_quant",
    ),
    *_rows(
        "explained",
        "maybe",
        "0.9-0.18",
        "attention sinks are not kept; use max_attention_window_size",
        "streamingllm enable_pos_shift",
    ),
    *_rows(
        "explained",
        "maybe",
        "0.5-0.18",
        _TENSORRT,
        "strongly_typed weight_sparsity enable_debug_output visualize visualize_network "
        "use_refit refit strip_plan use_strip_plan manage_weights dry_run monitor_memory "
        "parallel_build",
    ),
    *_rows(
        "explained",
        "value",
        "0.5-0.18",
        _TENSORRT,
        "timing_cache input_timing_cache output_timing_cache profiling_verbosity builder_opt "
        "cluster_key auto_parallel gpus_per_node random_seed",
    ),
    *_rows(
        "refused",
        "value",
        "0.9-0.18",
        "code from a model folder is never run",
        "model_cls_file model_cls_name",
    ),
    *_rows("explained", "value", "0.5-0.18", "logits are float32", "logits_dtype"),
)

BUILD_FLAGS = (
    *_BUILD_SHARED,
    *_rows(
        "used",
        "value",
        "0.8-0.18",
        "checkpoint of slipstream convert, or a model that convert accepts",
        "checkpoint_dir",
    ),
    *_rows("used", "value", "0.9-0.18", "JSON file with limits", "build_config"),
    *_rows(
        "refused",
        "value",
        "0.8-0.18",
        "an engine is built from weights; give --checkpoint_dir",
        "model_config",
    ),
    # the old build.py of each model was one command for both steps
    *_rows(
        "used",
        "value",
        "0.5-0.7",
        "model to read: a Hugging Face folder, a GGUF file or a hub id",
        "model_dir",
    ),
    *_rows(
        "used",
        "value",
        "0.5-0.7",
        "data type of the weights: float16, bfloat16, float32, auto, or fp8 for the linears",
        "dtype",
    ),
    *_rows("used", "value", "0.5-0.7", "number of ranks", "world_size"),
)

SHORT_NAMES = {"smoothquant": "sq", "multi_query_mode": "mq"}

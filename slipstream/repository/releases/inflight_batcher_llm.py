"""The tensors and parameters of `all_models/inflight_batcher_llm`, by release.

The columns are those of `tables.RELEASES`. In a cell, `=` repeats the column before and `-` means
absent. A tensor's cell is its type and dims, without the batch dimension. Letters after a slash
mean: o optional, r a scalar for the model, g ragged.
"""

TABLE = """
[preprocessing input]
QUERY STRING[-1] = = = = STRING[1]
BAD_WORDS_DICT STRING[-1] = STRING[-1]/o = = =
STOP_WORDS_DICT STRING[-1] = STRING[-1]/o = = =
REQUEST_OUTPUT_LEN UINT32[-1] = INT32[-1] = = INT32[1]
EMBEDDING_BIAS_WORDS - - STRING[-1]/o = = =
EMBEDDING_BIAS_WEIGHTS - - FP32[-1]/o = = =
END_ID - - INT32[-1]/o = = INT32[1]/o
PAD_ID - - INT32[-1]/o = = INT32[1]/o
DECODER_QUERY - - - - - STRING[1]/o
IMAGE_BYTES - - - - - UINT8[-1,-1,-1,-1]/o
IMAGE_URL - - - - - STRING[1]/o
VIDEO_BYTES - - - - - UINT8[-1,-1,-1,-1]/o
PROMPT_TABLE_EXTRA_ID - - - - - UINT64[1]/o

[preprocessing output]
INPUT_ID INT32[-1] = = = = =
REQUEST_INPUT_LEN INT32[1] = = = = =
BAD_WORDS_IDS INT32[2,-1] = = = = =
STOP_WORDS_IDS INT32[2,-1] = = = = =
REQUEST_OUTPUT_LEN UINT32[-1] = INT32[-1] = = =
EMBEDDING_BIAS - - FP32[-1] = = =
OUT_END_ID - - INT32[-1] = = INT32[1]
OUT_PAD_ID - - INT32[-1] = = INT32[1]
DECODER_INPUT_ID - - - - - INT32[-1]
REQUEST_DECODER_INPUT_LEN - - - - - INT32[1]
OUT_PROMPT_TABLE_EXTRA_IDS - - - - - UINT64[-1]
PIXEL_VALUES - - - - - FP16[-1,-1,-1,-1]
ASPECT_RATIO_IDS - - - - - INT64[-1]
ASPECT_RATIO_MASK - - - - - INT64[-1,-1]
CROSS_ATTENTION_MASK - - - - - INT64[-1,-1,-1]
IMAGE_SIZES - - - - - INT64[2]
IS_VIDEO_INPUT - - - - - BOOL[1]

[preprocessing parameter]
tokenizer_dir ${tokenizer_dir} = = = = =
tokenizer_type ${tokenizer_type} = = - - -
add_special_tokens - - False ${add_special_tokens} = =
visual_model_path - - - - - ${visual_model_path}
gpt_model_path - - - - - ${engine_dir}
max_num_images - - - - - ${max_num_images}

[tensorrt_llm input]
input_ids INT32[-1] = INT32[-1]/g = = INT32[-1]/og
input_lengths INT32[1]/r = = = = =
request_output_len UINT32[1] = INT32[1] = = INT32[1]/r
end_id UINT32[1]/or = INT32[1]/or = = =
pad_id UINT32[1]/or = INT32[1]/or = = =
beam_width UINT32[1]/or = INT32[1]/or = = =
temperature FP32[1]/or = = = = =
runtime_top_k UINT32[1]/or = INT32[1]/or = = =
runtime_top_p FP32[1]/or = = = = =
len_penalty FP32[1]/or = = = = =
repetition_penalty FP32[1]/or = = = = =
min_length UINT32[1]/or = INT32[1]/or = = =
presence_penalty FP32[1]/or = = = = =
random_seed UINT64[1]/or = = = = =
stop BOOL[1]/o = = = = BOOL[1]/or
streaming BOOL[1]/o = = = = BOOL[1]/or
draft_input_ids - - INT32[-1]/og = = =
stop_words_list - - INT32[2,-1]/og = = =
bad_words_list - - INT32[2,-1]/og = = =
embedding_bias - - FP32[-1]/og = = =
frequency_penalty - - FP32[1]/or = = =
return_log_probs - - BOOL[1]/or = = =
return_context_logits - - BOOL[1]/or = = =
return_generation_logits - - BOOL[1]/or = = =
prompt_embedding_table - - FP16[-1,-1]/og = = =
prompt_vocab_size - - INT32[1]/or = = =
lora_weights - - FP16[-1,-1]/og = = =
lora_config - - INT32[-1,3]/og = = =
draft_logits - - - FP32[-1,-1]/og = ${logits_datatype}[-1,-1]/og
lora_task_id - - - UINT64[1]/or = =
draft_acceptance_threshold - - - - FP32[1]/or =
runtime_top_p_min - - - - FP32[1]/or =
runtime_top_p_decay - - - - FP32[1]/or =
runtime_top_p_reset_ids - - - - INT32[1]/or =
early_stopping - - - - BOOL[1]/or =
beam_search_diversity_rate - - - - FP32[1]/or =
encoder_input_features - - - - - ${encoder_input_features_data_type}[-1,-1]/og
encoder_output_lengths - - - - - INT32[1]/or
num_return_sequences - - - - - INT32[1]/or
decoder_input_ids - - - - - INT32[-1]/og
decoder_input_lengths - - - - - INT32[1]/or
return_kv_cache_reuse_stats - - - - - BOOL[1]/or
exclude_input_in_output - - - - - BOOL[1]/or
prompt_table_extra_ids - - - - - UINT64[-1]/og
cross_attention_mask - - - - - BOOL[-1,-1]/og
context_phase_params - - - - - UINT8[-1]/og
skip_cross_attn_blocks - - - - - BOOL[1]/og
retention_token_range_starts - - - - - INT32[-1]/og
retention_token_range_ends - - - - - INT32[-1]/og
retention_token_range_priorities - - - - - INT32[-1]/og
retention_token_range_durations_ms - - - - - INT32[-1]/og
retention_decode_priority - - - - - INT32[1]/og
retention_decode_duration_ms - - - - - INT32[1]/og

[tensorrt_llm output]
output_ids INT32[-1,-1] = = = = =
sequence_length - - INT32[-1] = = =
cum_log_probs - - FP32[-1] = = =
output_log_probs - - FP32[-1,-1] = = =
context_logits - - FP32[-1,-1] = = ${logits_datatype}[-1,-1]
generation_logits - - FP32[-1,-1,-1] = = ${logits_datatype}[-1,-1,-1]
batch_index - - - - - INT32[1]
sequence_index - - - - - INT32[1]
context_phase_params - - - - - UINT8[-1]
kv_cache_alloc_new_blocks - - - - - INT32[1]
kv_cache_reused_blocks - - - - - INT32[1]
kv_cache_alloc_total_blocks - - - - - INT32[1]

[tensorrt_llm parameter]
max_beam_width 1 = ${max_beam_width} = = =
FORCE_CPU_ONLY_INPUT_TENSORS no = = = = =
gpt_model_type inflight_fused_batching = ${batching_strategy} = = =
gpt_model_path ${engine_dir} = = = = =
max_tokens_in_paged_kv_cache ${max_tokens_in_paged_kv_cache} = = = = =
batch_scheduler_policy ${batch_scheduler_policy} = = = = =
kv_cache_free_gpu_mem_fraction - ${kv_cache_free_gpu_mem_fraction} = = = =
max_num_sequences - ${max_num_sequences} - - - -
enable_trt_overlap - ${enable_trt_overlap} = = - -
max_attention_window_size - - ${max_attention_window_size} = = =
exclude_input_in_output - - ${exclude_input_in_output} = = =
enable_kv_cache_reuse - - ${enable_kv_cache_reuse} = = =
normalize_log_probs - - ${normalize_log_probs} = = =
enable_chunked_context - - - ${enable_chunked_context} = =
gpu_device_ids - - - ${gpu_device_ids} = =
lora_cache_optimal_adapter_size - - - ${lora_cache_optimal_adapter_size} = =
lora_cache_max_adapter_size - - - ${lora_cache_max_adapter_size} = =
lora_cache_gpu_memory_fraction - - - ${lora_cache_gpu_memory_fraction} = =
lora_cache_host_memory_bytes - - - ${lora_cache_host_memory_bytes} = =
decoding_mode - - - ${decoding_mode} = =
medusa_choices - - - ${medusa_choices} = =
sink_token_length - - - - ${sink_token_length} =
kv_cache_host_memory_bytes - - - - ${kv_cache_host_memory_bytes} =
kv_cache_onboard_blocks - - - - ${kv_cache_onboard_blocks} =
cancellation_check_period_ms - - - - ${cancellation_check_period_ms} =
stats_check_period_ms - - - - ${stats_check_period_ms} =
iter_stats_max_iterations - - - - ${iter_stats_max_iterations} =
request_stats_max_iterations - - - - ${request_stats_max_iterations} =
gpu_weights_percent - - - - ${gpu_weights_percent} =
encoder_model_path - - - - - ${encoder_engine_dir}
cross_kv_cache_fraction - - - - - ${cross_kv_cache_fraction}
participant_ids - - - - - ${participant_ids}
eagle_choices - - - - - ${eagle_choices}
enable_context_fmha_fp32_acc - - - - - ${enable_context_fmha_fp32_acc}
multi_block_mode - - - - - ${multi_block_mode}
cuda_graph_mode - - - - - ${cuda_graph_mode}
cuda_graph_cache_size - - - - - ${cuda_graph_cache_size}
speculative_decoding_fast_logits - - - - - ${speculative_decoding_fast_logits}

[postprocessing input]
TOKENS_BATCH INT32[-1,-1] = = = = =
SEQUENCE_LENGTH - - INT32[-1] = = =
CUM_LOG_PROBS - - FP32[-1] FP32[-1]/o = -
OUTPUT_LOG_PROBS - - FP32[-1,-1] FP32[-1,-1]/o = -
CONTEXT_LOGITS - - FP32[-1,-1]/o = = -
GENERATION_LOGITS - - FP32[-1,-1,-1]/o = = -

[postprocessing output]
OUTPUT STRING[-1,-1] = STRING[-1] = = =
OUT_CUM_LOG_PROBS - - FP32[-1] = = -
OUT_OUTPUT_LOG_PROBS - - FP32[-1,-1] = = -
OUT_CONTEXT_LOGITS - - FP32[-1,-1] = = -
OUT_GENERATION_LOGITS - - FP32[-1,-1,-1] = = -

[postprocessing parameter]
tokenizer_dir ${tokenizer_dir} = = = = =
tokenizer_type ${tokenizer_type} = = - - -
skip_special_tokens - - True = = ${skip_special_tokens}

[ensemble input]
INPUT_0 STRING[-1] - - - - -
INPUT_1 UINT32[-1] - - - - -
INPUT_2 STRING[-1] - - - - -
INPUT_3 STRING[-1] - - - - -
end_id UINT32[1]/o = INT32[1]/o = = =
pad_id UINT32[1]/o = INT32[1]/o = = =
runtime_top_k UINT32[1]/o - - - - -
runtime_top_p FP32[1]/o - - - - -
temperature FP32[1]/o = = = = =
len_penalty FP32[1]/o - - - - -
repetition_penalty FP32[1]/o = = = = =
min_length UINT32[1]/o = INT32[1]/o = = =
presence_penalty FP32[1]/o = = = = =
random_seed UINT64[1]/o = = = = =
beam_width UINT32[1]/o = INT32[1]/o = = =
streaming BOOL[1]/o - - - - -
text_input - STRING[-1] = = = STRING[1]
max_tokens - UINT32[-1] INT32[-1] = = INT32[1]
bad_words - STRING[-1] STRING[-1]/o = = =
stop_words - STRING[-1] STRING[-1]/o = = =
top_k - UINT32[1]/o INT32[1]/o = = =
top_p - FP32[1]/o = = = =
length_penalty - FP32[1]/o = = = =
stream - BOOL[1]/o = = = =
frequency_penalty - - FP32[1]/o = = =
return_log_probs - - BOOL[1]/o = = =
return_context_logits - - BOOL[1]/o = = =
return_generation_logits - - BOOL[1]/o = = =
prompt_embedding_table - - FP16[-1,-1]/o = = =
prompt_vocab_size - - INT32[1]/o = = =
embedding_bias_words - - STRING[-1]/o = = =
embedding_bias_weights - - FP32[-1]/o = = =
decoder_text_input - - - - - STRING[1]/o
num_return_sequences - - - - - INT32[1]/o
exclude_input_in_output - - - - - BOOL[1]/o
return_kv_cache_reuse_stats - - - - - BOOL[1]/o
prompt_table_extra_id - - - - - UINT64[1]/o
lora_task_id - - - - - UINT64[1]/o
lora_weights - - - - - FP16[-1,-1]/og
lora_config - - - - - INT32[-1,3]/og

[ensemble output]
OUTPUT_0 STRING[-1,-1] - - - - -
text_output - STRING[-1,-1] STRING[-1] = = =
cum_log_probs - - FP32[-1] = = =
output_log_probs - - FP32[-1,-1] = = =
context_logits - - FP32[-1,-1] = = ${logits_datatype}[-1,-1]
generation_logits - - FP32[-1,-1,-1] = = ${logits_datatype}[-1,-1,-1]
batch_index - - - - - INT32[1]
sequence_index - - - - - INT32[1]
kv_cache_alloc_new_blocks - - - - - INT32[1]
kv_cache_reused_blocks - - - - - INT32[1]
kv_cache_alloc_total_blocks - - - - - INT32[1]

[tensorrt_llm_bls input]
text_input - - STRING[-1] = = STRING[1]
max_tokens - - INT32[-1] = = INT32[1]
bad_words - - STRING[-1]/o = = =
stop_words - - STRING[-1]/o = = =
end_id - - INT32[1]/o = = =
pad_id - - INT32[1]/o = = =
top_k - - INT32[1]/o = = =
top_p - - FP32[1]/o = = =
temperature - - FP32[1]/o = = =
length_penalty - - FP32[1]/o = = =
repetition_penalty - - FP32[1]/o = = =
min_length - - INT32[1]/o = = =
presence_penalty - - FP32[1]/o = = =
frequency_penalty - - FP32[1]/o = = =
random_seed - - UINT64[1]/o = = =
return_log_probs - - BOOL[1]/o BOOL[1]/or = =
return_context_logits - - BOOL[1]/or = = =
return_generation_logits - - BOOL[1]/or = = =
beam_width - - INT32[1]/o = = =
stream - - BOOL[1]/o = = =
prompt_embedding_table - - FP16[-1,-1]/o = = =
prompt_vocab_size - - INT32[1]/o = = =
embedding_bias_words - - STRING[-1]/o = = =
embedding_bias_weights - - FP32[-1]/o = = =
num_draft_tokens - - - INT32[1]/o = =
use_draft_logits - - - BOOL[1]/or = =
decoder_text_input - - - - - STRING[1]/o
image_input - - - - - FP16[-1,3,-1,-1]/o
image_bytes_input - - - - - UINT8[-1,-1,-1,-1]/o
image_url_input - - - - - STRING[1]/o
video_bytes_input - - - - - UINT8[-1,-1,-1,-1]/o
exclude_input_in_output - - - - - BOOL[1]/o
num_return_sequences - - - - - INT32[1]/or
prompt_table_extra_id - - - - - UINT64[1]/o
lora_task_id - - - - - UINT64[1]/or
lora_weights - - - - - FP16[-1,-1]/og
lora_config - - - - - INT32[-1,3]/og
return_kv_cache_reuse_stats - - - - - BOOL[1]/or

[tensorrt_llm_bls output]
text_output - - STRING[-1] = = =
cum_log_probs - - FP32[-1] = = =
output_log_probs - - FP32[-1,-1] = = =
context_logits - - FP32[-1,-1] = = ${logits_datatype}[-1,-1]
generation_logits - - FP32[-1,-1,-1] = = ${logits_datatype}[-1,-1,-1]
batch_index - - - - - INT32[1]
sequence_index - - - - - INT32[1]
kv_cache_alloc_new_blocks - - - - - INT32[1]
kv_cache_reused_blocks - - - - - INT32[1]
kv_cache_alloc_total_blocks - - - - - INT32[1]

[tensorrt_llm_bls parameter]
accumulate_tokens - - ${accumulate_tokens} = = =
tensorrt_llm_model_name - - - ${tensorrt_llm_model_name} = =
tensorrt_llm_draft_model_name - - - ${tensorrt_llm_draft_model_name} = =
multimodal_encoders_name - - - - - ${multimodal_encoders_name}
"""

"""The tensors and parameters of `all_models/gpt`, by release. Its engine runs fixed batches.

The columns are those of `tables.RELEASES`. In a cell, `=` repeats the column before and `-` means
absent. A tensor's cell is its type and dims, without the batch dimension. Letters after a slash
mean: o optional, r a scalar for the model, g ragged.

`end_id` and `pad_id` are optional here and `beam_search_diversity_rate` is declared, because the
client scripts of those releases omit the first two and send the third.
"""

TABLE = """
[preprocessing input]
QUERY STRING[-1] = = = = =
BAD_WORDS_DICT STRING[-1] = = = = =
STOP_WORDS_DICT STRING[-1] = = = = =
REQUEST_OUTPUT_LEN UINT32[-1] = INT32[-1] = = =

[preprocessing output]
INPUT_ID INT32[-1] = = = = =
REQUEST_INPUT_LEN INT32[1] = = = = =
BAD_WORDS_IDS INT32[2,-1] = = = = =
STOP_WORDS_IDS INT32[2,-1] = = = = =
REQUEST_OUTPUT_LEN UINT32[-1] = INT32[-1] = = =
PROMPT_LEARNING_TASK_NAME_IDS UINT32[1] = INT32[1] = = =

[preprocessing parameter]
tokenizer_dir ${tokenizer_dir} = = = = =
tokenizer_type ${tokenizer_type} = = - - -

[tensorrt_llm input]
input_ids INT32[-1] = = = = =
input_lengths INT32[1]/r = = = = =
request_output_len UINT32[-1] = INT32[-1] = = =
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
output_log_probs BOOL[1]/or = = = = =
frequency_penalty - - FP32[1]/or = = =
beam_search_diversity_rate FP32[1]/or = = = = =

[tensorrt_llm output]
output_ids INT32[-1,-1] = = = = =
log_probs FP32[-1,-1] = = = = =

[tensorrt_llm parameter]
engine_dir ${engine_dir} = = = = =
FORCE_CPU_ONLY_INPUT_TENSORS no = = = = =

[postprocessing input]
TOKENS_BATCH INT32[-1,-1] = = = = =

[postprocessing output]
OUTPUT STRING[-1,-1] = = = = =

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
output_log_probs BOOL[1]/o = = = = =
text_input - STRING[-1] = = = =
max_tokens - UINT32[-1] INT32[-1] = = =
bad_words - STRING[-1] = = = =
stop_words - STRING[-1] = = = =
top_k - UINT32[1]/o INT32[1]/o = = =
top_p - FP32[1]/o = = = =
length_penalty - FP32[1]/o = = = =
frequency_penalty - - FP32[1]/o = = =

[ensemble output]
OUTPUT_0 STRING[-1,-1] - - - - -
text_output - STRING[-1,-1] = = = =
"""

"""The request fields that decide how tokens are chosen and when generation ends.

A new sampling parameter is added here, to `SamplingParams` (engine/sampling_params.py) and to the
sampler.
"""

from __future__ import annotations

from typing import Any

from slipstream.request_fields.field import (
    BEAM_SEARCH,
    DRAFT_MODEL,
    LARGEST_INT,
    TOKEN_ID,
    TOKEN_ID_OR_NONE,
    UINT64,
    Field,
    Range,
    Words,
)

_FRACTION = Range(0.0, 1.0)
_FRACTION_ABOVE_0 = Range(0.0, 1.0, above=True)


def _sampling(name: str, datatype: str, bound: Range | None, help: str, **more: Any) -> Field:
    """Return a field that is copied to SamplingParams and that every interface may take."""
    more.setdefault("parameter", name)
    more.setdefault("llm", more["parameter"])
    more.setdefault("allowed_as_parameter", True)
    return Field(name, datatype, bound, help, copied_unchanged=True, bls=True, **more)


_LENGTH = (
    Field(
        "max_tokens",
        "INT32",
        Range(0, LARGEST_INT, above=True),
        "Most tokens to generate. Reduced to what the context leaves after the prompt.",
        default_note="required",
        engine="request_output_len",
        preprocessing="REQUEST_OUTPUT_LEN",
        openai="max_tokens",
        llm="max_tokens",
        parameter="max_tokens",
        copied_unchanged=True,
        bls=True,
    ),
    _sampling(
        "min_length",
        "INT32",
        Range(0, LARGEST_INT),
        "Fewest tokens to generate before an end token.",
        aliases=("min_tokens",),
        parameter="min_tokens",
        openai="min_tokens",
    ),
    Field(
        "end_id",
        "INT32",
        TOKEN_ID_OR_NONE,
        "Token that ends the completion. -1: none does.",
        default_note="the model's own",
        preprocessing="END_ID",
        parameter="end_ids",
        llm="end_ids",
        bls=True,
        allowed_as_parameter=True,
    ),
    Field(
        "pad_id",
        "INT32",
        TOKEN_ID_OR_NONE,
        "Token that fills up the shorter prompts of a batch.",
        default_note="the tokenizer's own",
        preprocessing="PAD_ID",
        bls=True,
        allowed_as_parameter=True,
    ),
    Field(
        "stop_words",
        "BYTES",
        Words(64, 1024),
        "Texts that end the completion. They are not part of it.",
        preprocessing="STOP_WORDS_DICT",
        openai="stop",
        llm="stop",
        bls=True,
    ),
    Field(
        "stop_words_list",
        "INT32",
        None,
        "The stop words of the engine model, as token ids in the layout [2, length].",
        note="at most 64 words of 1024 ids",
    ),
)

_TOKEN_CHOICE = (
    _sampling(
        "temperature",
        "FP32",
        Range(0.0),
        "Divides the logits before [sampling](requests.md#which-settings-sample). 0: greedy.",
        default_note="1 (`LLM`: 0)",
        openai="temperature",
        openai_default=1.0,
    ),
    _sampling(
        "top_k",
        "INT32",
        Range(0, LARGEST_INT),
        "Sample from this many most likely tokens. 0: from all.",
        engine="runtime_top_k",
        openai="top_k",
        no_effect_values=(1,),
        conflicts=(BEAM_SEARCH,),
    ),
    _sampling(
        "top_p",
        "FP32",
        _FRACTION,
        "Sample from the most likely tokens whose probabilities reach this sum.",
        triton_bound=Range(high=1.0),  # as upstream, where 0 and less mean "not sent"
        engine="runtime_top_p",
        openai="top_p",
        conflicts=(BEAM_SEARCH,),
    ),
    _sampling(
        "min_p",
        "FP32",
        _FRACTION,
        "Sample from tokens at least this many times as likely as the most likely one.",
        openai="min_p",
        enables_sampling=True,
        conflicts=(BEAM_SEARCH,),
    ),
    _sampling(
        "typical_p",
        "FP32",
        _FRACTION_ABOVE_0,
        "Sample from the tokens nearest to the entropy whose probabilities reach this sum. 1: off.",
        openai="typical_p",
        enables_sampling=True,
        conflicts=(BEAM_SEARCH,),
    ),
    _sampling(
        "top_p_decay",
        "FP32",
        _FRACTION_ABOVE_0,
        "Multiplies `top_p` after each token.",
        engine="runtime_top_p_decay",
        conflicts=(BEAM_SEARCH, DRAFT_MODEL),
    ),
    _sampling(
        "top_p_min",
        "FP32",
        _FRACTION_ABOVE_0,
        "Lower bound of the decayed `top_p`.",
        engine="runtime_top_p_min",
    ),
    _sampling(
        "top_p_reset_ids",
        "INT32",
        TOKEN_ID_OR_NONE,
        "Token after which `top_p` is reset to its first value. -1: none.",
        engine="runtime_top_p_reset_ids",
        parameter="top_p_reset_id",
    ),
    _sampling(
        "random_seed",
        "UINT64",
        UINT64,
        "Seed of the random draws.",
        default_note="random",
        aliases=("seed",),
        parameter="seed",
        openai="seed",
    ),
    _sampling(
        "repetition_penalty",
        "FP32",
        Range(0.0, 100.0, above=True),
        "Divides positive logits of tokens in the prompt or output, multiplies negative ones.",
        openai="repetition_penalty",
    ),
    _sampling(
        "presence_penalty",
        "FP32",
        Range(-100.0, 100.0),
        "Subtracted from the logits of tokens already generated.",
        openai="presence_penalty",
        conflicts=(DRAFT_MODEL,),
    ),
    _sampling(
        "frequency_penalty",
        "FP32",
        Range(-100.0, 100.0),
        "Subtracted from the logits of tokens already generated, once per occurrence.",
        openai="frequency_penalty",
        conflicts=(DRAFT_MODEL,),
    ),
    _sampling(
        "no_repeat_ngram_size",
        "INT32",
        Range(0, 256),
        "No sequence of this many tokens occurs twice. 0: off.",
        parameter="no_repeat_ngram",
    ),
    Field(
        "bad_words",
        "BYTES",
        Words(256, 1024),
        "Texts that are never generated.",
        preprocessing="BAD_WORDS_DICT",
        conflicts=(DRAFT_MODEL,),
        openai="bad_words",
        llm="bad_words",
        bls=True,
    ),
    Field(
        "bad_words_list",
        "INT32",
        None,
        "The bad words of the engine model, as token ids in the layout [2, length].",
        note="at most 256 words of 1024 ids",
    ),
    Field(
        "embedding_bias_words",
        "BYTES",
        Words(1024, 1024),
        "Texts whose tokens get a bias.",
        preprocessing="EMBEDDING_BIAS_WORDS",
        bls=True,
    ),
    Field(
        "embedding_bias_weights",
        "FP32",
        Range(-1e4, 1e4),
        "Bias of each of `embedding_bias_words`, added to the logits of its tokens.",
        preprocessing="EMBEDDING_BIAS_WEIGHTS",
        openai="logit_bias",
        llm="logit_bias",
        parameter="logit_bias",
        bls=True,
    ),
    Field(
        "embedding_bias",
        "FP32",
        Range(-1e4, 1e4),
        "Bias of the engine model: one number for each token of the vocabulary.",
    ),
    Field(
        "guided_decoding_guide_type",
        "BYTES",
        None,
        "Kind of [grammar](requests.md#guided-decoding) that the completion follows.",
        note="json, json_schema, regex, …",
        default_note="none",
        llm="guide_type",
        parameter="guide",
        conflicts=(BEAM_SEARCH, DRAFT_MODEL),
        bls=True,
        allowed_as_parameter=True,
    ),
    Field(
        "guided_decoding_guide",
        "BYTES",
        None,
        "The grammar: a schema, an expression, and so on.",
        note="at most 2²⁰ characters",
        llm="guide",
        bls=True,
        allowed_as_parameter=True,
    ),
)

_SEQUENCES = (
    _sampling(
        BEAM_SEARCH,
        "INT32",
        Range(0, 256, above=True),
        "Beams of a beam search. 1: no beam search. The model's `max_beam_width` bounds it, too.",
        conflicts=(DRAFT_MODEL,),
    ),
    Field(
        "num_return_sequences",
        "INT32",
        Range(0, 128, above=True),
        "Completions of the prompt. With beam search: beams to return.",
        conflicts=(DRAFT_MODEL,),
        default_note="1",
        openai="n",
        llm="n",
        bls=True,
        allowed_as_parameter=True,
    ),
    _sampling(
        "length_penalty",
        "FP32",
        Range(-16.0, 16.0),
        "A beam's score is its log-probability divided by its length to this power.",
        engine="len_penalty",
    ),
    _sampling(
        "early_stopping",
        "INT32",
        Range(-LARGEST_INT, LARGEST_INT),
        "When a [beam search](requests.md#several-answers-to-one-prompt) ends.",
        note="0, 1 or another number",
    ),
    _sampling(
        "beam_search_diversity_rate",
        "FP32",
        Range(-1e4, 1e4),
        "Added to the score of a beam, times its index, when beams are selected.",
        parameter="diversity_rate",
    ),
    Field(
        "draft_input_ids",
        "INT32",
        TOKEN_ID,
        "Draft tokens of the engine model. They change the number of steps, not the output.",
    ),
    Field(
        DRAFT_MODEL,
        "INT32",
        Range(0, 256),
        "Draft tokens per step of the draft model. 0: none.",
        default_note="0",
        bls=True,
    ),
)

SAMPLING_FIELDS = {
    "Length and end": _LENGTH,
    "Choice of tokens": _TOKEN_CHOICE,
    "Several sequences and drafts": _SEQUENCES,
}

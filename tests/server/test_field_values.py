"""The table of bounds and the meaning of the sampling fields."""

from __future__ import annotations

import math

import pytest

from slipstream.engine.sampling_params import SamplingParams
from slipstream.repository.pbtxt import Message, Scalar, parse_pbtxt
from slipstream.repository.releases.tables import RELEASES, read_model
from slipstream.repository.templates import template
from slipstream.request_fields.field import Range
from slipstream.request_fields.table import ENGINE_FIELDS, FIELDS, number_range, word_bounds
from slipstream.server.fields.prompts import prompt_table_salt
from slipstream.server.fields.token_requests import read_word_list
from slipstream.server.fields.values import (
    FieldValue,
    RequestFields,
    cache_salt,
    never_ends,
    pack_words,
    read_request_fields,
    sampling_params,
    unpack_words,
)
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.kserve.tensors import Tensor

# inputs of the ensemble of 2023, whose maps name their fields
FIRST_NAMES = {"INPUT_0", "INPUT_1", "INPUT_2", "INPUT_3"}
DATATYPES = {bool: "BOOL", int: "INT32", float: "FP64", bytes: "BYTES"}


def request(**fields: object) -> InferRequest:
    inputs = {}
    for name, value in fields.items():
        data = value if isinstance(value, list) else [value]
        inputs[name] = Tensor.from_values(
            name, DATATYPES[type(data[0])] if data else "BYTES", (1, len(data)), data
        )
    return InferRequest("m", "1", inputs)


def sampling(**fields: object) -> SamplingParams:
    return sampling_params(
        read_request_fields(request(max_tokens=8, **fields), {}), lambda word: list(word.encode())
    )


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("max_tokens", 0, "max_tokens must be > 0, got 0"),
        ("max_tokens", -5, "max_tokens must be > 0, got -5"),
        ("min_length", -1, "min_length must be >= 0, got -1"),
        ("top_k", -1, "top_k must be >= 0, got -1"),
        ("top_p", 1.5, "top_p must be <= 1, got 1.5"),
        ("temperature", -1.0, "temperature must be >= 0, got -1.0"),
        ("temperature", math.nan, "temperature must be a finite number, got nan"),
        ("temperature", math.inf, "temperature must be a finite number, got inf"),
        ("repetition_penalty", 0.0, "repetition_penalty must be over 0 and at most 100, got 0.0"),
        (
            "presence_penalty",
            101.0,
            "presence_penalty must be at least -100 and at most 100, got 101.0",
        ),
        ("frequency_penalty", math.nan, "frequency_penalty must be a finite number, got nan"),
        ("length_penalty", -math.inf, "length_penalty must be a finite number, got -inf"),
        ("end_id", -2, "end_id must be >= -1, got -2"),
        (
            "embedding_bias_weights",
            [1.0, math.nan],
            "embedding_bias_weights must be a finite number, got nan",
        ),
        ("stop_words", [b"x"] * 65, "stop_words must hold at most 64 words, got 65"),
        ("bad_words", [b"x" * 1025], "a word of bad_words must have at most 1024 bytes, got 1025"),
        ("beam_width", 257, "beam_width must be over 0 and at most 256, got 257"),
        ("draft_input_ids", [3, -1], "draft_input_ids must be >= 0, got -1"),
        (
            "draft_acceptance_threshold",
            0.5,
            "draft_acceptance_threshold is not supported by this server: a draft token is "
            "accepted exactly when it is the one that is drawn in its place",
        ),
        ("cache_salt", [b"x" * 257], "a word of cache_salt must have at most 256 bytes, got 257"),
        ("beam_width", 0, "beam_width must be over 0 and at most 256, got 0"),
        ("num_return_sequences", 0, "num_return_sequences must be over 0 and at most 128, got 0"),
        ("len_penalty", 99.0, "len_penalty must be at least -16 and at most 16, got 99.0"),
        ("num_draft_tokens", 257, "num_draft_tokens must be at least 0 and at most 256, got 257"),
        (
            "use_draft_logits",
            True,
            "use_draft_logits is not supported by this server: a draft token is accepted exactly "
            "when it is the one that is drawn in its place",
        ),
        (
            "lora_task_id",
            -1,
            "lora_task_id must be at least 0 and at most 18446744073709551615, got -1",
        ),
        ("prompt_vocab_size", -1, "prompt_vocab_size must be >= 0, got -1"),
        (
            "decoder_text_input",
            b"x",
            "decoder_text_input is not supported by this server: it runs decoder-only models of text",
        ),
        (
            "context_phase_params",
            1,
            "context_phase_params is not supported by this server: it computes prompt and answer "
            "itself",
        ),
        ("runtime_top_p_decay", 0.0, "runtime_top_p_decay must be over 0 and at most 1, got 0.0"),
        ("runtime_top_p_min", 1.5, "runtime_top_p_min must be over 0 and at most 1, got 1.5"),
        ("runtime_top_p_reset_ids", -2, "runtime_top_p_reset_ids must be >= -1, got -2"),
        (
            "no_repeat_ngram_size",
            -1,
            "no_repeat_ngram_size must be at least 0 and at most 256, got -1",
        ),
        ("top_log_probs", 101, "top_log_probs must be at least 0 and at most 100, got 101"),
        ("flux_capacitor", 1.21, "flux_capacitor is not supported by this server"),
    ],
)
def test_value_out_of_bounds_is_refused_by_name(field: str, value: object, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        read_request_fields(request(**{field: value}), ENGINE_FIELDS)
    assert caught.value.message == text


def test_every_number_field_rejects_nan() -> None:
    numbers = [field for field in FIELDS.values() if isinstance(field.bound, Range)]
    assert len(numbers) > 30
    for field in numbers:
        assert number_range(field.name).problem(math.nan), field.name
    assert number_range("random_seed").problem(2**64 - 1) == ""


def test_errors_use_the_clients_name_of_a_field() -> None:
    with pytest.raises(InferenceError, match="request_output_len must be > 0, got 0"):
        read_request_fields(request(request_output_len=0), ENGINE_FIELDS)


def test_no_op_values_of_unsupported_fields_are_accepted() -> None:
    values = {
        "stop": False,
        "decoder_text_input": b"",
        "use_draft_logits": False,
        "draft_logits": [],
    }
    assert set(read_request_fields(request(**values), {})) == set(values)


def test_every_input_of_the_templates_is_in_the_table() -> None:
    """A template input that is missing in the table would be refused or ignored."""
    known = set(FIELDS)
    for name in ("tensorrt_llm", "tensorrt_llm_bls", "ensemble"):
        for item in parse_pbtxt(template(name)).fields:
            if item.name == "input" and isinstance(item.value, Message):
                tensor = next(f.value for f in item.value.fields if f.name == "name")
                assert isinstance(tensor, Scalar)
                assert ENGINE_FIELDS.get(tensor.text, tensor.text) in known, tensor.text
    for release in RELEASES:
        for name in ("tensorrt_llm", "tensorrt_llm_bls", "ensemble"):
            for tensor in read_model("inflight_batcher_llm", name, release).inputs:
                assert ENGINE_FIELDS.get(tensor.name, tensor.name) in known | FIRST_NAMES, (
                    tensor.name
                )


@pytest.mark.parametrize(
    ("fields", "greedy", "temperature", "top_k", "top_p"),
    [
        ({}, True, 0.0, 0, 1.0),
        ({"top_k": 0, "top_p": 0.0}, True, 0.0, 0, 1.0),
        ({"temperature": 0.7, "top_p": -1.0}, True, 0.0, 0, 1.0),
        ({"temperature": 0.7, "top_k": 40, "top_p": -1.0}, False, 0.7, 40, 1.0),
        ({"temperature": 0.0, "top_p": 0.9}, True, 0.0, 0, 0.9),
        ({"temperature": 0.7}, True, 0.0, 0, 1.0),
        ({"temperature": 1.0, "random_seed": 3}, True, 0.0, 0, 1.0),
        ({"temperature": 0.7, "top_k": 0, "top_p": 0.0}, True, 0.0, 0, 1.0),
        ({"temperature": 0.7, "top_p_decay": 0.5}, True, 0.0, 0, 1.0),
        ({"temperature": 0.7, "num_return_sequences": 3}, True, 0.0, 0, 1.0),
        ({"top_k": 1, "temperature": 0.7}, True, 0.0, 1, 1.0),
        ({"top_k": 1, "top_p": 0.9, "temperature": 0.7}, True, 0.0, 1, 0.9),
        ({"top_k": 1, "min_p": 0.1}, True, 0.0, 1, 1.0),
        ({"temperature": 0.7, "top_p": 1.0}, False, 0.7, 0, 1.0),
        ({"temperature": 0.7, "top_k": 40, "top_p": 0.0}, False, 0.7, 40, 1.0),
        ({"temperature": 0.7, "min_p": 0.1}, False, 0.7, 0, 1.0),
        ({"top_k": 40}, False, 1.0, 40, 1.0),
        ({"top_p": 0.5}, False, 1.0, 0, 0.5),
        ({"temperature": 0.5, "top_k": 5, "top_p": 0.9}, False, 0.5, 5, 0.9),
        ({"top_k": 0, "top_p": 0.5}, False, 1.0, 0, 0.5),
        ({"min_p": 0.1}, False, 1.0, 0, 1.0),
        ({"typical_p": 0.5}, False, 1.0, 0, 1.0),
        ({"typical_p": 1.0}, True, 0.0, 0, 1.0),
    ],
)
def test_fields_that_enable_sampling(
    fields: dict[str, object], greedy: bool, temperature: float, top_k: int, top_p: float
) -> None:
    params = sampling(**fields)
    assert params.greedy is greedy
    assert (params.temperature, params.top_k, params.top_p) == (temperature, top_k, top_p)


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [({}, 0.0), ({"temperature": 0.7}, 0.7), ({"temperature": 0.7, "top_k": 1}, 0.7)],
)
def test_temperature_divides_the_logits_of_a_beam_search(
    fields: dict[str, object], temperature: float
) -> None:
    assert sampling(beam_width=4, **fields).temperature == temperature


def test_seed_is_the_clients_or_random() -> None:
    assert sampling(random_seed=42).seed == 42
    assert sampling(random_seed=0).seed == 0
    assert len({sampling(top_p=0.9).seed for _ in range(8)}) == 8
    assert all(0 <= sampling().seed < 2**64 for _ in range(8))


@pytest.mark.parametrize(
    ("name", "value", "attribute"),
    [
        ("seed", 7, "seed"),
        ("random_seed", 7, "seed"),
        ("min_tokens", 3, "min_tokens"),
        ("top_k", 5, "top_k"),
        ("min_length", 3, "min_tokens"),
        ("temperature", 0.5, "temperature"),
        ("top_p", 0.5, "top_p"),
        ("frequency_penalty", 0.5, "frequency_penalty"),
        ("presence_penalty", 0.5, "presence_penalty"),
        ("repetition_penalty", 1.5, "repetition_penalty"),
        ("typical_p", 0.5, "typical_p"),
    ],
)
def test_an_undeclared_field_may_be_a_request_parameter(
    name: str, value: float, attribute: str
) -> None:
    asked = request(max_tokens=8)
    asked.parameters["top_p"] = 0.9  # without it the temperature has no effect
    asked.parameters[name] = value
    params = sampling_params(read_request_fields(asked, {}), lambda word: list(word.encode()))
    assert getattr(params, attribute) == value
    asked.parameters[name] = "much"
    with pytest.raises(InferenceError, match=f"{name} must be of type"):
        read_request_fields(asked, {})


def test_an_input_takes_precedence_over_a_parameter() -> None:
    asked = request(max_tokens=8, random_seed=3)
    asked.parameters["seed"] = 4
    assert read_request_fields(asked, {})["random_seed"].value == 3


def test_fields_set_the_sampling_parameters() -> None:
    params = sampling(
        min_length=3,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        end_id=7,
        pad_id=9,
        return_log_probs=True,
        embedding_bias_words=[b"ab", b"b"],
        embedding_bias_weights=[2.0, -1.0],
    )
    assert (params.max_tokens, params.min_tokens, params.end_ids, params.log_probs) == (
        8,
        3,
        (7,),
        True,
    )
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1.5,
        0.25,
        -0.5,
    )
    # added where words share a token
    assert dict(params.logit_bias) == {ord("a"): 2.0, ord("b"): 1.0}


def test_end_id_minus_one_means_no_end_id() -> None:
    fields = read_request_fields(request(max_tokens=1, end_id=-1), {})
    assert never_ends(fields)
    assert sampling(end_id=-1).end_ids == ()
    assert not never_ends(read_request_fields(request(max_tokens=1), {}))


def test_word_lists_are_packed_and_unpacked_in_the_engines_layout() -> None:
    words = [(1, 2, 3), (4, 5)]
    length, flat = pack_words(words)
    assert (length, flat) == (5, [1, 2, 3, 4, 5, 3, 5, -1, -1, -1])
    assert unpack_words(Tensor.from_values("w", "INT32", (1, 2, 5), flat)) == words
    assert pack_words([]) == (1, [0, -1])
    assert unpack_words(Tensor.from_values("w", "INT32", (1, 2, 0), [])) == []
    for ends in ([4, 9], [3, 1]):
        with pytest.raises(InferenceError, match="offsets"):
            unpack_words(Tensor.from_values("w", "INT32", (1, 2, 2), [1, 2, *ends]))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[7] * 1025], "a word of bad_words_list must have at most 1024 ids, got 1025"),
        ([[7]] * 257, "bad_words_list must hold at most 256 words, got 257"),
        ([[7, 96]], "bad_words_list holds ids that are not in the vocabulary (0 to 95)"),
    ],
)
def test_word_lists_are_bounded_in_number_and_length(ids: list[list[int]], message: str) -> None:
    length, flat = pack_words(ids)
    tensor = Tensor.from_values("bad_words_list", "INT32", (1, 2, length), flat)
    fields = RequestFields({"bad_words_list": FieldValue("bad_words_list", tensor)})
    with pytest.raises(InferenceError) as caught:
        read_word_list(fields, "bad_words_list", word_bounds("bad_words"), 96)
    assert caught.value.message == message


def test_prompt_table_ids_are_separated_from_the_cache_salt() -> None:
    def salt(tenant: str, ids: list[int]) -> str:
        fields = read_request_fields(
            request(cache_salt=tenant.encode(), prompt_table_extra_ids=ids), {}
        )
        return cache_salt(fields) + prompt_table_salt(fields)

    assert len({salt("a", [1]), salt("a1", []), salt("a", [1, 1]), salt("", [1])}) == 4


def test_getters_return_defaults_for_missing_and_empty_fields() -> None:
    fields = read_request_fields(request(top_k=7, stream=True, stop_words=[b"a", b"b"]), {})
    assert fields.integer("top_k") == 7
    assert fields.integer("beam_width", 3) == 3
    assert fields.flag("stream") is True
    assert fields.flag("return_log_probs") is False
    assert fields.texts("stop_words") == ["a", "b"]
    assert fields.text("stop_words") == "a"
    assert fields.text("cache_salt") == ""
    assert fields.numbers("top_k") == [7]
    assert fields.numbers("draft_input_ids") == []
    assert fields.given("beam_width") is None
    assert fields.require("top_k", "runtime_top_k").value == 7
    with pytest.raises(InferenceError, match="request_output_len is required"):
        fields.require("max_tokens", "request_output_len")


def test_a_field_without_values_counts_as_missing() -> None:
    fields = read_request_fields(request(max_tokens=[]), {})
    assert "max_tokens" in fields
    assert fields.given("max_tokens") is None
    assert fields.integer("max_tokens", 5) == 5

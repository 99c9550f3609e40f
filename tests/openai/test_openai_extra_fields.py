"""Fields of other servers that OpenAI does not have are supported or rejected by name."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import openai
import pytest
import transformers

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
PROMPT = "Say"
HOT: Any = {"temperature": 4.0, "seed": 3}


def complete(serving, prompt: Any = PROMPT, **fields: Any):
    given = {
        name: fields.pop(name)
        for name in ("temperature", "max_tokens", "seed", "logit_bias")
        if name in fields
    }
    return serving.client.completions.create(
        **{"model": "ensemble", "prompt": prompt, "temperature": 0, "max_tokens": 24, **given},
        extra_body=fields,
    )


def chat(serving, **fields: Any):
    return serving.client.chat.completions.create(
        model="chat", messages=MESSAGES, temperature=0, max_tokens=24, extra_body=fields
    )


def generate(serving, **fields: Any) -> str:
    body = {"text_input": PROMPT, "max_tokens": 24, **fields}
    answer = serving.client._client.post(
        f"http://127.0.0.1:{serving.port}/v2/models/ensemble/generate", json=body
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["text_output"]


def test_top_k_narrows_the_draw(serving):
    greedy = complete(serving).choices[0].text
    drawn = [
        complete(serving, temperature=4.0, seed=seed, top_k=-1).choices[0].text for seed in range(4)
    ]
    assert drawn == [
        complete(serving, temperature=4.0, seed=seed).choices[0].text for seed in range(4)
    ]
    assert set(drawn) != {greedy}
    assert {
        complete(serving, temperature=4.0, seed=seed, top_k=1).choices[0].text for seed in range(4)
    } == {greedy}
    few = complete(serving, temperature=4.0, seed=3, top_k=3).choices[0].text
    assert few == generate(serving, temperature=4.0, random_seed=3, top_k=3) != drawn[3]


def test_repetition_penalty_equals_generate(serving):
    answer = complete(serving, repetition_penalty=0.2).choices[0].text
    assert answer == generate(serving, repetition_penalty=0.2) != complete(serving).choices[0].text


def test_min_tokens_and_ignore_eos_hold_off_the_end(serving):
    end = serving.generator.tokenizer.end_ids[0]
    bias = {str(end): 100}  # the most likely token
    ended = complete(serving, logit_bias=bias)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    assert (
        complete(serving, logit_bias=bias, min_tokens=5).usage.completion_tokens
        == ended.usage.completion_tokens + 5
    )
    for_ever = complete(serving, logit_bias=bias, ignore_eos=True)
    assert (for_ever.usage.completion_tokens, for_ever.choices[0].finish_reason) == (24, "length")


def test_min_p_keeps_only_likely_tokens(serving):
    greedy, drawn = complete(serving).choices[0].text, complete(serving, **HOT).choices[0].text
    assert complete(serving, **HOT, min_p=1.0).choices[0].text == greedy != drawn
    assert complete(serving, **HOT, min_p=0).choices[0].text == drawn
    least = []
    for min_p in (0.0, 0.03):
        scored = complete(serving, **HOT, min_p=min_p, logprobs=1).choices[0].logprobs
        pairs = zip(scored.token_logprobs, scored.top_logprobs, strict=True)
        least.append(
            min(math.exp((own - max(top.values())) / HOT["temperature"]) for own, top in pairs)
        )
    assert least[0] < 0.03 <= least[1] < 1, least
    assert (
        chat(serving, min_p=1.0, **HOT).choices[0].message.content
        == chat(serving).choices[0].message.content
    )
    for wrong in (-0.1, 1.5):
        with pytest.raises(
            openai.BadRequestError, match="min_p must be at least 0 and at most 1, got"
        ) as raised:
            complete(serving, min_p=wrong)
        assert raised.value.param == "min_p"


def test_stop_token_ids_end_an_answer_like_end_tokens(serving):
    tokens = complete(serving, logprobs=0).choices[0].logprobs.tokens
    place = next(place for place in range(3, 24) if tokens[place] not in tokens[:place])
    (stop,) = serving.generator.tokenizer.encode(tokens[place], False)
    answer = complete(serving, stop_token_ids=[stop], logprobs=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (
        "".join(tokens[:place]),
        "stop",
    )
    assert answer.choices[0].logprobs.tokens == tokens[:place]
    assert (
        complete(serving, stop_token_ids=[stop], min_tokens=place + 1).usage.completion_tokens
        > place
    )
    streamed = serving.client.completions.create(
        model="ensemble",
        prompt=PROMPT,
        temperature=0,
        max_tokens=24,
        stream=True,
        extra_body={"stop_token_ids": [stop]},
    )
    parts = [part.choices[0] for part in streamed]
    assert ("".join(part.text for part in parts), parts[-1].finish_reason) == (
        "".join(tokens[:place]),
        "stop",
    )
    said = chat(serving, logprobs=True).choices[0].logprobs.content
    (stop,) = serving.generator.tokenizer.encode(said[-1].token, False)
    before = [one.token for one in said].index(said[-1].token)
    answer = chat(serving, stop_token_ids=[stop]).choices[0]
    assert (answer.message.content, answer.finish_reason) == (
        "".join(one.token for one in said[:before]),
        "stop",
    )


def test_stop_token_ids_are_added_to_the_models_end_tokens(serving):
    end = serving.generator.tokenizer.end_ids[0]
    bias = {str(end): 100}
    for fields in ({"stop_token_ids": [11]}, {"stop_token_ids": [end], "ignore_eos": True}):
        answer = complete(serving, logit_bias=bias, **fields)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    answer = complete(serving, logit_bias=bias, stop_token_ids=[11], ignore_eos=True)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([-1], "must be at least 0 and at most"),
        ([1, 10**9], "must be at least 0 and at most"),
        ([10**100], "must be at least 0 and at most"),
        (list(range(65)), "must hold at most 64 tokens, got 65"),
    ],
)
def test_wrong_stop_token_ids_are_rejected(serving, given, problem):
    with pytest.raises(openai.BadRequestError, match=f"stop_token_ids {problem}") as raised:
        chat(serving, stop_token_ids=given)
    assert raised.value.param == "stop_token_ids"
    with pytest.raises(openai.BadRequestError, match="stop_token_ids"):
        complete(serving, stop_token_ids=["</s>"])


def test_a_stop_token_is_not_part_of_the_text(serving):
    with pytest.raises(
        openai.BadRequestError, match="cannot show a token of stop_token_ids"
    ) as raised:
        complete(serving, stop_token_ids=[11], include_stop_str_in_output=True)
    assert raised.value.param == "include_stop_str_in_output"
    end = serving.generator.tokenizer.end_ids[0]
    assert complete(serving, stop_token_ids=[end], include_stop_str_in_output=True).choices


def test_bad_words_are_never_generated(serving):
    word = complete(serving).choices[0].text.strip()[:2]
    for given in (word, [word]):
        answer = complete(serving, bad_words=given).choices[0].text
        assert word not in answer
        assert answer == generate(serving, bad_words=[word])


def test_include_stop_str_in_output_shows_the_stop_word(serving):
    text = complete(serving).choices[0].text
    stop = text[5:8]
    cut = text[: text.index(stop)]
    for shown in (False, True):
        answer = complete(
            serving, stop=[stop], include_stop_str_in_output=shown, logprobs=0
        ).choices[0]
        assert (answer.text, answer.finish_reason) == (cut + stop if shown else cut, "stop")
        assert "".join(answer.logprobs.tokens).startswith(answer.text)
    parts = serving.client.completions.create(
        model="ensemble",
        prompt=PROMPT,
        temperature=0,
        max_tokens=24,
        stop=stop,
        stream=True,
        extra_body={"include_stop_str_in_output": True},
    )
    assert "".join(part.choices[0].text for part in parts) == cut + stop


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(serving):
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        serving.model_folder, truncation_side="left"
    )
    text = "Say something that is longer than this."
    for most in (1, 4, 500):
        ids = tokenizer(text, truncation=True, max_length=most)["input_ids"]
        answer = complete(serving, text, truncate_prompt_tokens=most)
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.choices[0].text == complete(serving, ids).choices[0].text
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)[
        -5:
    ]
    answer = chat(serving, truncate_prompt_tokens=5)
    assert answer.usage.prompt_tokens == 5
    assert answer.choices[0].message.content == complete(serving, ids).choices[0].text


def test_truncation_on_the_right_keeps_the_start_of_the_prompt(serving):
    ids = serving.generator.tokenizer.encode("Say a few words", True)
    expected = complete(serving, ids[:6]).choices[0].text
    for prompt in ("Say a few words", ids):
        answer = complete(serving, prompt, truncate_prompt_tokens=6, truncation_side="right")
        assert answer.usage.prompt_tokens == 6
        assert answer.choices[0].text == expected
    with pytest.raises(openai.BadRequestError) as raised:
        complete(serving, truncate_prompt_tokens=6, truncation_side="middle")
    assert raised.value.param == "truncation_side"


def test_truncate_prompt_tokens_minus_one_fits_the_model(serving):
    long = [7, *[11] * 5000]
    with pytest.raises(
        openai.BadRequestError, match="prompt has 5001 tokens, and this model takes at most"
    ) as raised:
        complete(serving, long)
    most = int(raised.value.message.split("at most ")[1].split("'")[0])
    assert (
        complete(serving, long, truncate_prompt_tokens=-1, max_tokens=1).usage.prompt_tokens == most
    )
    for wrong in (0, -2):
        with pytest.raises(
            openai.BadRequestError, match=f"truncate_prompt_tokens must be >= 1, got {wrong}"
        ):
            complete(serving, truncate_prompt_tokens=wrong)


def test_add_special_tokens_overrides_the_repository(serving):
    tokenizer = transformers.AutoTokenizer.from_pretrained(serving.model_folder)
    asked = [
        tokenizer(PROMPT, add_special_tokens=special)["input_ids"] for special in (False, True)
    ]
    assert len(asked[0]) < len(asked[1])
    for special, ids in enumerate(asked):
        answer = complete(serving, add_special_tokens=bool(special))
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.choices[0].text == complete(serving, ids).choices[0].text
    assert complete(serving, "", max_tokens=1).usage.prompt_tokens == 1
    with pytest.raises(openai.BadRequestError, match="prompt has no tokens"):
        complete(serving, "", add_special_tokens=False)
    rendered = chat(serving).usage.prompt_tokens
    assert chat(serving, add_special_tokens=False).usage.prompt_tokens == rendered
    # the template has the beginning token, and no second one is added
    assert chat(serving, add_special_tokens=True).usage.prompt_tokens == rendered


def test_different_cache_salts_share_no_cached_prompt(serving):
    prompt = [11] * 200
    found = [
        complete(
            serving, prompt, max_tokens=1, cache_salt=salt
        ).usage.prompt_tokens_details.cached_tokens
        for salt in ("ours", "ours", "theirs", "theirs")
    ]
    assert found[0] == found[2] == 0
    assert found[1] == found[3] > 0


@pytest.mark.parametrize(
    ("field", "guide", "matches"),
    [
        ("guided_regex", "[ab]{3}c", "[ab]{3}c"),
        ("guided_choice", ["yes", "no"], "yes|no"),
        ("guided_grammar", 'root ::= "x" [0-9] "y"', "x[0-9]y"),
        ("guided_json", {"type": "integer", "minimum": 3, "maximum": 5}, "[345]"),
        ("guided_json", '{"type": "boolean"}', "true|false"),
    ],
)
def test_guided_fields_constrain_the_answer(serving, field, guide, matches):
    assert re.fullmatch(matches, complete(serving, **{field: guide}).choices[0].text)
    assert re.fullmatch(matches, chat(serving, **{field: guide}).choices[0].message.content)


def test_an_invalid_guide_is_an_error_with_the_name_of_its_field(serving):
    cases: list[tuple[str, dict[str, Any]]] = [
        ("guided_regex", {"guided_regex": "(?=a)b"}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_json", {"guided_json": {"type": "nonsense"}}),
        ("guided_regex", {"guided_regex": "a", "guided_json": {}}),
        ("response_format", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        ),
    ]
    for name, fields in cases:
        with pytest.raises(openai.BadRequestError) as raised:
            chat(serving, **fields)
        assert raised.value.param == name, raised.value


IMPOSSIBLE: list[dict[str, Any]] = [
    {"guided_regex": r"[^\s\S]"},
    {"guided_json": {"$ref": "#"}},
    {"guided_grammar": "start: start start"},
]


@pytest.mark.parametrize("fields", IMPOSSIBLE, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("stream", [False, True])
def test_a_guide_that_nothing_satisfies_is_a_client_error(serving, fields, stream):
    (name,) = fields
    with pytest.raises(openai.BadRequestError) as raised:
        chat(serving, **fields, stream=stream)
    assert raised.value.param == name
    assert raised.value.body == {  # type: ignore[comparison-overlap]
        "message": f"{name} cannot be followed further: no token can come next",
        "type": "invalid_request_error",
        "param": name,
        "code": None,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_exclude_every_token_are_a_client_error(serving, stream):
    with pytest.raises(openai.BadRequestError, match="leave no token to choose") as raised:
        chat(serving, guided_choice=["a"], bad_words=["a"], stream=stream)
    assert raised.value.type == "invalid_request_error"


def test_a_guide_without_a_continuation_is_the_last_event_of_the_stream(serving):
    body = {
        "model": "ensemble",
        "prompt": PROMPT,
        "stream": True,
        "max_tokens": 60,
        "guided_grammar": f'root ::= "{"begin " * 5}" lost\nlost ::= lost lost',
    }
    answer = serving.client._client.post(
        f"http://127.0.0.1:{serving.port}/v1/completions", json=body
    )
    first, *_, last = [
        json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n") if event
    ]
    assert (answer.status_code, first["object"]) == (200, "text_completion")
    assert last["error"]["param"] == "guided_grammar"
    assert last["error"]["message"].startswith("guided_grammar cannot be followed further: ")


@pytest.mark.parametrize("choices", [[], ["a", ""]])
def test_an_empty_guided_choice_is_rejected(serving, choices):
    with pytest.raises(
        openai.BadRequestError, match="guided_choice must hold at least one text, and no empty one"
    ):
        complete(serving, guided_choice=choices)


@pytest.mark.parametrize("top_k", [10_000_000_000, 10**100])
def test_a_huge_number_is_an_error_with_the_bound(serving, top_k):
    with pytest.raises(
        openai.BadRequestError, match="top_k must be at least 0 and at most 2147483647"
    ):
        complete(serving, top_k=top_k)


def test_chat_template_kwargs_reach_the_template(serving):
    tokenizer = transformers.AutoTokenizer.from_pretrained(serving.model_folder)
    ids = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False, quietly=3
    )
    answer = chat(serving, chat_template_kwargs={"quietly": 3})
    assert answer.usage.prompt_tokens == len(ids) > chat(serving).usage.prompt_tokens
    assert answer.choices[0].message.content == complete(serving, ids).choices[0].text
    nothing = dict.fromkeys(["quietly", *map(str, range(33))])
    assert chat(serving, chat_template_kwargs=nothing).usage == chat(serving).usage


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"messages": "others"}, "chat_template_kwargs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs"),
        ({"bos_token": "!"}, "chat_template_kwargs"),
        ({"quietly": [1]}, "chat_template_kwargs.quietly"),
        ({"quietly": "x" * 2000}, "chat_template_kwargs.quietly"),
        ({"quietly": 10**1000}, "chat_template_kwargs.quietly"),
        ({str(number): 1 for number in range(33)}, "chat_template_kwargs"),
    ],
)
def test_wrong_chat_template_kwargs_are_rejected(serving, given, param):
    with pytest.raises(openai.BadRequestError) as raised:
        chat(serving, chat_template_kwargs=given)
    assert raised.value.param == param, raised.value


def test_unsupported_fields_of_other_servers_are_rejected_by_name(serving):
    refused = {
        "chat_template": "x",
        "use_beam_search": True,
        "length_penalty": 0.5,
        "guided_whitespace_pattern": " ?",
    }
    for name, value in refused.items():
        with pytest.raises(openai.BadRequestError, match=f"{name} is not supported") as raised:
            chat(serving, **{name: value})
        assert raised.value.param == name
    raw = serving.client.chat.completions.with_raw_response.create(
        model="chat",
        messages=MESSAGES,
        max_tokens=1,
        extra_body={
            "min_p": 0.0,
            "stop_token_ids": [],
            "use_beam_search": False,
            "chat_template_kwargs": {},
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "length_penalty": 1.0,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "priority": 0,
        },
    )
    assert "x-slipstream-ignored-fields" not in raw.headers
    assert json.loads(raw.text)["choices"]

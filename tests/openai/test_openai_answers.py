"""The unmodified OpenAI SDK gets the texts, counts and scores of Triton's protocol."""

from __future__ import annotations

import json
import threading
from typing import Any, Literal

import jsonschema
import pydantic
import pytest
from http_support import post

from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.models.text_model import find_text_model
from slipstream.server.openai.models import text_models

MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say something."},
]
PROMPT = "Say"
GREEDY: Any = {"temperature": 0, "max_tokens": 24}


def chat(serving, **fields):
    return serving.client.chat.completions.create(
        **{"model": "chat", "messages": MESSAGES, **GREEDY, **fields}
    )


def complete(serving, **fields):
    return serving.client.completions.create(
        **{"model": "ensemble", "prompt": PROMPT, **GREEDY, **fields}
    )


def generate(serving, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"text_input": prompt, "max_tokens": GREEDY["max_tokens"], **fields}).encode()
    answer = post(serving.port, "/v2/models/ensemble/generate", body)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def chat_ids(serving, messages) -> list[int]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(serving.model_folder)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def scores(answer) -> list[float]:
    """Which tell prompts apart whose likeliest answer is the same."""
    return [entry.logprob for entry in answer.choices[0].logprobs.content]


def test_models_with_names_of_the_tutorials_are_listed_last(serving):
    """Clients that choose the first model get an imported one, whatever its name."""
    model = find_text_model(serving.registry, "ensemble")[1]
    registry = ModelRegistry()
    for name in ("ensemble", "smollm2", "tensorrt_llm_bls", "tiny"):
        registry.add(name, 1, model)
    listed = [found.id for found in text_models(registry)]
    assert listed == ["smollm2", "tiny", "ensemble", "tensorrt_llm_bls"]


def test_text_models_and_adapters_are_listed(serving):
    listed = {model.id: model for model in serving.client.models.list()}
    assert list(listed) == ["chat", "ensemble", "french"]
    assert listed["french"].parent == "chat"
    assert serving.client.models.retrieve("french").id == "french"
    assert {model.object for model in listed.values()} == {"model"}


def test_a_completion_equals_generate(serving):
    answer = complete(serving)
    assert answer.choices[0].text == generate(serving)["text_output"]
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", "ensemble")
    ids = serving.generator.tokenizer.encode(PROMPT)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 24)
    assert answer.usage.total_tokens == len(ids) + 24
    assert complete(serving, prompt=ids).choices[0].text == answer.choices[0].text
    assert (
        len(serving.client.completions.create(model="ensemble", prompt=PROMPT).choices[0].text)
        == 16
    )


def test_a_conversation_equals_the_prompt_of_transformers(serving):
    for messages in (
        MESSAGES,
        [*MESSAGES, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "And?"}],
    ):
        ids = chat_ids(serving, messages)
        answer = chat(serving, messages=messages, logprobs=True)
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.choices[0].message.content == complete(serving, prompt=ids).choices[0].text
        expected = complete(serving, prompt=ids, logprobs=0).choices[0].logprobs
        assert (scores(answer), expected.top_logprobs) == (
            pytest.approx(expected.token_logprobs, abs=1e-5),
            None,
        )
        assert (answer.choices[0].message.role, answer.object) == ("assistant", "chat.completion")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                }
            ],
            [{"role": "user", "content": "one\ntwo"}],
        ),
        (
            [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Go."}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}],
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"x": 3}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "4"},
            ],
            [{"role": "assistant", "content": "<f(3)>"}, {"role": "tool", "content": "4"}],
        ),
    ],
)
def test_other_ways_to_write_a_message(serving, given, meant):
    answer, expected = (
        chat(serving, messages=messages, logprobs=True) for messages in (given, meant)
    )
    assert answer.usage.prompt_tokens == len(chat_ids(serving, meant))
    assert answer.choices[0].message.content == expected.choices[0].message.content
    assert scores(answer) == pytest.approx(scores(expected), abs=1e-5)
    assert scores(answer) != pytest.approx(scores(chat(serving, logprobs=True)), abs=1e-5)


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3, "temperature": 1, "seed": 5}, {"logprobs": True, "top_logprobs": 2}]
)
def test_streamed_chat_pieces_equal_the_whole_message(serving, fields):
    whole = chat(serving, **fields)
    stream = chat(serving, **fields, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[-1].choices == []
    assert (
        chunks[-1].usage.completion_tokens
        == whole.usage.completion_tokens
        == 24 * fields.get("n", 1)
    )
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert "".join(piece.delta.content or "" for piece in own) == choice.message.content
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + [
            choice.finish_reason
        ]
        if "logprobs" in fields:
            reported = [
                entry for piece in own if piece.logprobs for entry in piece.logprobs.content
            ]
            assert reported == choice.logprobs.content


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True},
        {"prompt": [PROMPT, "Well"], "n": 2, "temperature": 1, "seed": 9},
        {"logprobs": 2},
    ],
)
def test_streamed_completion_pieces_equal_the_whole_text(serving, fields):
    whole = complete(serving, **fields)
    chunks = list(complete(serving, **fields, stream=True))
    assert all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason == "length"
        if "logprobs" in fields:
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                joined = [
                    value
                    for piece in own
                    if piece.logprobs
                    for value in getattr(piece.logprobs, name)
                ]
                assert joined == getattr(choice.logprobs, name)


def test_echo_repeats_the_prompt(serving):
    plain = complete(serving).choices[0].text
    assert complete(serving, echo=True).choices[0].text == PROMPT + plain
    ids = serving.generator.tokenizer.encode(PROMPT)
    assert complete(serving, prompt=ids, echo=True).choices[0].text == PROMPT + plain


def test_log_probabilities_are_those_of_generate(serving):
    expected = generate(serving, return_log_probs=True, top_log_probs=3)
    tops, ids = expected["output_top_log_probs"], expected["output_top_ids"]
    texts = [serving.generator.tokenizer.decode([token]) for token in ids]
    reported = complete(serving, logprobs=3).choices[0]
    assert reported.logprobs.token_logprobs == pytest.approx(expected["output_log_probs"], abs=1e-5)
    assert reported.logprobs.tokens == list(reported.text)  # one letter per token
    assert reported.logprobs.text_offset == list(range(24))
    for place, top in enumerate(reported.logprobs.top_logprobs):
        mine = slice(3 * place, 3 * place + 3)
        assert list(top) == texts[mine]
        assert list(top.values()) == pytest.approx(tops[mine], abs=1e-5)
    chosen = chat(serving, logprobs=True, top_logprobs=3).choices[0]
    assert "".join(entry.token for entry in chosen.logprobs.content) == chosen.message.content
    same = complete(serving, prompt=chat_ids(serving, MESSAGES), logprobs=3).choices[0].logprobs
    for entry, value, top in zip(
        chosen.logprobs.content, same.token_logprobs, same.top_logprobs, strict=True
    ):
        assert (entry.logprob, bytes(entry.bytes).decode()) == (
            pytest.approx(value, abs=1e-5),
            entry.token,
        )
        assert {other.token: other.logprob for other in entry.top_logprobs} == pytest.approx(
            top, abs=1e-5
        )


def test_log_probs_always_include_the_sampled_token(serving):
    drawn = complete(serving, temperature=6, seed=3, logprobs=1).choices[0].logprobs
    chosen = zip(drawn.tokens, drawn.token_logprobs, drawn.top_logprobs, strict=True)
    assert all(top[token] == value == min(top.values()) for token, value, top in chosen)
    assert {len(top) for top in drawn.top_logprobs} == {1, 2}


def test_the_defaults_are_those_of_openai(serving, monkeypatch):
    requests = []
    generate = serving.generator.generate
    monkeypatch.setattr(
        serving.generator, "generate", lambda request: requests.append(request) or generate(request)
    )
    serving.client.completions.create(model="ensemble", prompt=PROMPT)
    serving.client.chat.completions.create(model="ensemble", messages=MESSAGES)
    for request, longest in zip(requests, (16, 2**31 - 1), strict=True):
        assert (request.sequences, request.stop_words, request.adapter) == (1, [], None)
        assert request.sampling == SamplingParams(
            max_tokens=longest, temperature=1.0, seed=request.sampling.seed
        )
    assert requests[0].sampling.seed != requests[1].sampling.seed


def test_an_empty_prompt_becomes_the_bos_token(serving, monkeypatch):
    expected = complete(serving, prompt=[serving.generator.tokenizer.bos_id]).choices[0].text
    assert complete(serving, prompt="").choices[0].text == expected
    # as for tokenizers that add no special tokens
    monkeypatch.setattr(serving.generator.tokenizer, "_prefix", [])
    answer = complete(serving, prompt="")
    assert (answer.choices[0].text, answer.usage.prompt_tokens) == (expected, 1)


def test_several_prompts_and_answers_come_in_order(serving):
    alone = [complete(serving, prompt=prompt).choices[0].text for prompt in (PROMPT, "Well")]
    assert alone[0] != alone[1]
    answer = complete(serving, prompt=[PROMPT, "Well"], n=2, best_of=2)
    assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    lengths = [len(serving.generator.tokenizer.encode(prompt)) for prompt in (PROMPT, "Well")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(lengths), 4 * 24)
    ids = [serving.generator.tokenizer.encode(prompt) for prompt in (PROMPT, "Well")]
    assert [choice.text for choice in complete(serving, prompt=ids).choices] == alone


@pytest.mark.parametrize("stream", [False, True])
def test_stop_words_end_the_text_and_are_not_part_of_it(serving, stream):
    text = complete(serving).choices[0].text
    word = text[9:12]
    answer = complete(serving, stop=["never there", word], stream=stream)
    pieces = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(piece.text for piece in pieces) == text[: text.index(word)]
    assert pieces[-1].finish_reason == "stop"
    said = chat(serving).choices[0].message.content
    assert chat(serving, stop=said[5]).choices[0].message.content == said[: said.index(said[5])]


def test_completion_log_probs_end_where_the_text_ends(serving):
    """Also those of a token that might have become a stop word and did not."""
    every = complete(serving, logprobs=2).choices[0]
    word = every.text[9:12]
    for stop in ([word], ["never there", every.text[-1] + "never", every.text[3:5] + "never"]):
        reported = complete(serving, logprobs=2, stop=stop)
        choice = reported.choices[0]
        length = every.text.index(word) if stop == [word] else 24
        assert (choice.text, choice.logprobs.tokens) == (
            every.text[:length],
            list(every.text[:length]),
        )
        # counts all generated tokens
        assert reported.usage.completion_tokens == min(length + len(word), 24)
        chunks = [
            chunk.choices[0] for chunk in complete(serving, logprobs=2, stop=stop, stream=True)
        ]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            whole = getattr(choice.logprobs, name)
            assert whole == getattr(every.logprobs, name)[:length]
            assert whole == [
                value
                for chunk in chunks
                if chunk.logprobs
                for value in getattr(chunk.logprobs, name)
            ]


def test_chat_log_probs_end_where_the_text_ends(serving):
    every = chat(serving, logprobs=True, top_logprobs=2).choices[0]
    word = every.message.content[9:12]
    length = every.message.content.index(word)
    whole = chat(serving, logprobs=True, top_logprobs=2, stop=word).choices[0]
    assert whole.logprobs.content == every.logprobs.content[:length]
    chunks = [
        chunk.choices[0]
        for chunk in chat(serving, logprobs=True, top_logprobs=2, stop=word, stream=True)
    ]
    reported = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert reported == whole.logprobs.content


def test_an_end_token_is_neither_text_nor_counted(serving):
    end = serving.generator.tokenizer.eos_id
    answer = complete(serving, logit_bias={end: 1000}, logprobs=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 0
    assert answer.choices[0].logprobs.tokens == []


def test_equal_seeds_give_equal_answers_and_no_seed_gives_different_ones(serving):
    warm = {"temperature": 3.0, "max_tokens": 40}
    first = chat(serving, **warm, seed=7, n=2)
    texts = [choice.message.content for choice in first.choices]
    assert [
        choice.message.content for choice in chat(serving, **warm, seed=7, n=2).choices
    ] == texts
    assert texts[0] != texts[1]
    assert chat(serving, **warm, seed=-7).choices[0].message.content != texts[0]
    assert (
        chat(serving, **warm).choices[0].message.content
        != chat(serving, **warm).choices[0].message.content
    )
    twice = complete(serving, **warm, prompt=[PROMPT, PROMPT]).choices
    assert twice[0].text != twice[1].text
    assert (
        complete(serving, temperature=3.0, top_p=0).choices[0].text
        == complete(serving).choices[0].text
    )


def test_penalties_and_logit_bias_change_the_answer(serving):
    text = complete(serving).choices[0].text
    token = serving.generator.tokenizer.encode(text[0], False)[0]
    assert complete(serving, logit_bias={str(token): -1000}).choices[0].text[0] != text[0]
    assert complete(serving, logit_bias={token: 1000}).choices[0].text == text[0] * 24
    spread = complete(serving, frequency_penalty=100).choices[0].text
    assert len(set(spread)) == 24  # each letter once
    assert (
        complete(serving, presence_penalty=100).choices[0].text[:24]
        == generate(serving, presence_penalty=100.0)["text_output"]
    )


def test_response_format_is_enforced(serving):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}, "s": {"type": "string", "maxLength": 3}},
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "pair", "strict": True, "schema": schema},
    }
    for seed in range(3):
        answer = chat(serving, response_format=wanted, max_tokens=300, temperature=1, seed=seed)
        jsonschema.validate(json.loads(answer.choices[0].message.content), schema)
        assert answer.choices[0].finish_reason == "stop"
    some = (
        chat(
            serving,
            response_format={"type": "json_object"},
            max_tokens=200,
            logit_bias={serving.generator.tokenizer.encode("}", False)[0]: 50},
        )
        .choices[0]
        .message.content
    )
    assert isinstance(json.loads(some), dict)
    assert (
        chat(serving, response_format={"type": "text"}).choices[0].message.content
        == chat(serving).choices[0].message.content
    )


def test_helpers_of_the_openai_sdk_work(serving):
    class Pair(pydantic.BaseModel):
        number: Literal[1, 2]
        word: Literal["a", "bc"]

    parsed = serving.client.chat.completions.parse(
        model="chat", messages=MESSAGES, response_format=Pair, temperature=1, max_tokens=200
    )
    assert parsed.choices[0].message.parsed == Pair.model_validate_json(
        parsed.choices[0].message.content
    )
    text = chat(serving).choices[0].message.content
    with serving.client.chat.completions.stream(
        model="chat", messages=MESSAGES, **GREEDY, stop=text[9:12]
    ) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == (text[: text.index(text[9:12])], "stop")


def test_seeds_mean_the_same_as_with_generate(serving):
    warm = {"temperature": 4.1, "top_p": 0.97, "presence_penalty": 0.3}
    expected = generate(serving, random_seed=11, **warm)["text_output"]
    assert complete(serving, seed=11, **warm).choices[0].text == expected
    assert complete(serving, seed=12, **warm).choices[0].text != expected


def test_an_adapter_is_served_as_a_model(serving):
    import torch

    ids = serving.generator.tokenizer.encode(PROMPT)
    with torch.inference_mode():
        tokens = list(ids)
        for _ in range(24):
            tokens.append(int(serving.merged(torch.tensor([tokens])).logits[0, -1].argmax()))
    expected = serving.generator.tokenizer.decode(tokens[len(ids) :])
    answer = complete(serving, model="french")
    assert (answer.choices[0].text, answer.model) == (expected, "french")
    assert expected != complete(serving).choices[0].text


def test_finding_an_adapter_does_not_list_the_others(serving, monkeypatch):
    from slipstream.server.fields.adapters import AdapterRegistry

    threads, names = [], AdapterRegistry.names
    monkeypatch.setattr(
        AdapterRegistry,
        "names",
        lambda registry: threads.append(threading.current_thread()) or names(registry),
    )
    assert complete(serving, model="french").model == "french"
    assert serving.client.models.retrieve("french").id == "french"
    assert threads == []
    assert [model.id for model in serving.client.models.list()] == ["chat", "ensemble", "french"]
    (lister,) = threads  # one listing for both models, outside the event loop
    assert lister.name.startswith("asyncio")


def test_usage_reports_cached_tokens(serving):
    prompt = "a prompt that was not sent before, and that is longer than a block of the cache. " * 2
    first, second = (complete(serving, prompt=prompt).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == first.prompt_tokens // 32 * 32 > 0

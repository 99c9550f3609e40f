"""The log-probabilities of prompts: `echo` with `logprobs`, `max_tokens` 0 and `prompt_logprobs`."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import text_samples as samples
import torch
import transformers
from http_support import post
from hypothesis import given, settings

from slipstream.engine.messages import Scores
from slipstream.server.openai.log_probs import CompletionLogProbs, TokenFormat, spell
from slipstream.server.text.tokenizer import Tokenizer

PROMPT = "Say a few words"
OTHER = "Another prompt, somewhat longer"


def ask(serving, path: str = "completions", **fields: Any) -> Any:
    body = {"model": "ensemble", "temperature": 0, "max_tokens": 6, **fields}
    answer = post(serving.port, f"/v1/{path}", json.dumps(body).encode())
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def ask_stream(serving, **fields: Any) -> list[Any]:
    body = {"model": "ensemble", "temperature": 0, "max_tokens": 6, "stream": True, **fields}
    answer = post(serving.port, "/v1/completions", json.dumps(body).encode())
    assert answer.status == 200, answer.body
    events = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@functools.cache
def reference(folder) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def expected_scores(serving, prompt: str | list[int]) -> tuple[list[int], torch.Tensor]:
    """Return the tokens of a prompt, and transformers' log-probabilities after each of them."""
    model, tokenizer = reference(serving.model_folder)
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    with torch.no_grad():
        return ids, model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("prompt", [PROMPT, [5, 40, 41, 7, 30], [5]])
@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_echoed_prompts_have_the_log_probs_of_transformers(serving, prompt, logprobs):
    ids, all_scores = expected_scores(serving, prompt)
    plain = ask(serving, prompt=prompt, logprobs=logprobs)["choices"][0]
    for _ in range(2):  # the second time, the cache has the prompt
        answer = ask(serving, prompt=prompt, logprobs=logprobs, echo=True)
        choice = answer["choices"][0]
        found = choice["logprobs"]
        count = len(ids)
        expected = all_scores[range(count - 1), ids[1:]].tolist()
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1:count] == pytest.approx(expected, abs=1e-4)
        assert found["token_logprobs"][count:] == pytest.approx(
            plain["logprobs"]["token_logprobs"], abs=1e-4
        )
        assert found["tokens"][count:] == plain["logprobs"]["tokens"]
        assert answer["usage"]["prompt_tokens"] == count
        assert answer["usage"]["completion_tokens"] == 6
        text = choice["text"]
        assert text.endswith(plain["text"])
        for start, token in zip(found["text_offset"], found["tokens"], strict=True):
            assert text.startswith(token, start) or token.startswith("<")
        if not logprobs:
            assert found["top_logprobs"] is None
            continue
        assert found["top_logprobs"][0] is None
        for place in range(1, count):
            top = found["top_logprobs"][place]
            best = all_scores[place - 1].topk(logprobs)
            assert sorted(top.values())[-logprobs:] == pytest.approx(
                best.values.tolist()[::-1], abs=1e-4
            )
            assert top[found["tokens"][place]] == found["token_logprobs"][place]
            assert len(top) <= logprobs + 1


def test_several_prompts_with_several_answers_each_have_their_own_scores(serving):
    fields: Any = {
        "prompt": [PROMPT, OTHER, [7, 8, 9]],
        "n": 2,
        "temperature": 4,
        "seed": 3,
        "logprobs": 2,
        "echo": True,
    }
    whole = ask(serving, **fields)["choices"]
    single = [
        ask(serving, prompt=prompt, logprobs=2, echo=True, max_tokens=0)["choices"][0]
        for prompt in fields["prompt"]
    ]
    assert len(whole) == 6
    for index, choice in enumerate(whole):
        alone = single[index // 2]
        count = len(alone["logprobs"]["tokens"])
        assert choice["text"].startswith(alone["text"])
        for name in ("tokens", "text_offset"):
            assert choice["logprobs"][name][:count] == alone["logprobs"][name]
        assert choice["logprobs"]["token_logprobs"][1:count] == pytest.approx(
            alone["logprobs"]["token_logprobs"][1:], abs=1e-4
        )
        assert len(choice["logprobs"]["tokens"]) == count + 6
    assert whole[0]["text"] != whole[1]["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1, "seed": 5},
        {"prompt": [PROMPT, [4] * 300]},
        {"prompt": [[5], [6]], "n": 2},
        {"max_tokens": 0},
        {"max_tokens": 0, "n": 2},
        {"stop": ["zzz"]},
        {"logprobs": None},
    ],
)
def test_streamed_scores_are_those_of_the_whole_answer(serving, fields):
    fields = {"prompt": PROMPT, "logprobs": 2, "echo": True, **fields}
    whole = ask(serving, **fields)
    chunks = ask_stream(serving, **fields, stream_options={"include_usage": True})
    assert {**chunks[-1]["usage"], "prompt_tokens_details": None} == {
        **whole["usage"],
        "prompt_tokens_details": None,
    }
    for choice in whole["choices"]:
        own = [
            piece
            for chunk in chunks
            for piece in chunk["choices"]
            if piece["index"] == choice["index"]
        ]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        if fields["logprobs"] is None:
            assert choice["logprobs"] is None
            continue
        for name in ("tokens", "text_offset"):
            joined = [
                value for piece in own if piece["logprobs"] for value in piece["logprobs"][name]
            ]
            assert joined == choice["logprobs"][name]
        assert own[0]["logprobs"]["token_logprobs"][0] is None


def test_max_tokens_0_scores_the_prompt_and_generates_nothing(serving):
    answer = ask(serving, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    ids, _ = expected_scores(serving, PROMPT)
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == len(ids)
    without = ask(serving, prompt=PROMPT, max_tokens=0, echo=True)["choices"][0]
    assert (without["text"], without["logprobs"]) == (PROMPT, None)
    end = str(serving.generator.tokenizer.end_ids[0])
    ended = ask(serving, prompt=PROMPT, max_tokens=0, echo=True, logit_bias={end: 100})
    assert ended["choices"][0]["finish_reason"] == "length"
    scored = ask(serving, prompt=PROMPT, max_tokens=0, prompt_logprobs=1)
    assert (scored["choices"][0]["text"], scored["usage"]["completion_tokens"]) == ("", 0)
    assert len(scored["choices"][0]["prompt_logprobs"]) == len(ids)


def test_the_end_token_of_an_echoed_answer_is_scored(serving):
    end = serving.generator.tokenizer.end_ids[0]
    bias = {str(end): 100}
    ids, all_scores = expected_scores(serving, PROMPT)
    for more in ({}, {"stop": ["zzz"]}):
        answer = ask(serving, prompt=PROMPT, echo=True, logprobs=1, logit_bias=bias, **more)
        found = answer["choices"][0]
        assert found["text"] == PROMPT
        assert found["finish_reason"] == "stop"
        assert len(found["logprobs"]["tokens"]) == len(ids) + 1
        assert found["logprobs"]["token_logprobs"][-1] == pytest.approx(
            all_scores[-1, end].item(), abs=1e-4
        )
        assert found["logprobs"]["text_offset"][-1] == len(PROMPT)
        assert answer["usage"]["completion_tokens"] == 1
    plain = ask(serving, prompt=PROMPT, logprobs=1, logit_bias=bias)
    assert plain["choices"][0]["logprobs"]["tokens"] == []


@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_have_ranks_and_texts_as_in_vllm(serving, count):
    ids, all_scores = expected_scores(serving, PROMPT)
    answer = ask(serving, prompt=[PROMPT, ids], prompt_logprobs=count, n=2)
    assert len(answer["choices"]) == 4
    tokenizer = serving.generator.tokenizer
    for choice in answer["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        for token, scores, entry in zip(ids[1:], all_scores, rest, strict=False):
            assert next(iter(entry)) == str(token)
            own = entry[str(token)]
            assert own["logprob"] == pytest.approx(scores[token].item(), abs=1e-4)
            assert own["rank"] == int((scores > scores[token] + 1e-5).sum()) + 1
            assert own["decoded_token"] == spell(tokenizer, token)[0]
            best = sorted(entry.values(), key=lambda one: one["rank"])[:count]
            assert [one["rank"] for one in best] == list(range(1, count + 1))
            assert [one["logprob"] for one in best] == pytest.approx(
                scores.topk(count).values.tolist(), abs=1e-4
            )


def test_chat_has_prompt_logprobs_at_its_top_level(serving):
    messages = [{"role": "user", "content": "Hello"}]
    answer = ask(
        serving,
        "chat/completions",
        messages=messages,
        prompt_logprobs=2,
        return_token_ids=True,
        n=2,
        logprobs=True,
    )
    ids, all_scores = expected_scores(serving, answer["prompt_token_ids"])
    assert len(ids) == answer["usage"]["prompt_tokens"] == len(answer["prompt_logprobs"])
    assert answer["prompt_logprobs"][0] is None
    for token, scores, entry in zip(
        ids[1:], all_scores, answer["prompt_logprobs"][1:], strict=False
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(scores[token].item(), abs=1e-4)
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 6
        assert "prompt_logprobs" not in choice


def test_echo_and_prompt_logprobs_each_have_their_own_number_of_tokens(serving):
    answer = ask(serving, prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=4)
    choice = answer["choices"][0]
    assert max(len(top) for top in choice["logprobs"]["top_logprobs"][1:]) <= 2
    assert max(len(entry) for entry in choice["prompt_logprobs"][1:]) >= 4
    wider = ask(serving, prompt=PROMPT, echo=True, logprobs=4, prompt_logprobs=0)["choices"][0]
    assert {len(entry) for entry in wider["prompt_logprobs"][1:]} == {1}
    assert max(len(top) for top in wider["logprobs"]["top_logprobs"][1:]) >= 4


def test_prompts_of_guided_answers_are_scored(serving):
    ids, all_scores = expected_scores(serving, PROMPT)
    expected = all_scores[range(len(ids) - 1), ids[1:]].tolist()
    guide: Any = {"structured_outputs": {"regex": "yes, of course"}, "max_tokens": 30}
    scored = ask(serving, prompt=PROMPT, prompt_logprobs=0, n=2, **guide)
    for choice in scored["choices"]:
        assert choice["text"] == "yes, of course"
        found = [next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"][1:]]
        assert found == pytest.approx(expected, abs=1e-4)
    echoed = ask(serving, prompt=PROMPT, echo=True, logprobs=0, **guide)["choices"][0]
    assert echoed["text"] == PROMPT + "yes, of course"
    assert echoed["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    assert "".join(echoed["logprobs"]["tokens"][len(ids) :]) == "yes, of course"
    chunks = ask_stream(serving, prompt=PROMPT, echo=True, logprobs=0, **guide)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echoed["text"]


def test_a_truncated_prompt_is_echoed_as_it_was_scored(serving):
    choice = ask(
        serving, prompt=PROMPT, echo=True, logprobs=0, max_tokens=0, truncate_prompt_tokens=4
    )["choices"][0]
    tokens = choice["logprobs"]["tokens"]
    assert choice["text"] == "".join(token for token in tokens if not token.startswith("<"))
    assert PROMPT.endswith(choice["text"])


@functools.cache
def load(kind: str) -> Tokenizer:
    return Tokenizer.load(samples.ALL[kind]())


@pytest.mark.parametrize("kind", samples.ALL)
@settings(max_examples=60, deadline=None)
@given(text=samples.plain_texts.filter(lambda text: text.strip()))
def test_offsets_of_prompt_tokens_point_at_their_texts(kind, text):
    tokenizer = load(kind)
    ids = tokenizer.encode(text, True)
    shown = tokenizer.decode(ids)  # what a prompt of token ids is echoed as
    form = TokenFormat(tokenizer, tokenizer.special_ids)
    scores = Scores(prompt_log_probs=[-1.0] * (len(ids) - 1))
    writer = CompletionLogProbs(form, 0)
    offsets = writer.prompt_document(ids, shown, scores)["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    if "\ufffd" in shown or tokenizer.token_bytes is None:
        assert max(offsets) <= len(shown)
        return
    for token, start, end in zip(ids, offsets, [*offsets[1:], len(shown)], strict=True):
        part = spell(tokenizer, token)[0]
        if token in tokenizer.special_ids:
            assert start == end
        elif not part.startswith("bytes:"):
            assert shown[start:end] in (part, part[1:] if start == 0 else part)
    answer = tokenizer.encode(" and more", False)
    whole = tokenizer.decode([*ids, *answer])
    after = writer.document([(token, -1.0, []) for token in answer])["text_offset"]
    assert after[0] == len(shown)
    if whole.startswith(shown):
        assert after[-1] < len(whole)

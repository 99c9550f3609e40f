"""Fields of vLLM and OpenAI that change how answers are made or written."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import transformers
from http_support import post
from openai_server import TEMPLATE, running

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
PROMPT = "Say"


def ask(serving, path: str = "completions", **fields: Any) -> Any:
    given = {"messages": MESSAGES} if path == "chat/completions" else {"prompt": PROMPT}
    body = {"model": "ensemble", "temperature": 0, "max_tokens": 12, **given, **fields}
    answer = post(serving.port, f"/v1/{path}", json.dumps(body).encode())
    assert answer.header("x-slipstream-ignored-fields") is None
    document = json.loads(answer.body)
    assert answer.status == 200, document
    return document


def ask_stream(serving, path: str = "completions", **fields: Any) -> list[Any]:
    given = {"messages": MESSAGES} if path == "chat/completions" else {"prompt": PROMPT}
    body = {"model": "ensemble", "temperature": 0, "max_tokens": 12, "stream": True}
    answer = post(serving.port, f"/v1/{path}", json.dumps({**body, **given, **fields}).encode())
    events = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def text(document: Any, index: int = 0) -> str:
    choice = document["choices"][index]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def chat_ids(serving, messages: Any = MESSAGES, **options: Any) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(serving.model_folder)
    return tokenizer.apply_chat_template(messages, return_dict=False, **options)


BOTH = ["completions", "chat/completions"]


# --- constraints ---


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("constraint", "older"),
    [
        ({"regex": "[ab]{4}"}, {"guided_regex": "[ab]{4}"}),
        ({"choice": ["yes", "no"]}, {"guided_choice": ["yes", "no"]}),
        ({"grammar": 'start: "x" | "y"'}, {"guided_grammar": 'start: "x" | "y"'}),
        ({"json": {"enum": [12]}}, {"guided_json": {"enum": [12]}}),
        ({"json": '{"enum": [12]}'}, {"guided_json": '{"enum": [12]}'}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_structured_outputs_equal_the_older_fields(serving, path, constraint, older):
    answer = text(ask(serving, path, structured_outputs=constraint))
    assert answer == text(ask(serving, path, **older))
    assert answer != text(ask(serving, path))


@pytest.mark.parametrize("path", BOTH)
def test_response_format_constrains_both_endpoints(serving, path):
    schema = {"enum": [[1], [2]]}
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    assert json.loads(text(ask(serving, path, response_format=form))) in ([1], [2])
    assert text(ask(serving, path, response_format={"type": "text"})) == text(ask(serving, path))


STRUCTURE = {"begin": "Q", "schema": {"enum": [7]}, "end": "!"}
TAGGED = {
    "type": "triggered_tags",
    "triggers": ["Q"],
    "tags": [
        {
            "type": "tag",
            "begin": "Q",
            "content": {"type": "json_schema", "json_schema": {"enum": [7]}},
            "end": "!",
        }
    ],
}


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [STRUCTURE],
                "triggers": ["Q"],
            }
        },
        {"response_format": {"type": "structural_tag", "format": TAGGED}},
        {
            "structured_outputs": {
                "structural_tag": json.dumps({"structures": [STRUCTURE], "triggers": ["Q"]})
            }
        },
        {"structured_outputs": {"structural_tag": {"format": TAGGED}}},
    ],
)
def test_a_structural_tag_constrains_what_follows_its_trigger(serving, fields):
    (trigger,) = serving.generator.tokenizer.encode("Q", False)
    found = ask(serving, logit_bias={str(trigger): 30}, max_tokens=24, **fields)
    assert "Q7!Q7!" in text(found)
    assert "Q" not in text(found).replace("Q7", "")


def test_only_allowed_tokens_are_generated(serving):
    allowed = serving.generator.tokenizer.encode("abc", False)
    for path in BOTH:
        answer = text(ask(serving, path, allowed_token_ids=allowed, temperature=2, seed=1))
        assert set(answer) <= set("abc")
        assert len(answer) == 12


# --- conversations ---


def test_a_final_message_is_continued(serving):
    messages = [*MESSAGES, {"role": "assistant", "content": "Sure, I"}]
    ids = chat_ids(serving, messages, add_generation_prompt=False, continue_final_message=True)
    expected = ask(serving, prompt=ids)
    for fields in ({}, {"add_generation_prompt": False}):
        answer = ask(
            serving, "chat/completions", messages=messages, continue_final_message=True, **fields
        )
        assert text(answer) == text(expected)
        assert answer["usage"]["prompt_tokens"] == len(ids)
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    answer = post(serving.port, "/tokenize", json.dumps({"model": "ensemble", **body}).encode())
    assert json.loads(answer.body)["tokens"] == ids


def test_a_prompt_without_the_generation_prompt(serving):
    ids = chat_ids(serving, add_generation_prompt=False)
    answer = ask(serving, "chat/completions", add_generation_prompt=False)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert text(answer) == text(ask(serving, prompt=ids))
    assert answer["usage"] != ask(serving, "chat/completions")["usage"]


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    """Serve a template that writes its variables."""
    shown = (
        "{{ reasoning_effort }}{{ enable_thinking }}"
        "{% for d in documents or [] %}{{ d.title }}{% endfor %}"
    )
    folder = tmp_path_factory.mktemp("variables")
    with running(folder, template=shown + TEMPLATE) as serving:
        yield serving


def test_reasoning_effort_and_documents_reach_the_template(variables):
    def prompt(**fields: Any) -> str:
        answer = ask(variables, "chat/completions", return_token_ids=True, max_tokens=1, **fields)
        return variables.generator.tokenizer.decode(answer["prompt_token_ids"]).split("[")[0]

    assert prompt() == ""
    assert prompt(reasoning_effort="high") == "high"
    assert prompt(reasoning_effort="none") == "noneFalse"
    assert prompt(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == (
        "noneTrue"
    )
    assert prompt(documents=[{"title": "one"}, {"title": "two"}]) == "onetwo"


# --- answers ---


def test_special_tokens_are_shown_where_they_are_not_skipped(serving):
    begin = serving.generator.tokenizer.bos_id
    name = serving.generator.tokenizer.decode([begin], False)
    bias = {str(begin): 100}
    for path in BOTH:
        fields: Any = {"logit_bias": bias, "max_tokens": 3, "logprobs": path != "completions" or 1}
        hidden = ask(serving, path, **fields)
        shown = ask(serving, path, **fields, skip_special_tokens=False)
        assert (text(hidden), text(shown)) == ("", name * 3)
        assert text(ask(serving, path, **fields, skip_special_tokens=True)) == ""
        stopped = ask(serving, path, **fields, skip_special_tokens=False, stop=[name * 2])
        assert text(stopped) == ""
        assert stopped["choices"][0]["finish_reason"] == "stop"
    scored = ask(serving, logit_bias=bias, max_tokens=3, logprobs=1, skip_special_tokens=False)
    offsets = scored["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, len(name), 2 * len(name)]
    hidden = ask(serving, logit_bias=bias, max_tokens=3, logprobs=1)
    assert hidden["choices"][0]["logprobs"]["text_offset"] == [0, 0, 0]


def test_fields_without_an_effect_are_accepted(serving):
    fields = {
        "metadata": {f"key{number}": "x" * 512 for number in range(16)},
        "store": True,
        "spaces_between_special_tokens": False,
        "structured_outputs": {},
    }
    for path in BOTH:
        assert text(ask(serving, path, **fields)) == text(ask(serving, path))


def test_best_of_returns_the_likeliest_answers(serving):
    fields: Any = {"temperature": 4, "seed": 3, "logprobs": 0}
    every = ask(serving, n=5, **fields)["choices"]
    ranked = sorted(
        every,
        key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]) / 12,
    )
    best = ask(serving, n=2, best_of=5, **fields)
    assert [choice["text"] for choice in best["choices"]] == [one["text"] for one in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 5 * 12
    plain = ask(serving, best_of=5, **{**fields, "logprobs": None}, echo=True)
    assert plain["choices"][0]["text"] == PROMPT + ranked[0]["text"]
    assert plain["choices"][0]["logprobs"] is None
    two = ask(serving, prompt=[PROMPT, "Other"], best_of=3, echo=True, **fields)["choices"]
    assert [
        choice["text"].startswith(start)
        for choice, start in zip(two, (PROMPT, "Other"), strict=True)
    ] == [True, True]


@pytest.mark.parametrize("path", BOTH)
def test_token_ids_are_returned_whole_and_in_streams(serving, path):
    fields: Any = {"return_token_ids": True, "n": 2, "temperature": 3, "seed": 9, "stop": ["zz"]}
    whole = ask(serving, path, **fields)
    chunks = ask_stream(serving, path, **fields)
    decode = serving.generator.tokenizer.decode
    for choice in whole["choices"]:
        assert decode(choice["token_ids"]) == (choice.get("text") or choice["message"]["content"])
        own = [
            (chunk, piece)
            for chunk in chunks
            for piece in chunk["choices"]
            if piece["index"] == choice["index"]
        ]
        streamed = [token for _, piece in own for token in piece.get("token_ids", ())]
        assert streamed == choice["token_ids"]
        holders = [piece if path == "completions" else chunk for chunk, piece in own]
        prompt = whole["prompt_token_ids"] if path != "completions" else choice["prompt_token_ids"]
        assert holders[0]["prompt_token_ids"] == prompt
        assert all("prompt_token_ids" not in holder for holder in holders[1:])
        assert len(prompt) == whole["usage"]["prompt_tokens"]
    assert "token_ids" not in ask(serving, path)["choices"][0]


def test_scored_tokens_are_named_by_their_ids(serving):
    fields: Any = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    answer = ask(serving, logprobs=2, echo=True, **fields)["choices"][0]
    ids = [*answer["prompt_token_ids"], *answer["token_ids"]]
    assert answer["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert all(name.startswith("token_id:") for name in answer["logprobs"]["top_logprobs"][1])
    answer = ask(serving, "chat/completions", logprobs=True, top_logprobs=1, **fields)["choices"][0]
    content = answer["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [
        f"token_id:{token}" for token in answer["token_ids"]
    ]
    assert bytes(content[0]["bytes"]).decode() == answer["message"]["content"][:1]


@pytest.mark.parametrize("path", BOTH)
def test_every_chunk_has_the_usage_so_far(serving, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = ask_stream(serving, path, stream_options=options, n=2)
    counts = {0: [], 1: []}
    for chunk in chunks[:-1]:
        (piece,) = chunk["choices"]
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counts[piece["index"]].append(usage["completion_tokens"])
    for found in counts.values():
        assert found == sorted(found)
        assert found[-1] == 12
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    plain = ask_stream(serving, path, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in plain)


def test_a_request_id_names_the_answer(serving):
    assert ask(serving, request_id="mine-1")["id"] == "cmpl-mine-1"
    assert ask(serving, "chat/completions", request_id="a.b:c")["id"] == "chatcmpl-a.b:c"


def test_requests_of_a_lower_priority_number_run_first(serving, monkeypatch):
    submitted = []
    submit = serving.engine.submit

    def record(request):
        submitted.append(request.priority)
        return submit(request)

    monkeypatch.setattr(serving.engine, "submit", record)
    for priority in (None, 0, 5, -3):
        ask(serving, max_tokens=1, **({} if priority is None else {"priority": priority}))
    usual = submitted[0]
    assert submitted == [usual, usual, usual - 5, usual + 3]


# --- broken templates ---


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    with running(tmp_path_factory.mktemp("broken"), template="{% for %}") as serving:
        yield serving


def test_a_broken_template_is_an_error_of_the_server(broken):
    with pytest.raises(openai.InternalServerError) as caught:
        broken.client.chat.completions.create(model="chat", messages=MESSAGES)
    assert caught.value.type == "server_error"
    assert caught.value.param is None
    assert "the chat template of this model is not valid at line 1" in caught.value.message
    body = json.dumps({"messages": json.dumps(MESSAGES), "max_tokens": 2}).encode()
    for route in ("generate", "generate_stream"):
        answer = post(broken.port, f"/v2/models/ensemble/{route}", body)
        assert answer.status == 500
        assert b"the chat template of this model is not valid at line 1" in answer.body
    wrong = json.dumps({"messages": [{"role": "user"}], "model": "chat"}).encode()
    assert post(broken.port, "/v1/chat/completions", wrong).status == 400

"""Stored responses: read, listed, continued, cancelled and deleted; bounded; apart by API key."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from called_functions import replace_answers
from http_support import RunningServer, wait_until
from openai_server import sdk
from response_calls import chatted, respond

from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.kserve.access import Access
from slipstream.server.openai.answers.parts import CallArguments, CallStart, Reasoning
from slipstream.server.openai.responses import background
from slipstream.server.openai.responses.items import read_input
from slipstream.server.openai.responses.output import Output
from slipstream.server.openai.responses.store import ItemFinder, ResponseStore, StoredResponse, Turn
from slipstream.server.services import create_app, create_context


def test_a_stored_response_is_retrieved_and_deleted(serving):
    responses = serving.client.responses
    response = respond(serving)
    assert responses.retrieve(response.id) == response
    responses.delete(response.id)
    for call in (
        responses.retrieve,
        responses.delete,
        responses.input_items.list,
        responses.cancel,
    ):
        with pytest.raises(openai.NotFoundError, match="not found"):
            call(response.id)
    unstored = respond(serving, store=False)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(unstored.id)


def test_a_stream_is_stored(serving):
    final = list(respond(serving, stream=True))[-1].response
    assert serving.client.responses.retrieve(final.id) == final


def test_a_conversation_continues_from_a_response(serving):
    first = respond(serving, "One", instructions="Obey.")
    second = respond(serving, "Two", previous_response_id=first.id)
    # the earlier responses need not be stored any more
    serving.client.responses.delete(first.id)
    third = respond(serving, "Three", previous_response_id=second.id, store=False)
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "Three"},
    ]
    assert second.usage.input_tokens == chatted(serving, messages[:3]).usage.prompt_tokens
    chat = chatted(serving, messages)
    assert third.usage.input_tokens == chat.usage.prompt_tokens
    assert third.output_text == chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as raised:
        respond(serving, "Two", previous_response_id=first.id)
    assert raised.value.code == "previous_response_not_found"


def test_input_items_are_listed_in_pages(serving):
    first = respond(
        serving, [{"role": "system", "content": "Obey."}, {"role": "user", "content": "One"}]
    )
    second = respond(serving, "Two", previous_response_id=first.id)
    listing = serving.client.responses.input_items.list
    items = list(listing(second.id, order="asc").data)
    assert [(item.role, item.content[0].text) for item in items] == [
        ("system", "Obey."),
        ("user", "One"),
        ("assistant", first.output_text),
        ("user", "Two"),
    ]
    assert items[2].id == first.output[0].id
    page = listing(second.id, limit=3)
    assert [item.id for item in page.data] == [item.id for item in items[:0:-1]]
    assert (page.has_more, page.first_id, page.last_id) == (True, items[3].id, items[1].id)
    # the SDK fetches the next pages
    assert [item.id for item in listing(second.id, limit=1)] == [item.id for item in items[::-1]]
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_none"}):
        with pytest.raises(openai.BadRequestError) as raised:
            listing(second.id, **wrong)
        assert raised.value.param == next(iter(wrong))


def test_an_item_is_referred_to_by_its_id(serving):
    first = respond(serving, "One")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    response = respond(serving, [reference, {"role": "user", "content": "Two"}])
    messages = [
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Two"},
    ]
    assert response.output_text == chatted(serving, messages).choices[0].message.content


def test_a_background_response_is_polled(serving):
    response = respond(serving, background=True)
    assert (response.status, response.output) == ("queued", [])
    retrieve = serving.client.responses.retrieve
    wait_until(lambda: retrieve(response.id).status not in ("queued", "in_progress"))
    done = retrieve(response.id)
    assert (done.status, done.output_text) == ("incomplete", respond(serving).output_text)
    assert done.background
    with pytest.raises(openai.BadRequestError, match="incomplete"):
        serving.client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        serving.client.responses.cancel(respond(serving).id)
    with pytest.raises(openai.BadRequestError, match="stream"):
        retrieve(response.id, stream=True)


def test_a_background_response_is_cancelled(serving, monkeypatch):
    states = []

    async def generate(request):
        states.append("running")
        try:
            yield TextOutput([5], text="Well", prompt_tokens=9)
            await asyncio.Event().wait()
        finally:
            states.append("ended")

    monkeypatch.setattr(serving.generator, "generate", generate)
    responses = serving.client.responses
    response = respond(serving, background=True)
    wait_until(lambda: responses.retrieve(response.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="not complete"):
        respond(serving, "Next", previous_response_id=response.id)
    for _ in range(2):
        assert responses.cancel(response.id).status == "cancelled"
    assert responses.retrieve(response.id).status == "cancelled"
    assert states == ["running", "ended"]
    deleted = respond(serving, background=True)
    wait_until(lambda: len(states) == 3)
    responses.delete(deleted.id)
    assert states == ["running", "ended"] * 2


def test_the_number_of_background_responses_is_bounded(serving, monkeypatch):
    monkeypatch.setattr(background, "MAX_RUNNING", 0)
    app = create_app(serving.registry, serving.state, create_context())
    with RunningServer(app) as server, pytest.raises(openai.RateLimitError) as raised:
        sdk(server.port).responses.create(model="chat", input="Hi", background=True)
    assert raised.value.param == "background"


def test_a_background_response_may_fail(serving, monkeypatch):
    async def generate(request):
        raise RuntimeError("by order")
        yield

    monkeypatch.setattr(serving.generator, "generate", generate)
    response = respond(serving, background=True)
    retrieve = serving.client.responses.retrieve
    wait_until(lambda: retrieve(response.id).status == "failed")
    assert retrieve(response.id).error.code == "server_error"


def test_a_response_is_read_with_the_key_that_created_it(serving, monkeypatch):
    replace_answers(serving, monkeypatch, ["Fine."])
    access = Access(api_key="ours\ntheirs", admin_key="admin")
    app = create_app(serving.registry, serving.state, create_context(access=access))
    with RunningServer(app) as server:
        ours, theirs = sdk(server.port, "ours"), sdk(server.port, "theirs")
        response = ours.responses.create(model="chat", input="Hi")
        assert ours.responses.retrieve(response.id).output_text == "Fine."
        calls = (
            theirs.responses.retrieve,
            theirs.responses.delete,
            theirs.responses.input_items.list,
            theirs.responses.cancel,
        )
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call(response.id)
        for fields in (
            {"previous_response_id": response.id},
            {"input": [{"type": "item_reference", "id": response.output[0].id}]},
        ):
            with pytest.raises(openai.BadRequestError):
                theirs.responses.create(model="chat", **{"input": "Hi", **fields})
        next_one = ours.responses.create(
            model="chat", input="And?", previous_response_id=response.id
        )
        assert next_one.output_text == "Fine."
        without = httpx.get(f"http://127.0.0.1:{server.port}/v1/responses/{response.id}")
        assert without.status_code == 401


def stored(name: str, text: str, before: StoredResponse | None = None) -> StoredResponse:
    turn = Turn.create(read_input(text, lambda _: None), [{"id": f"{name}-out", "type": "message"}])
    turns = [*(before.turns if before else []), turn]
    return StoredResponse(name, "completed", False, b"{}", turns)


def test_the_least_recently_used_responses_are_dropped():
    store = ResponseStore(max_responses=2)
    for name in ("a", "b"):
        store.save("", stored(name, "x"))
    assert store.find("", "a") is not None
    store.save("", stored("c", "x"))
    assert [store.find("", name) is not None for name in "abc"] == [True, False, True]
    assert ItemFinder(store, "").find("b-out") is None
    assert ItemFinder(store, "").find("c-out") == {"id": "c-out", "type": "message"}
    assert store.find("other", "a") is ItemFinder(store, "other").find("a-out") is None


def test_stored_bytes_are_bounded_and_shared_turns_count_once():
    store = ResponseStore(max_bytes=3500)
    first = stored("a", "x" * 1000)
    store.save("", first)
    size = store.bytes
    assert 1500 < size < 1800  # the index of two items counts, too
    store.save("", stored("b", "y" * 10, first))
    assert store.bytes < size + 800
    assert store.delete("", "a")
    assert not store.delete("", "a")
    assert store.bytes > 1000  # the conversation of "b" has the turn of "a"
    assert ItemFinder(store, "").find("a-out") is not None
    store.save("", stored("c", "z" * 2500))
    assert (len(store), store.find("", "b")) == (1, None)
    store.save("", stored("d", "z" * 5000))  # larger than the store
    assert (len(store), store.bytes) == (0, 0)


def test_reasoning_is_an_item_of_its_own():
    parts = [
        Reasoning("Let me "),
        Reasoning("think."),
        "Well",
        CallStart("c1", "f"),
        CallArguments('{"a"'),
        CallArguments(": 1}"),
    ]
    output = Output(summary=False)
    kinds = [kind for kind, _ in [*output.push(parts, []), *output.finish("completed")]]
    assert kinds[:7] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert kinds[-5:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    reasoning, message, call = output.items
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me think."}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"] == "Well"
    assert (call["call_id"], call["arguments"]) == ("c1", '{"a": 1}')


def test_reasoning_is_its_own_summary_if_one_is_requested():
    output = Output(summary=True)
    events = [*output.push([Reasoning("Hm.")], []), *output.finish("incomplete")]
    assert [kind for kind, _ in events] == [
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
    ]
    assert output.items[0]["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert output.items[0]["status"] == "incomplete"

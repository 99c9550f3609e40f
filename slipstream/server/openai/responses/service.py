"""The endpoints of /v1/responses: create, retrieve, delete, cancel, list the input items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from slipstream.server.http.exchange import JSON, Exchange
from slipstream.server.http.routes import Parameters
from slipstream.server.kserve.access import TENANT
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.openai.calls import Call, Document
from slipstream.server.openai.chat import PreparedChat, prepare_chat
from slipstream.server.openai.errors import ApiError, field_error, rename_field, rename_in_error
from slipstream.server.openai.fields import ignored_header
from slipstream.server.openai.generation import CallAnswers, infer_request
from slipstream.server.openai.models import OpenAIModel, find_model
from slipstream.server.openai.prompts import check_message_count
from slipstream.server.openai.responses.background import BackgroundRuns, Save
from slipstream.server.openai.responses.fields import (
    FIELD_NAMES,
    ResponseFields,
    chat_fields,
    echo_fields,
    read_response_fields,
    unknown_names,
)
from slipstream.server.openai.responses.items import (
    Item,
    chat_messages,
    check_call_ids,
    read_input,
    without_oldest,
)
from slipstream.server.openai.responses.store import (
    ItemFinder,
    ResponseStore,
    StoredResponse,
    Turn,
)
from slipstream.server.openai.responses.writer import ResponseWriter
from slipstream.server.openai.streaming import CallService
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.tracing.tracing import CHAT

_MAX_LISTED = 100
_LISTED = 20  # default number of items in a list


@dataclass(frozen=True)
class ResponseRequest:
    """A request for a response, with the conversation that it continues."""

    fields: ResponseFields
    given: Document  # its body
    size: int  # bytes of the body and of the conversation
    turns: Sequence[Turn]  # turns of the conversation so far
    items: Sequence[Item]  # new items
    messages: Sequence[Document]


class ResponseService:
    def __init__(self, calls: CallService) -> None:
        self._calls = calls
        self._store = ResponseStore()
        self._background = BackgroundRuns()

    async def create(self, exchange: Exchange, parameters: Parameters) -> None:
        await self._calls.answer(exchange, self._read_call, CHAT)

    async def count_input_tokens(self, body: bytes, registry: ModelRegistry) -> bytes:
        request = await self._read(body, TENANT.get())
        prepared = await _prepare(request, await find_model(registry, request.fields.model))
        count = {"object": "response.input_tokens", "input_tokens": len(prepared.text.prompt)}
        return msgspec.json.encode(count)

    async def retrieve(self, exchange: Exchange, parameters: Parameters) -> None:
        if exchange.query().get("stream", "false").lower() not in ("false", "0", ""):
            raise ApiError(
                "stream is not supported by this server for a stored response: leave it out",
                "stream",
            )
        await exchange.respond(200, self._find(parameters).document)

    async def delete(self, exchange: Exchange, parameters: Parameters) -> None:
        stored = self._find(parameters)
        await self._background.cancel(stored.id)
        self._store.delete(TENANT.get(), stored.id)
        deleted = {"id": stored.id, "object": "response", "deleted": True}
        await exchange.respond(200, msgspec.json.encode(deleted))

    async def cancel(self, exchange: Exchange, parameters: Parameters) -> None:
        stored = self._find(parameters)
        if not stored.background:
            raise ApiError("Cannot cancel a synchronous response.")
        if await self._background.cancel(stored.id):
            document = msgspec.json.decode(stored.document) | {"status": "cancelled"}
            stored = replace(stored, status="cancelled", document=msgspec.json.encode(document))
            self._store.save(TENANT.get(), stored)
        elif (stored := self._find(parameters)).status != "cancelled":
            raise ApiError(f"Cannot cancel a response that is {stored.status}.")
        await exchange.respond(200, stored.document)

    async def list_input_items(self, exchange: Exchange, parameters: Parameters) -> None:
        stored = self._find(parameters)
        query = exchange.query()
        size = sum(turn.size for turn in stored.turns)
        listed = await in_thread_if_long(size, _list_items, stored, query)
        await exchange.respond(200, listed)

    def _find(self, parameters: Parameters) -> StoredResponse:
        identity = parameters["id"]
        stored = self._store.find(TENANT.get(), identity)
        if stored is None:
            raise ApiError(
                f"Response with id '{identity[:80]}' not found. The server keeps its last "
                f"{self._store.max_responses} responses, if they were created with store true",
                status=404,
            )
        return stored

    async def _read_call(self, body: bytes, registry: ModelRegistry) -> Call:
        tenant = TENANT.get()
        request = await self._read(body, tenant)
        fields = request.fields
        prepared = await _prepare(request, await find_model(registry, fields.model))
        save = partial(self._save, tenant, request)
        writer = ResponseWriter(prepared, echo_fields(fields), fields.wants_summary, save)
        guided_by = rename_field(prepared.guided_by, FIELD_NAMES)
        call = Call(
            prepared.model,
            [prepared.text],
            writer.id,
            writer,
            fields.stream,
            unknown_names(request.given),
            guided_by,
            count_reasoning=prepared.count_reasoning,
        )
        if fields.background:
            return replace(call, send=partial(self._start_in_background, call, writer, save))
        return call

    async def _start_in_background(
        self,
        call: Call,
        writer: ResponseWriter,
        save: Save,
        answers: CallAnswers,
        exchange: Exchange,
    ) -> None:
        # A trace ends with its exchange, so a request that continues has none.
        requests = [infer_request(call.model, text, call.id) for text in call.texts]
        queued = self._background.start(replace(answers, requests=requests), writer, save)
        await exchange.respond(200, msgspec.json.encode(queued), JSON, ignored_header(call.ignored))

    async def _read(self, body: bytes, tenant: str) -> ResponseRequest:
        # A short body may name a long conversation by its id.
        stored = self._store.bytes if b'id"' in body else 0
        return await in_thread_if_long(len(body) + stored, self._read_request, body, tenant)

    def _read_request(self, body: bytes, tenant: str) -> ResponseRequest:
        fields, given = read_response_fields(body)
        items = read_input(fields.input, ItemFinder(self._store, tenant).find)
        turns: Sequence[Turn] = ()
        history: list[Item] = []
        if fields.previous_response_id is not None:
            previous = self._previous(fields.previous_response_id, tenant)
            turns = previous.turns
            history = previous.conversation()
        check_call_ids(history, items)
        messages = chat_messages(fields.instructions, [*history, *items])
        size = len(body) + sum(turn.size for turn in turns)
        return ResponseRequest(fields, given, size, turns, items, messages)

    def _previous(self, identity: str, tenant: str) -> StoredResponse:
        previous = self._store.find(tenant, identity)
        if previous is None:
            raise ApiError(
                f"Previous response with id '{identity[:80]}' not found. Send its items as input",
                "previous_response_id",
                code="previous_response_not_found",
            )
        if previous.status in ("queued", "in_progress"):
            raise field_error("previous_response_id", "names a response that is not complete yet")
        return previous

    def _save(self, tenant: str, request: ResponseRequest, response: Document) -> None:
        if request.fields.store:
            turn = Turn.create(request.items, response["output"])
            stored = StoredResponse(
                response["id"],
                response["status"],
                request.fields.background,
                msgspec.json.encode(response),
                [*request.turns, turn],
            )
            self._store.save(tenant, stored)


async def _prepare(request: ResponseRequest, model: OpenAIModel) -> PreparedChat:
    """Return the chat request. `truncation` "auto" leaves out the oldest messages if it must."""
    try:
        return await _prepare_without(0, request, model)
    except ApiError as error:
        if request.fields.truncation != "auto" or error.code != "context_length_exceeded":
            raise
        too_long = error
    found = None
    fewest = 1
    most = len(request.messages) - 1
    while fewest <= most:  # finds the smallest number of messages to leave out
        count = (fewest + most) // 2
        try:
            found = await _prepare_without(count, request, model)
            most = count - 1
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            fewest = count + 1
    if found is None:
        raise too_long
    return found


async def _prepare_without(
    count: int, request: ResponseRequest, model: OpenAIModel
) -> PreparedChat:
    messages = without_oldest(request.messages, count)
    try:
        check_message_count(messages, model)
    except ApiError as error:
        raise rename_in_error(error, FIELD_NAMES) from error
    fields = chat_fields(request.fields, request.given, messages)
    try:
        return await prepare_chat(fields, request.size, model)
    except ApiError as error:
        raise rename_in_error(error, FIELD_NAMES) from error


def _list_items(stored: StoredResponse, query: dict[str, str]) -> bytes:
    """Return a page of the items that a response was created from."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise field_error("order", "must be asc or desc")
    limit = query.get("limit", str(_LISTED))
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_LISTED:
        raise field_error("limit", f"must be between 1 and {_MAX_LISTED}")
    items = stored.input_items()
    if order == "desc":
        items.reverse()
    after = query.get("after", "")
    if after:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise field_error("after", "must be the id of an item of the list")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )

"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from slipstream.engine.constraints.constraints import LONG_GUIDE
from slipstream.engine.constraints.guided import GuideError, check_guide
from slipstream.engine.sampling_params import Guide
from slipstream.request_fields.field import LARGEST_INT
from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.openai.answers.format import AnswerFormat, find_answer_format
from slipstream.server.openai.answers.parts import (
    CallArguments,
    CallStart,
    Part,
    PartReader,
    PlainReader,
    Reasoning,
    ToolCall,
    WholeMessage,
)
from slipstream.server.openai.calls import Call, Document
from slipstream.server.openai.choices import ChoicesWriter, token_report
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.fields import ChatFields, read_fields
from slipstream.server.openai.generation import CountTokens, finish_reason
from slipstream.server.openai.guides import read_guide
from slipstream.server.openai.log_probs import ScoredTokens, chat_log_probs
from slipstream.server.openai.models import OpenAIModel, find_model
from slipstream.server.openai.prompts import chat_tokens
from slipstream.server.openai.sampling import (
    build_text_request,
    read_max_tokens,
    read_n,
    read_stop_words,
    read_top_log_probs,
    sampling_params,
)
from slipstream.server.openai.tools.request import read_tools
from slipstream.server.text.guides import check_guide_in_thread, run_with_bound
from slipstream.server.text.messages import unknown_fields
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreparedChat:
    """A conversation, read and checked: the request for its answers, and how to read them.

    Every chat endpoint builds ChatFields from its own format and prepares them here.
    """

    model: OpenAIModel
    text: TextRequest
    new_reader: Callable[[], PartReader]  # one for each answer
    guided_by: str  # request field that carried the grammar
    log_probs: bool
    count_reasoning: CountTokens | None  # None: the model does not reason

    @property
    def hidden_ids(self) -> frozenset[int]:
        """The special tokens that are not part of the text."""
        if not self.text.skip_special_tokens:
            return frozenset()
        return self.model.tokenizer.special_ids - self.text.shown_special_ids


async def chat_call(body: bytes, registry: ModelRegistry) -> Call:
    fields, ignored = await in_thread_if_long(len(body), read_fields, body, ChatFields)
    prepared = await prepare_chat(fields, len(body), await find_model(registry, fields.model))
    ignored += await in_thread_if_long(len(body), unknown_fields, fields.messages)
    choice_writer = ChatChoiceWriter(
        prepared.model.tokenizer,
        prepared.log_probs,
        bool(prepared.text.stop_words),
        prepared.new_reader,
        bool(fields.return_tokens_as_token_ids),
        prepared.hidden_ids,
    )
    report = token_report(fields, prepared.model.tokenizer, [prepared.text], in_choices=False)
    writer = ChoicesWriter.create("chatcmpl", prepared.model.id, choice_writer, fields, report)
    return Call(
        prepared.model,
        [prepared.text],
        writer.id,
        writer,
        bool(fields.stream),
        ignored,
        prepared.guided_by,
        count_reasoning=prepared.count_reasoning,
    )


async def prepare_chat(fields: ChatFields, body_bytes: int, model: OpenAIModel) -> PreparedChat:
    log_probs = bool(fields.logprobs)
    top_log_probs = read_top_log_probs("top_logprobs", fields.top_logprobs)
    if top_log_probs and not log_probs:
        raise field_error("top_logprobs", "needs logprobs to be true")
    response_field, response_guide = await in_thread_if_long(body_bytes, read_guide, fields)
    options = model.text.engine.chat
    tools = await in_thread_if_long(
        body_bytes, read_tools, fields, model.tokenizer, options.tool_call_parser
    )
    sampling = sampling_params(
        fields, model.vocab_size, _max_tokens(fields), log_probs, top_log_probs
    )
    stop_words = read_stop_words(fields)
    tokens = await chat_tokens(fields, body_bytes, model, tools.shown, tools.adapt)
    answers = find_answer_format(
        tools, model.tokenizer, tokens, response_guide is not None, options.reasoning_parser
    )
    guided_by = response_field if tools.rules is None else "tools"
    guide = await _answer_guide(answers, response_guide, response_field, fields, body_bytes)
    if guide is not None:
        sampling = replace(sampling, guide=guide)
    text = build_text_request(
        fields,
        tokens,
        sampling,
        stop_words,
        read_n(fields),
        model,
        model.adapter(),
    )
    if answers.shown_ids:
        text = replace(text, shown_special_ids=answers.shown_ids)
    return PreparedChat(
        model, text, answers.new_reader, guided_by, log_probs, answers.count_reasoning
    )


async def _answer_guide(
    answers: AnswerFormat,
    response: Guide | None,
    response_field: str,
    fields: ChatFields,
    body_bytes: int,
) -> Guide | None:
    """Return the grammar of the answers. Tools are checked here, where the field is known."""
    try:
        guide = await in_thread_if_long(body_bytes, answers.guide, response)
        if answers.rules is not None and guide is not None:
            await check_guide_in_thread(guide)
    except GuideError as error:
        await run_with_bound(LONG_GUIDE + 1, _check_parts, response, response_field, fields)
        raise ApiError(f"tools: {error}", "tools") from error
    return guide


def _check_parts(response: Guide | None, response_field: str, fields: ChatFields) -> None:
    """Raise the error of the first schema that cannot be enforced by itself, with its field."""
    guides = {} if response is None else {response_field: response}
    for number, tool in enumerate(fields.tools or []):
        schema = tool["function"].get("parameters")
        if schema is not None:
            name = f"tools[{number}].function.parameters"
            guides[name] = Guide("json_schema", json.dumps(schema))
    for name, guide in guides.items():
        try:
            check_guide(guide)
        except GuideError as error:
            raise field_error(name, str(error)) from error


def _max_tokens(fields: ChatFields) -> int:
    """Return the most tokens to generate. Without a field for it, the context is the limit."""
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    if name == "max_completion_tokens" and fields.max_tokens is not None:
        raise field_error(
            "max_tokens",
            "cannot be given together with max_completion_tokens, its newer name",
        )
    value = getattr(fields, name)
    return LARGEST_INT if value is None else read_max_tokens(name, value)


@dataclass(frozen=True)
class ChatChoiceWriter:
    """Writes the choices of a chat completion."""

    tokenizer: Tokenizer
    log_probs: bool
    stop_words: bool  # whether stop words may end the text
    new_reader: Callable[[], PartReader]
    as_ids: bool = False  # tokens with scores are named by their ids
    hidden_ids: frozenset[int] = frozenset()  # tokens that are not part of the text
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    _readers: dict[int, PartReader] = field(default_factory=dict)
    _scored: dict[int, ScoredTokens] = field(default_factory=dict)

    def whole(self, index: int, choice: Completion) -> Document:
        parts = self._reader(index).push(choice.text, last=True)
        whole = WholeMessage().add(parts)
        message: Document = {
            "role": "assistant",
            "content": whole.text or ("" if not whole.calls and not whole.reasoning else None),
            "refusal": None,
        }
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        if whole.calls:
            message["tool_calls"] = [call.document() for call in whole.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._scores(index, choice),
            "finish_reason": self._reason(index, choice),
        }

    def opening(self, index: int, output: TextOutput) -> Document:
        return _chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def pieces(self, index: int, output: TextOutput) -> Iterator[Document]:
        scores = self._scores(index, output)
        if scores is not None and not scores["content"]:
            scores = None
        reader = self._reader(index)
        for part in reader.push(output.text, last=bool(output.finish_reason)):
            yield _chunk(index, _delta(part, reader.calls - 1), scores)
            scores = None
        if scores is not None:  # scores of tokens whose text is held back
            yield _chunk(index, {"content": ""}, scores)

    def text_piece(self, index: int, text: str) -> Document | None:
        if self.log_probs or self.new_reader is not PlainReader:
            return None
        return _chunk(index, {"content": text})

    def ending(self, index: int, choice: Completion) -> Document:
        return _chunk(index, {}, reason=self._reason(index, choice))

    def _reader(self, index: int) -> PartReader:
        if index not in self._readers:
            self._readers[index] = self.new_reader()
        return self._readers[index]

    def _reason(self, index: int, choice: Completion) -> str:
        reason = finish_reason(choice.finish_reason)
        called = self._reader(index).calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _scores(self, index: int, output: TextOutput | Completion) -> Document | None:
        if not self.log_probs:
            return None
        if index not in self._scored:
            self._scored[index] = ScoredTokens(self.tokenizer, self.stop_words, self.hidden_ids)
        return chat_log_probs(self.tokenizer, self._scored[index].push(output), self.as_ids)


def _chunk(
    index: int, delta: Document, scores: Document | None = None, reason: str | None = None
) -> Document:
    return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": reason}


def _delta(part: Part, call: int) -> Document:
    """Return a part of an answer as the change to its message. `call`: index of the last call."""
    match part:
        case str():
            return {"content": part}
        case Reasoning():
            return {"reasoning_content": part.text}
        case CallStart():
            started = ToolCall(part.id, part.name).document()
            return {"tool_calls": [{"index": call, **started}]}
        case CallArguments():
            return {"tool_calls": [{"index": call, "function": {"arguments": part.text}}]}

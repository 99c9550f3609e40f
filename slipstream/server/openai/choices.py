"""Writes the answers to chat and text completions: one choice for each answer."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.openai.calls import Document
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.fields import Fields
from slipstream.server.openai.generation import CallAnswers
from slipstream.server.openai.log_probs import TokenFormat, prompt_log_probs
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.version import VERSION

DONE = b"data: [DONE]\n\n"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{0,64}")
_MARK = "\0"  # stands for the text of a piece
FINGERPRINT = f"slipstream-{VERSION}"


class ChoiceWriter(Protocol):
    """Writes the choices of one endpoint: whole, or as the first, middle and last chunks."""

    @property
    def object(self) -> str: ...
    @property
    def chunk_object(self) -> str: ...
    def whole(self, index: int, choice: Completion) -> Document: ...
    def opening(self, index: int, output: TextOutput) -> Document | None: ...
    def pieces(self, index: int, output: TextOutput) -> Iterator[Document]: ...
    def text_piece(self, index: int, text: str) -> Document | None:
        """Return the piece of a text; None if pieces depend on more than their own text."""
        ...

    def ending(self, index: int, choice: Completion) -> Document: ...


@dataclass(frozen=True)
class TokenReport:
    """The tokens that a response has beside its texts, in vLLM's format."""

    form: TokenFormat
    prompts: Sequence[list[int]]
    log_probs: int | None  # most likely tokens to report for each prompt token; None: no scores
    ids: bool  # the token ids of prompts and answers
    in_choices: bool  # the choices have what belongs to the prompt; otherwise, the response has it

    def prompt_members(self, prompt: int, completion: Completion) -> Document:
        members: Document = {}
        tokens = self.prompts[prompt]
        if self.log_probs is not None:
            members["prompt_logprobs"] = prompt_log_probs(
                self.form, tokens, completion.scores, self.log_probs
            )
        if self.ids:
            members["prompt_token_ids"] = tokens
        return members


def token_report(
    fields: Fields, tokenizer: Tokenizer, texts: Sequence[TextRequest], in_choices: bool
) -> TokenReport | None:
    """Return the report that a request asks for, if it asks for any."""
    log_probs = fields.prompt_logprobs
    ids = bool(fields.return_token_ids)
    if log_probs is None and not ids:
        return None
    prompts = [list(text.prompt) for text in texts if not isinstance(text.prompt, str)]
    return TokenReport(TokenFormat(tokenizer), prompts, log_probs, ids, in_choices)


class ChoicesWriter:
    """Writes one call's answers. All parts of events but the choices are encoded once."""

    def __init__(
        self,
        identity: str,
        model: str,
        choice_writer: ChoiceWriter,
        include_usage: bool,
        usage_so_far: bool = False,
        report: TokenReport | None = None,
    ) -> None:
        """`include_usage`: a stream ends with a chunk for the usage.

        `usage_so_far`: every chunk has the usage of its choice.
        """
        self.id = identity
        self._choice_writer = choice_writer
        self._include_usage = include_usage
        self._usage_so_far = usage_so_far
        self._report = report
        self._unsent_ids: dict[int, list[int]] = {}  # tokens of each choice, for its next chunk
        self._head: Document = {
            "id": identity,
            "object": choice_writer.object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._opened: set[int] = set()
        chunk_head = self._head | {"object": choice_writer.chunk_object}
        self._begin = b"data: " + msgspec.json.encode(chunk_head)[:-1] + b',"choices":['
        self._end = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"
        # for each opened choice, what comes before and after the text in its events; None: unknown
        self._around_text: dict[int, tuple[bytes, bytes] | None] = {}

    @staticmethod
    def create(
        prefix: str,
        model: str,
        choice_writer: ChoiceWriter,
        fields: Fields,
        report: TokenReport | None = None,
    ) -> ChoicesWriter:
        options = fields.stream_options
        include_usage = options is not None and bool(options.include_usage)
        usage_so_far = include_usage and options is not None and options.continuous_usage_stats
        identity = f"{prefix}-{_read_request_id(fields) or secrets.token_hex(12)}"
        return ChoicesWriter(
            identity, model, choice_writer, include_usage, bool(usage_so_far), report
        )

    def whole(self, answers: CallAnswers) -> bytes:
        returned = answers.returned_choices()
        choices = [self._choice_writer.whole(*pair) for pair in enumerate(returned)]
        members = self._add_tokens(choices, returned)
        return msgspec.json.encode(
            {**self._head, "choices": choices, "usage": answers.usage(), **members}
        )

    def _add_tokens(self, choices: list[Document], returned: Sequence[Completion]) -> Document:
        """Add the tokens of the report to choices; return those that belong to the response."""
        if self._report is None:
            return {}
        for index, choice in enumerate(returned):
            if self._report.ids:
                choices[index]["token_ids"] = choice.tokens
            if self._report.in_choices:
                prompt = index * len(self._report.prompts) // len(returned)
                choices[index] |= self._report.prompt_members(prompt, choice)
        return {} if self._report.in_choices else self._report.prompt_members(0, returned[0])

    def events(self, answers: CallAnswers, index: int, output: TextOutput) -> bytes:
        around = self._around_text.get(index)
        if around is not None and not output.finish_reason:
            text = output.text
            return around[0] + msgspec.json.encode(text) + around[1] if text else b""
        if self._report is not None or self._usage_so_far:
            return self._extended_events(answers, index, output)
        if index not in self._opened:
            self._around_text[index] = self._find_around_text(index)
        events = [
            self._begin + msgspec.json.encode(choice) + self._end
            for choice in self._choices(answers, index, output)
        ]
        return b"".join(events)

    def _find_around_text(self, index: int) -> tuple[bytes, bytes] | None:
        piece = self._choice_writer.text_piece(index, _MARK)
        if piece is None:
            return None
        before, _, after = msgspec.json.encode(piece).partition(msgspec.json.encode(_MARK))
        return self._begin + before, after + self._end

    def _extended_events(self, answers: CallAnswers, index: int, output: TextOutput) -> bytes:
        """Return events with the usage so far, or with the tokens of the report."""
        first = index not in self._opened
        choices = list(self._choices(answers, index, output))
        end = self._end
        if self._usage_so_far:
            usage = msgspec.json.encode(answers.usage_so_far(index))
            end = b'],"usage":' + usage + b"}\n\n"
        ends = [end] * len(choices)
        if self._report is not None and self._report.ids:
            unsent = self._unsent_ids.setdefault(index, [])
            unsent += output.tokens
            if choices:
                choices[0]["token_ids"] = self._unsent_ids.pop(index)
        if self._report is not None and first and choices:
            prompt = index // answers.answers
            members = self._report.prompt_members(prompt, answers.choices[index])
            if self._report.in_choices:
                choices[0] |= members
            else:
                ends[0] = b"]," + msgspec.json.encode(members)[1:-1] + end[1:]
        encoded = map(msgspec.json.encode, choices)
        return b"".join(
            [self._begin + choice + tail for choice, tail in zip(encoded, ends, strict=True)]
        )

    def _choices(self, answers: CallAnswers, index: int, output: TextOutput) -> Iterator[Document]:
        if index not in self._opened:
            self._opened.add(index)
            opening = self._choice_writer.opening(index, output)
            if opening is not None:
                yield opening
        yield from self._choice_writer.pieces(index, output)
        if output.finish_reason:
            yield self._choice_writer.ending(index, answers.choices[index])

    def end(self, answers: CallAnswers) -> bytes:
        """Return the last events: the usage, if requested, and the end mark."""
        if not self._include_usage:
            return DONE
        usage = msgspec.json.encode(answers.usage())
        return self._begin + b'],"usage":' + usage + b"}\n\n" + DONE

    def failure(self, problem: ApiError) -> bytes:
        return b"data: " + problem.body() + b"\n\n"


def _read_request_id(fields: Fields) -> str:
    given = fields.request_id or ""
    if not _REQUEST_ID.fullmatch(given):
        raise field_error(
            "request_id", "must be at most 64 letters, digits, and the characters _.:-"
        )
    return given

"""Writes a response: whole, or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.openai.calls import Document
from slipstream.server.openai.chat import PreparedChat
from slipstream.server.openai.errors import ApiError
from slipstream.server.openai.generation import CallAnswers, finish_reason
from slipstream.server.openai.log_probs import ScoredTokens, chat_log_probs
from slipstream.server.openai.responses.items import new_id
from slipstream.server.openai.responses.output import Event, Output

_EMPTY: Document = {
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}


class ResponseWriter:
    def __init__(
        self,
        prepared: PreparedChat,
        echo: Document,
        summary: bool,
        save: Callable[[Document], None],
    ) -> None:
        """`echo`: fields of the request. `save`: called with the finished response."""
        self.id = new_id("resp")
        self._head: Document = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": prepared.model.id,
            **echo,
        }
        self._prepared = prepared
        self._reader = prepared.new_reader()
        self._save = save
        self._output = Output(summary)
        self._scored = ScoredTokens(
            prepared.model.tokenizer, bool(prepared.text.stop_words), prepared.hidden_ids
        )
        self._sequence_number = 0

    def unfinished(self, status: str) -> Document:
        """Return the response without output."""
        return {**self._head, **_EMPTY, "status": status}

    def whole(self, answers: CallAnswers) -> bytes:
        return msgspec.json.encode(self.finished(answers))

    def finished(self, answers: CallAnswers) -> Document:
        """Return the complete response, and save it."""
        choice = answers.choices[0]
        for _ in self._parts(choice, last=True):
            pass
        for _ in self._output.finish(_status(choice)):
            pass
        return self._finish(answers)

    def events(self, answers: CallAnswers, index: int, output: TextOutput) -> bytes:
        events: list[Event] = []
        if not self._sequence_number:
            response = self.unfinished("in_progress")
            events = [
                ("response.created", {"response": response}),
                ("response.in_progress", {"response": response}),
            ]
        events += self._parts(output, last=bool(output.finish_reason))
        return self._encode(events)

    def end(self, answers: CallAnswers) -> bytes:
        status = _status(answers.choices[0])
        events = list(self._output.finish(status))
        response = self._finish(answers)
        return self._encode([*events, (f"response.{status}", {"response": response})])

    def failure(self, problem: ApiError) -> bytes:
        """Return the events of an error: the error, and the response that failed with it."""
        error = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._encode(
            [("error", error), ("response.failed", {"response": self.failed(problem)})]
        )

    def failed(self, problem: ApiError) -> Document:
        """Return the response that failed with this error, and save it."""
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        error = {"code": code, "message": problem.message}
        response = {
            **self.unfinished("failed"),
            "error": error,
            "output": self._output.items,
        }
        self._save(response)
        return response

    def _parts(self, output: TextOutput | Completion, last: bool) -> list[Event]:
        scores = []
        if self._prepared.log_probs:
            scored = self._scored.push(output)
            scores = chat_log_probs(self._prepared.model.tokenizer, scored)["content"]
        return list(self._output.push(self._reader.push(output.text, last), scores))

    def _finish(self, answers: CallAnswers) -> Document:
        status = _status(answers.choices[0])
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = {
            **self.unfinished(status),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": incomplete,
            "output": self._output.items,
            "usage": _usage(answers),
        }
        self._save(response)
        return response

    def _encode(self, events: Iterable[Event]) -> bytes:
        written = []
        for kind, fields in events:
            event = {"type": kind, "sequence_number": self._sequence_number, **fields}
            self._sequence_number += 1
            written.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(event)))
        return b"".join(written)


def _status(choice: Completion) -> str:
    return "completed" if finish_reason(choice.finish_reason) == "stop" else "incomplete"


def _usage(answers: CallAnswers) -> Document:
    usage = answers.usage()
    details = usage.get("completion_tokens_details", {})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }

"""Load over OpenAI's API: the requests of a text model, and the times of their answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from slipstream.bench.load import Record, Sender, failed_record
from slipstream.bench.text_load import Row
from slipstream.client.connection import HttpConnection, Request, ServerError
from slipstream.client.tensors import first_text, texts

# type of endpoint: its path
ENDPOINTS = {"chat": "v1/chat/completions", "completions": "v1/completions"}
_NAMES = {"min_length": "min_tokens"}  # field of Triton's text models: name here
_PAYLOAD = "payload"


class OpenAIModel:
    """A text model behind OpenAI's API. A request holds its prompt and the JSON that is sent."""

    text_output = "text_output"

    def __init__(self, name: str, endpoint_type: str) -> None:
        self.name = name
        self._chat = endpoint_type == "chat"

    def input_name(self, field_name: str) -> str:
        return field_name

    def request(self, row: Row, number: int) -> Request:
        prompt = row["text_input"]
        body: dict[str, Any] = {"model": self.name}
        if self._chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        for name, value in row.items():
            if name not in ("model", "text_input"):
                body[_NAMES.get(name, name)] = _json_value(value)
        inputs = {"text_input": texts([prompt]), _PAYLOAD: texts([json.dumps(body)])}
        return Request(self.name, inputs, request_id=str(number))


def _json_value(value: Any) -> Any:
    """Return the value of --extra-inputs NAME:VALUE, which is JSON or a plain text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def openai_sender(connection: HttpConnection, path: str) -> Sender:
    """Return a sender that times every piece of text that arrives."""

    def send(request: Request) -> Record:
        body = json.loads(first_text(request.inputs[_PAYLOAD]))
        sent = time.monotonic_ns()
        times = []
        outputs = []
        try:
            for piece in _pieces(connection, f"/{path}", body):
                times.append(time.monotonic_ns())
                outputs.append({"text_output": texts([piece])})
        except ServerError as error:
            return failed_record(request, sent, error)
        error_text = "" if times else "the answer has no text"
        times = times or [time.monotonic_ns()]
        return Record(request, sent, tuple(times), tuple(outputs), error_text)

    return send


def _pieces(connection: HttpConnection, path: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield the text of each event, or of the whole answer. The first event of a chat has none."""
    events = connection.events(path, body) if body.get("stream") else [connection.post(path, body)]
    for event in events:
        for choice in event.get("choices", []):
            text = choice.get("text")
            if text is None:
                message = choice.get("delta") or choice.get("message") or {}
                text = (message.get("reasoning_content") or "") + (message.get("content") or "")
            if text:
                yield text

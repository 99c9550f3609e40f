"""Tools, and helpers for the tests of calls."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.engine.constraints.guided import Guided, Guides
from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.engine.sampling_params import Guide
from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.openai.answers.parts import CallArguments, CallStart, PartReader, Reasoning
from slipstream.server.openai.models import OpenAIModel

MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
WEATHER = {
    "type": "object",
    "required": ["city", "days"],
    "additionalProperties": False,
    "properties": {
        "city": {"enum": ["Rome", "Bonn"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Of a city", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "now"}},
]


def called_by(serving, monkeypatch, template: str):
    """Give the server's model this chat template and return the server."""
    monkeypatch.setattr(serving.generator.tokenizer, "chat_templates", {"default": template})
    return serving


def chat(serving, **fields):
    given = {
        "model": "chat",
        "messages": MESSAGES,
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 300,
        **fields,
    }
    return serving.client.chat.completions.create(**given)


def prompt_ids(serving, messages, tools=TOOLS) -> list[int]:
    """Return the tokens of the chat template that transformers renders."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(serving.model_folder)
    template = serving.generator.tokenizer.chat_templates["default"]
    return tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=template, add_generation_prompt=True, return_dict=False
    )


def replace_answers(
    serving,
    monkeypatch,
    pieces: Sequence[str],
    reason: str = "stop",
    real_tokens: bool = False,
) -> list[Any]:
    """Replace the model's answers by these pieces. Return the list of the requests it gets.

    Prompts may be longer than the model's context. `real_tokens`: a piece has the tokens of its
    text, and otherwise one token.
    """
    encode = serving.generator.tokenizer.encode
    requests = []
    monkeypatch.setattr(OpenAIModel, "longest_prompt", 4096)

    async def generate(request):
        requests.append(request)
        for number, piece in enumerate(pieces):
            yield TextOutput(
                encode(piece, False) if real_tokens else [5],
                text=piece,
                finish_reason=reason if number == len(pieces) - 1 else "",
                prompt_tokens=9,
            )

    monkeypatch.setattr(serving.generator, "generate", generate)
    return requests


def streamed_calls(chunks: list[Any]) -> list[tuple[int, str, str]]:
    """Return the index, name and arguments of each call in the choices of a stream."""
    calls: dict[int, tuple[int, str, str]] = {}
    for chunk in chunks:
        for call in chunk.delta.tool_calls or []:
            _, name, arguments = calls.get(call.index, (call.index, call.function.name, ""))
            calls[call.index] = (call.index, name, arguments + (call.function.arguments or ""))
    return list(calls.values())


def check_read(new_reader: Callable[[], PartReader], text: str, parts: list[Any]) -> None:
    """Check that a text is read as these parts, whole and letter by letter.

    Pieces of one part are joined. A call is a tuple of its name and arguments, and reasoning a set.
    """
    assert read_parts(new_reader(), [text]) == parts
    assert read_parts(new_reader(), list(text)) == parts


def read_parts(reader: PartReader, pieces: Sequence[str]) -> list[Any]:
    found = [part for piece in pieces for part in reader.push(piece)]
    found += reader.push("", last=True)
    assert reader.calls == sum(isinstance(part, CallStart) for part in found)
    joined: list[Any] = []
    for part in found:
        assert part not in ("", Reasoning("")), found
        last = joined[-1] if joined else None
        match part:
            case CallStart():
                joined.append((part.name, ""))
            case CallArguments():
                name, arguments = joined.pop()
                joined.append((name, arguments + part.text))
            case Reasoning():
                if isinstance(last, set):
                    part = Reasoning(joined.pop().pop() + part.text)
                joined.append({part.text})
            case str():
                joined.append(joined.pop() + part if isinstance(last, str) else part)
    return joined


class GuidedText:
    """A guide over a vocabulary in which every byte is a token, and so is each special text."""

    def __init__(self, guide: Guide, special: Sequence[str] = ()) -> None:
        self._special = {text: 256 + number for number, text in enumerate(special)}
        texts = [*[bytes([code]) for code in range(256)], *[text.encode() for text in special]]
        self._texts = texts
        self._end = len(texts)
        vocabulary = Vocabulary([*texts, b"<end>"], frozenset(range(256, self._end + 1)), False)
        self._guided: Guided = Guides(vocabulary).open(guide, [self._end])

    def _encode(self, text: str) -> list[int]:
        if not self._special:
            return list(text.encode())
        tokens: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, self._special)) + ")", text):
            tokens += [self._special[piece]] if piece in self._special else piece.encode()
        return tokens

    def _allows(self, tokens: list[int]) -> bool:
        mask = int.from_bytes(self._guided.mask(tokens[:-1]), "little")
        return bool(mask >> tokens[-1] & 1)

    def allows(self, text: str) -> bool:
        """Return whether the last letter is allowed after the others."""
        return self._allows(self._encode(text))

    def allows_each_letter(self, text: str) -> bool:
        tokens = self._encode(text)
        return all(self._allows(tokens[: end + 1]) for end in range(len(tokens)))

    def random_text(self, rng: random.Random, most: int) -> str:
        """Return a random answer of at most `most` tokens. It tends to close its brackets."""
        tokens: list[int] = []
        while len(tokens) < most:
            mask = int.from_bytes(self._guided.mask(tokens), "little")
            allowed = [token for token in range(self._end + 1) if mask >> token & 1]
            if allowed in ([], [self._end]) or (self._end in allowed and rng.random() < 0.3):
                break
            closing = [
                token for token in allowed if chr(token) in '"}],' or 255 < token < self._end
            ]
            plain = [token for token in allowed if 32 <= token < 127 or token == 10]
            tokens.append(
                rng.choice(closing if closing and rng.random() < 0.35 else plain or closing)
            )
        texts = [self._texts[token] for token in tokens]
        return b"".join(texts).decode()

    def may_end(self, text: str) -> bool:
        """Return whether the answer may end after the text."""
        return self._allows([*self._encode(text), self._end])

    def complete(self, text: str) -> bool:
        return self._guided.complete(self._encode(text))

"""Tools, chat templates of both call formats, and helpers for the tests of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from slipstream.engine.constraints.guided import Guided, Guides
from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.engine.sampling_params import Guide
from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.openai.parts import CallArguments, CallStart, Part, PartReader

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
MARKED_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.parameters | length }}\n"
    '{% if loop.last %}Call <tool_call>{"name": N, "arguments": A}</tool_call>\n{% endif %}{% endfor %}'
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
BARE_TEMPLATE = (
    '{{ bos_token }}{% if tools %}{{ \'Say {"name": N, "parameters": P}.\' }}'
    "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message.role }}] {% if message.tool_calls %}"
    "{% set call = message.tool_calls[0].function %}{{ '{\"name\": \"' + call.name + '\", ' }}{{ '\"parameters\": ' }}"
    "{{ call.arguments | tojson }}{{ '}' }}{% else %}{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


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


def replace_answers(serving, monkeypatch, pieces: list[str]) -> list[Any]:
    """Replace the model's answers by these pieces. Return the list of the requests it gets."""
    requests = []

    async def generate(request):
        requests.append(request)
        for number, piece in enumerate(pieces):
            yield TextOutput(
                [5],
                text=piece,
                finish_reason="stop" if number == len(pieces) - 1 else "",
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

    A call is compared as its name and arguments.
    """

    def comparable(found: list[Part]) -> list[Any]:
        joined: list[Any] = []
        for part in found:
            if isinstance(part, CallStart):
                joined.append((part.name, ""))
            elif isinstance(part, CallArguments):
                name, arguments = joined.pop()
                joined.append((name, arguments + part.text))
            else:
                joined.append(part)
        return [
            (part[0], json.loads(part[1])) if isinstance(part, tuple) else part for part in joined
        ]

    assert comparable(list(new_reader().push(text, last=True))) == parts
    reader = new_reader()
    bits = comparable(
        [part for letter in text for part in reader.push(letter)] + list(reader.push("", last=True))
    )
    assert "".join(part for part in bits if isinstance(part, str)) == "".join(
        part for part in parts if isinstance(part, str)
    )
    assert [part for part in bits if not isinstance(part, str)] == [
        part for part in parts if not isinstance(part, str)
    ]


class GuidedText:
    """A guide over a vocabulary in which every ASCII letter is a token."""

    def __init__(self, guide: Guide) -> None:
        letters = [bytes([code]) for code in range(128)]
        self._guided: Guided = Guides(Vocabulary(letters, frozenset(), False)).open(guide, [])

    def allows(self, text: str) -> bool:
        """Return whether the last letter is allowed after the others."""
        mask = int.from_bytes(self._guided.mask(list(text[:-1].encode())), "little")
        return bool(mask >> ord(text[-1]) & 1)

    def allows_each_letter(self, text: str) -> bool:
        return all(self.allows(text[: end + 1]) for end in range(len(text)))

    def complete(self, text: str) -> bool:
        return self._guided.complete(list(text.encode()))

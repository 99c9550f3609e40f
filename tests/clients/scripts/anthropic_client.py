"""Anthropic's SDK: a message, its stream, and a call of a tool."""

import json
import sys

import anthropic

TOOL = {
    "name": "weather",
    "description": "Return the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Bonn"]}},
        "required": ["city"],
    },
}


def main(base_url: str, model: str, question: str) -> dict[str, object]:
    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="unused")
    messages = [{"role": "user", "content": question}]
    greedy = {"temperature": 0}  # newer versions of the SDK have no such parameter
    given = {"model": model, "max_tokens": 24, "messages": messages, "extra_body": greedy}
    with client.messages.stream(**given) as stream:
        streamed = "".join(stream.text_stream)
    called = client.messages.create(
        **{**given, "max_tokens": 100},
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather"},
    )
    uses = [block for block in called.content if block.type == "tool_use"]
    return {
        "text": client.messages.create(**given).content[0].text,
        "streamed": streamed,
        "called": [block.name for block in uses],
        "cities": [block.input["city"] for block in uses],
        "stop_reason": called.stop_reason,
    }


print(json.dumps(main(*sys.argv[1:])))

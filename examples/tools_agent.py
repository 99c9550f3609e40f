"""An agent: the model calls functions until it has an answer.

    python examples/tools_agent.py "What is 17 times 23?"

Small models call functions poorly. `--force` makes the first step a call in any case: the server
then only allows tokens that form one.
"""

import argparse
import json
from datetime import UTC, datetime

from openai import OpenAI

MAX_STEPS = 4
MAX_TOKENS = 200  # of one step


def multiply(first: int, second: int) -> int:
    return first * second


def time_in(city: str) -> str:
    return f"It is {datetime.now(UTC):%H:%M} UTC; the offset of {city} is not known."


FUNCTIONS = {"multiply": multiply, "time_in": time_in}
NUMBER = {"type": "integer", "minimum": -1_000_000, "maximum": 1_000_000}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Return the product of two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"first": NUMBER, "second": NUMBER},
                "required": ["first", "second"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "time_in",
            "description": "Return the time in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is 17 times 23?")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--force", metavar="FUNCTION", choices=list(FUNCTIONS))
    given = parser.parse_args()
    client = OpenAI(base_url=f"{given.url}/v1", api_key="unused")
    model = given.model or client.models.list().data[0].id
    messages: list = [{"role": "user", "content": given.question}]
    for step in range(MAX_STEPS):
        forced = {"type": "function", "function": {"name": given.force}}
        choice = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=forced if given.force and step == 0 else "auto",
            max_tokens=MAX_TOKENS,
            temperature=0,
        ).choices[0]
        message = choice.message
        if message.tool_calls and choice.finish_reason == "length":
            raise SystemExit(f"the call was not complete after {MAX_TOKENS} tokens")
        if not message.tool_calls:
            print(f"answer: {message.content}")
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = run(call.function.name, call.function.arguments)
            arguments = " ".join(call.function.arguments.split())
            print(f"call: {call.function.name}({arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(f"no answer after {MAX_STEPS} steps")


def run(name: str, arguments: str) -> str:
    """Call a function. An error is a result, too, which the model can react to."""
    try:
        return str(FUNCTIONS[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


if __name__ == "__main__":
    main()

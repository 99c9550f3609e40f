"""langchain-openai: plain calls, streams, batches, log-probabilities and structured output."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city and its country."""

    name: str
    country: str


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}."


def main(base_url: str, model: str, question: str) -> dict[str, object]:
    chat = ChatOpenAI(
        base_url=base_url, api_key="unused", model=model, temperature=0, max_tokens=24, seed=1
    )
    answer = chat.invoke(question)
    longer = chat.bind(max_tokens=120)
    structured = {}
    for method in ("json_schema", "function_calling", "json_mode"):
        structured_chat = ChatOpenAI(
            base_url=base_url, api_key="unused", model=model, temperature=0, max_tokens=120
        ).with_structured_output(City, method=method, include_raw=True)
        found = structured_chat.invoke(
            "Give a JSON object with the keys name and country: Paris is in France."
        )
        parsed = found["parsed"]
        structured[method] = None if parsed is None else parsed.model_dump()
    forced = longer.bind_tools([weather], tool_choice="weather").invoke("Weather in Rome?")
    chunks = longer.bind_tools([weather], tool_choice="any").stream("Weather in Rome?")
    streamed = None
    for chunk in chunks:
        streamed = chunk if streamed is None else streamed + chunk
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(question)
    return {
        "text": answer.content,
        "tokens": answer.usage_metadata["output_tokens"],
        "streamed": "".join([chunk.content for chunk in chat.stream(question)]),
        "batch": [reply.content for reply in chat.batch([question])],
        "log_probs": len(scored.response_metadata["logprobs"]["content"]),
        "structured": structured,
        "called": [call["name"] for call in forced.tool_calls],
        "streamed_call": [call["name"] for call in streamed.tool_calls],
        "streamed_arguments": [sorted(call["args"]) for call in streamed.tool_calls],
    }


print(json.dumps(main(*sys.argv[1:])))

"""OpenAI's SDK: the models of a server, an answer as a stream, and the likeliest first tokens.

python examples/openai_chat.py "What is the capital of Japan?"
"""

import argparse
import math

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the capital of Japan?")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    client = OpenAI(base_url=f"{given.url}/v1", api_key="unused")  # a key, if the server has one
    model = given.model or client.models.list().data[0].id
    messages = [{"role": "user", "content": given.question}]

    print(f"{model}: ", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=given.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            print(f"\n({chunk.usage.completion_tokens} tokens)")

    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=1, temperature=0, logprobs=True, top_logprobs=3
    )
    print("likeliest first tokens:")
    for token in answer.choices[0].logprobs.content[0].top_logprobs:
        print(f"  {math.exp(token.logprob):6.1%}  {token.token!r}")


if __name__ == "__main__":
    main()

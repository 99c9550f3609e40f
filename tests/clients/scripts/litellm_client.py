"""LiteLLM: the providers openai/, hosted_vllm/ and triton/, each whole and as a stream."""

import json
import sys

import litellm


def main(base_url: str, model: str, question: str) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    found: dict[str, object] = {}
    for provider in ("openai", "hosted_vllm"):
        given = {
            "model": f"{provider}/{model}",
            "api_base": base_url,
            "api_key": "unused",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 24,
        }
        found[provider] = litellm.completion(**given).choices[0].message.content
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in litellm.completion(**given, stream=True)
        ]
        found[f"{provider} stream"] = "".join(pieces)
    root = base_url.removesuffix("/v1")
    given = {
        "model": f"triton/{model}",
        "messages": messages,
        "max_tokens": 24,
    }
    whole = litellm.completion(api_base=f"{root}/v2/models/{model}/generate", **given)
    found["triton"] = whole.choices[0].message.content
    stream = litellm.completion(api_base=f"{root}/v2/models/{model}/generate", stream=True, **given)
    found["triton stream"] = "".join([chunk.choices[0].delta.content or "" for chunk in stream])
    return found


print(json.dumps(main(*sys.argv[1:])))

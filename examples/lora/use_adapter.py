"""Ask a model without and with an adapter.

python examples/lora/use_adapter.py pirate "What do you want to drink?"
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter", help="name of its folder in --lora-dir")
    parser.add_argument("question", nargs="?", default="What do you want to drink?")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--max-tokens", type=int, default=32)
    given = parser.parse_args()
    client = OpenAI(base_url=f"{given.url}/v1", api_key="unused")
    names = [model.id for model in client.models.list().data]
    if given.adapter not in names:
        raise SystemExit(f"the server has no adapter {given.adapter}; it has {', '.join(names)}")
    for model in (names[0], given.adapter):
        answer = client.completions.create(
            model=model, prompt=given.question, max_tokens=given.max_tokens, temperature=0
        )
        print(f"{model}: {answer.choices[0].text.strip()}")


if __name__ == "__main__":
    main()

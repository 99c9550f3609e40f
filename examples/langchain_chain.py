"""A LangChain chain: a prompt template, the model, and a parser, as a stream.

python examples/langchain_chain.py lighthouse
"""

import argparse
import json
import urllib.request

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", nargs="?", default="lighthouse")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", help="default: the first one that the server lists")
    given = parser.parse_args()
    model = given.model or first_model(given.url)
    chat = ChatOpenAI(
        base_url=f"{given.url}/v1", api_key="unused", model=model, temperature=0, max_tokens=48
    )
    prompt = ChatPromptTemplate.from_template("Write one sentence about a {subject}.")
    chain = prompt | chat | StrOutputParser()
    for piece in chain.stream({"subject": given.subject}):
        print(piece, end="", flush=True)
    print()


def first_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return json.load(response)["data"][0]["id"]


if __name__ == "__main__":
    main()

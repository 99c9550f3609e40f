"""Text into typed records: the answer always fits the schema of a pydantic class.

python examples/guided_extraction.py "Ann, 31, moved from Oslo to Rome."
"""

import argparse

from openai import OpenAI
from pydantic import BaseModel, Field

INSTRUCTION = "Extract the person and the places from the text."


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=130)
    places: list[str] = Field(max_length=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="Ann, 31, moved from Oslo to Rome.")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", help="default: the first one that the server lists")
    given = parser.parse_args()
    client = OpenAI(base_url=f"{given.url}/v1", api_key="unused")
    answer = client.chat.completions.parse(
        model=given.model or client.models.list().data[0].id,
        messages=[{"role": "user", "content": f"{INSTRUCTION}\n\n{given.text}"}],
        response_format=Person,
        max_tokens=400,
        temperature=0,
    )
    person = answer.choices[0].message.parsed
    print(person.model_dump_json(indent=2))


if __name__ == "__main__":
    main()

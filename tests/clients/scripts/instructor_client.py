"""instructor: its modes return an object of the given class."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel, ConfigDict


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    age: int


class AnyObject(BaseModel):
    """In the mode JSON the server knows no schema, and the small model follows none in words."""

    model_config = ConfigDict(extra="allow")


MODES = {
    instructor.Mode.TOOLS: Person,
    instructor.Mode.JSON_SCHEMA: Person,
    instructor.Mode.JSON: AnyObject,
}


def main(base_url: str, model: str, question: str) -> dict[str, object]:
    found = {}
    for mode, kind in MODES.items():
        client = instructor.from_openai(
            openai.OpenAI(base_url=base_url, api_key="unused"), mode=mode
        )
        made = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            response_model=kind,
            temperature=0,
            max_tokens=200,
            max_retries=0,
        )
        found[mode.name] = made.model_dump()
    return found


print(json.dumps(main(*sys.argv[1:])))

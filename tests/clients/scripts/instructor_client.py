"""instructor: the modes TOOLS, JSON and JSON_SCHEMA return an object of the given class."""

import json
import sys

import instructor
import openai
from instructor.exceptions import InstructorRetryException
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def main(base_url: str, model: str, question: str) -> dict[str, object]:
    found = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        client = instructor.from_openai(
            openai.OpenAI(base_url=base_url, api_key="unused"), mode=mode
        )
        try:
            person = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                response_model=Person,
                temperature=0,
                max_tokens=100,
                max_retries=0,
            )
            found[mode.name] = person.model_dump()
        except InstructorRetryException as error:
            found[mode.name] = str(error)[-1000:]
    return found


print(json.dumps(main(*sys.argv[1:])))

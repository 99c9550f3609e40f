"""What the worker scripts share: orders as lines of JSON on stdin, answers as lines of JSON on
stdout.

Standard library only, because workers run under the interpreters of other projects.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Timed:
    """One batch of requests, all submitted at once."""

    first_seconds: float  # until the first token of any of them
    seconds: float  # until the last token of all
    tokens: list[list[int]]  # what each request got


Generate = Callable[[list[list[int]], int], Timed]  # (prompts, tokens to generate for each)


def serve(start: Callable[[dict[str, Any]], Generate]) -> None:
    """`start` gets the JSON object of the command line, loads the model and returns what answers
    orders.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    generate = start(json.loads(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        print(
            json.dumps(asdict(generate(order["prompts"], order["max_tokens"]))),
            file=answers,
            flush=True,
        )

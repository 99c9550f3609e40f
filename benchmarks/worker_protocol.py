"""The protocol of the worker scripts: requests and answers as lines of JSON on stdin and stdout.

This module uses the standard library only, because workers run under other projects' interpreters.
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
    """The result of one batch of requests, all submitted at once."""

    first_seconds: float  # time to the first token of any request
    seconds: float  # time to the last token of all requests
    tokens: list[list[int]]  # output tokens of each request


# (prompts, tokens to generate for each), and True for temperature 0.7 and top-p 0.9
Generate = Callable[..., Timed]


def serve(start: Callable[[dict[str, Any]], Generate]) -> None:
    """Answer requests until stdin is closed.

    `start` receives the JSON object of the command line, loads the model and returns the function
    that generates.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps prints of libraries out of the answers
    generate = start(json.loads(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        given = [order["prompts"], order["max_tokens"]]
        if order.get("sampled"):
            given.append(True)
        print(json.dumps(asdict(generate(*given))), file=answers, flush=True)

"""The cost and gain of guided decoding, on the default model.

    python benchmarks/guided.py [MODEL] [--dtype float32] [--device cpu] [--rounds 5]
    python benchmarks/guided.py --shape llama3-8b --rows 32    # on a GPU: the slow-down only

- Examples: the tokens, model steps and log-probability of a guided answer. The limit of the tokens
  is the tokenizer's own encoding of the text, that of the steps one step for each such token.
- Extraction: how many of 30 sentences become the right JSON object, guided and unguided.
- Slow-down: the time of free requests in a batch with guided ones, divided by their time in a batch
  with free ones. Runs of both kinds alternate. On a CPU it is processor time, which other
  load on the machine hardly affects.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.engine.constraints.constraints import Constraints
from slipstream.engine.loop import EngineLoop, LaunchedStep
from slipstream.engine.plan import StepPlan
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import Guide, SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.process import start_real_engine
from slipstream.llm import engine_folder
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.server.text.vocabulary import read_vocabulary

TEXT = {"type": "string"}
NUMBER = {"type": "integer"}


def json_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


EXAMPLES = {
    "Bob is 7 years old and lives in London. Extract as JSON.": json_object(
        person_name=TEXT, age_in_years=NUMBER, home_city=TEXT
    ),
    "What colour is the sky on a clear day?": json_object(sky_colour=TEXT, explanation=TEXT),
    "What is the capital of France?": json_object(capital_city=TEXT),
}

PERSON = json_object(person_name=TEXT, age_in_years=NUMBER, home_city=TEXT)
SHOTS = [
    ("Maria, 31, works as a nurse in Lisbon.", ("Maria", 31, "Lisbon")),
    ("In Oslo lives Henrik, who turned 58 last week.", ("Henrik", 58, "Oslo")),
]
SENTENCES = [
    ("Bob is 7 years old and lives in London.", ("Bob", 7, "London")),
    ("Alice is 34 and has a flat in Paris.", ("Alice", 34, "Paris")),
    ("Carlos, aged 45, moved to Madrid.", ("Carlos", 45, "Madrid")),
    ("My neighbour Ingrid is 62; her home is in Bergen.", ("Ingrid", 62, "Bergen")),
    ("Yuki lives in Kyoto. She is 19 years old.", ("Yuki", 19, "Kyoto")),
    ("At 83, Giovanni still runs his shop in Rome.", ("Giovanni", 83, "Rome")),
    ("Fatima is a 27 year old engineer from Cairo.", ("Fatima", 27, "Cairo")),
    ("The teacher, Olga, 51, has always lived in Kiev.", ("Olga", 51, "Kiev")),
    ("Peter lives in Boston and is 40 years old.", ("Peter", 40, "Boston")),
    ("Twelve year old Emma (12) goes to school in Dublin.", ("Emma", 12, "Dublin")),
    ("Raj, 29, rents a room in Mumbai.", ("Raj", 29, "Mumbai")),
    ("In Berlin we met Klaus, who is 66.", ("Klaus", 66, "Berlin")),
    ("Sofia is 23. Her city is Athens.", ("Sofia", 23, "Athens")),
    ("Liam, a 15 year old from Toronto, plays chess.", ("Liam", 15, "Toronto")),
    ("Grandmother Rosa is 91 and lives in Naples.", ("Rosa", 91, "Naples")),
    ("The pianist Chen is 38 years old and comes from Shanghai.", ("Chen", 38, "Shanghai")),
    ("Nina has lived in Vienna for all of her 54 years.", ("Nina", 54, "Vienna")),
    ("Ahmed, 47, drives a taxi in Istanbul.", ("Ahmed", 47, "Istanbul")),
    ("Since last year, Lucy (26) lives in Sydney.", ("Lucy", 26, "Sydney")),
    ("Pablo is 33 years old. He lives in Lima.", ("Pablo", 33, "Lima")),
    ("Anna, who is 8, lives with her parents in Prague.", ("Anna", 8, "Prague")),
    ("David is a baker in Geneva and is 59.", ("David", 59, "Geneva")),
    ("Mei is 21 and studies in Taipei.", ("Mei", 21, "Taipei")),
    ("Viktor, 72, retired to Sofia.", ("Viktor", 72, "Sofia")),
    ("The youngest was Tom, 5 years old, from Leeds.", ("Tom", 5, "Leeds")),
    ("Hannah is 44. She works and lives in Zurich.", ("Hannah", 44, "Zurich")),
    ("Marco lives in Milan; he is 36.", ("Marco", 36, "Milan")),
    ("Aged 68, Teresa still lives in Porto.", ("Teresa", 68, "Porto")),
    ("Omar is 17 and lives in Tunis.", ("Omar", 17, "Tunis")),
    ("Kate, 30 years of age, is at home in Denver.", ("Kate", 30, "Denver")),
]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str = ""
    seconds: float = 0.0  # from the first step of the batch until the answer ended


def guide_of(schema: dict[str, Any]) -> Guide:
    return Guide("json_schema", json.dumps(schema))


def chat_prompt(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def run(
    loop: EngineLoop,
    requests: Sequence[GenerateRequest],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Answer]:
    """Return the answers to requests that run together."""
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        loop.submit(request)
    began = clock()
    while loop.has_work():
        outputs = loop.step()
        if outputs is None:
            continue
        tokens = iter(outputs.tokens)
        log_probs = iter(outputs.log_probs)
        for request_id, count, reason in zip(
            outputs.request_ids, outputs.token_counts, outputs.finish_reasons, strict=True
        ):
            answer = answers[request_id]
            answer.tokens += itertools.islice(tokens, count)
            answer.log_probs += itertools.islice(log_probs, count)
            answer.reason = reason
            answer.seconds = clock() - began
    return list(answers.values())


def count_steps(loop: EngineLoop, request: GenerateRequest) -> tuple[Answer, int]:
    """Return the answer to a request that runs alone, and its number of model steps."""
    plans: list[StepPlan] = []
    launch = loop.runner.launch

    def record(plan: StepPlan) -> LaunchedStep:
        plans.append(plan)
        return launch(plan)

    loop.runner.launch = record  # type: ignore[method-assign]
    try:
        (answer,) = run(loop, [request])
    finally:
        loop.runner.launch = launch  # type: ignore[method-assign]
    return answer, len(plans)


def show_examples(loop: EngineLoop, tokenizer: Tokenizer) -> None:
    header = f"{'tokens':>6} {'own':>5} {'steps':>6} {'log-prob':>9}  answer"
    print(header)
    for text, schema in EXAMPLES.items():
        prompt = tokenizer.encode(chat_prompt(text))
        sampling = SamplingParams(
            max_tokens=200, guide=guide_of(schema), end_ids=tuple(tokenizer.end_ids)
        )
        answer, steps = count_steps(loop, GenerateRequest(1, prompt, sampling))
        scored, _ = count_steps(loop, GenerateRequest(1, prompt, replace(sampling, log_probs=True)))
        written = tokenizer.decode(answer.tokens)
        own = len(tokenizer.encode(written, False))
        print(
            f"{len(answer.tokens):6} {own:5} {steps:6} {sum(scored.log_probs):9.1f}  "
            f"{json.dumps(json.loads(written))}"
        )


def extraction_prompt(sentence: str, shots: bool) -> str:
    """Return a prompt with two examples, or one for a chat that only names the fields."""
    if shots:
        examples = [f"Text: {text}\nJSON:\n{_person(person)}\n\n" for text, person in SHOTS]
        return "".join(examples) + f"Text: {sentence}\nJSON:\n"
    names = ", ".join(PERSON["properties"])
    return chat_prompt(f"{sentence} Extract {names} as JSON.")


def _person(person: tuple[str, int, str]) -> str:
    return json.dumps(dict(zip(PERSON["properties"], person, strict=True)))


def count_exact_matches(loop: EngineLoop, tokenizer: Tokenizer, guided: bool, shots: bool) -> int:
    """Return how many sentences become exactly their person."""
    sampling = SamplingParams(
        max_tokens=80,
        guide=guide_of(PERSON) if guided else None,
        end_ids=tuple(tokenizer.end_ids),
    )
    requests = [
        GenerateRequest(index, tokenizer.encode(extraction_prompt(sentence, shots)), sampling)
        for index, (sentence, _) in enumerate(SENTENCES)
    ]
    answers = run(loop, requests)
    expected = [json.loads(_person(person)) for _, person in SENTENCES]
    found = [_first_object(tokenizer.decode(answer.tokens)) for answer in answers]
    return sum(left == right for left, right in zip(found, expected, strict=True))


def _first_object(text: str) -> Any:
    """Return the JSON object at the beginning of a text; None where there is none."""
    try:
        return json.JSONDecoder().raw_decode(text.strip())[0]
    except ValueError:
        return None


def measure_free_requests(
    loop: EngineLoop, tokenizer: Tokenizer, guide: Guide | None, rows: int, tokens: int
) -> float:
    """Return the seconds that free requests take beside as many others, which follow a guide."""
    prompt = tokenizer.encode("Once upon a time, in a village by the sea,")
    free = SamplingParams(max_tokens=tokens)
    # they run on until the free requests have ended
    other = SamplingParams(max_tokens=tokens + 16, guide=guide)
    requests = [GenerateRequest(rows + index, prompt, other) for index in range(rows)]
    requests += [GenerateRequest(index, prompt, free) for index in range(rows)]
    clock = time.process_time if loop.info.device == "cpu" else time.perf_counter
    answers = run(loop, requests, clock)[rows:]
    assert all(len(answer.tokens) == tokens for answer in answers)
    return max(answer.seconds for answer in answers)


def show_slow_down(loop: EngineLoop, tokenizer: Tokenizer, rounds: int, rows: int) -> None:
    # Its masks are those of a string in JSON. No part of the text is forced.
    guide = Guide("regex", r'"[^"\\\n]{2000}"')
    measure_free_requests(loop, tokenizer, guide, rows, 8)
    ratios = []
    for _ in range(rounds):
        with_guides = measure_free_requests(loop, tokenizer, guide, rows, 48)
        without = measure_free_requests(loop, tokenizer, None, rows, 48)
        ratios.append(with_guides / without)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"{rows} free and {rows} guided: {statistics.median(ratios):.3f} ({spread}), limit 1.03")


def random_engine(shape: str, folder: Path, rows: int) -> EngineLoop:
    """Return an engine with random weights of a shape, and the tokenizer in `folder`."""
    from random_models import SHAPES, random_tensors

    from slipstream.engine.start import create_engine

    spec = SHAPES[shape]
    settings = EngineSettings(max_rows=rows, reuse=False, max_sequence_tokens=2304)
    loop = create_engine(spec, random_tensors(spec), settings, spec.max_positions)
    loop.constraints = Constraints(partial(read_vocabulary, folder, spec.vocab_size))
    return loop


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a model or its folder")
    parser.add_argument("--dtype", default="float32", help="(default: float32)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--rows", type=int, default=8, help="free requests (default: 8)")
    parser.add_argument("--shape", help="measure the slow-down on random weights of this shape")
    options = parser.parse_args()
    folder = engine_folder(options.model, options.dtype, None)
    tokenizer = Tokenizer.load(folder)
    if options.shape:
        loop = random_engine(options.shape, folder, 2 * options.rows)
        return show_slow_down(loop, tokenizer, options.rounds, options.rows)
    loop = start_real_engine(
        str(folder),
        EngineSettings(
            dtype=options.dtype, device=options.device, reuse=False, max_rows=2 * options.rows
        ),
    )
    assert isinstance(loop, EngineLoop)
    print("examples")
    show_examples(loop, tokenizer)
    for shots in (True, False):
        with_guide, without = (
            count_exact_matches(loop, tokenizer, guided, shots) for guided in (True, False)
        )
        title = "with two examples" if shots else "without examples"
        print(f"extraction {title}: guided {with_guide}, unguided {without} of {len(SENTENCES)}")
    print("slow-down of free requests")
    show_slow_down(loop, tokenizer, options.rounds, options.rows)


if __name__ == "__main__":
    main()

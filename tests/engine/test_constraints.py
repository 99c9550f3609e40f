"""Masks depend on the tokens before them, however the requests are run."""

import threading

import pytest
from run_engine import engine
from run_outputs import run
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.engine.constraints import constraints
from slipstream.engine.constraints.constraints import LONG_GUIDE, All, Constraints
from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import Guide, SamplingParams
from slipstream.weights.build import build_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("constraints")
    random_model(config_of("llama", max_position_embeddings=256)).save_pretrained(place / "hf")
    return build_engine(place / "hf", place / "engine", dtype="float32")


def mask_of(tokens) -> bytes:
    bits = sum(1 << token for token in tokens)
    return bits.to_bytes(-(-VOCABULARY // 32) * 4, "little")


class Rising:
    """Allows only tokens larger than the last one; no token may follow the largest."""

    error = ""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def mask(self, tokens):
        first = tokens[-1] + 1 if tokens else 0
        return mask_of(range(first, min(first + 7, VOCABULARY)))

    def complete(self, tokens):
        return len(tokens) == self.length or tokens[-1] == VOCABULARY - 1


WAYS = {
    "alone": {"max_rows": 1},
    "together": {},
    "in steps of 9 tokens": {"step_tokens": 9},
    "preempted": {
        "policy": "max_utilization",
        "cache_tokens": 96,
        "block_tokens": 4,
        "max_rows": 8,
    },
}


def prompts() -> list[list[int]]:
    return [[(7 * place + index) % VOCABULARY for place in range(20 + index)] for index in range(6)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_masks_apply_at_every_token_and_only_to_their_own_request(folder, way, depth):
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=8)
    expected = run(
        engine(folder), [GenerateRequest(i, p, sampling) for i, p in enumerate(prompts())]
    ).tokens
    loop = engine(folder, **WAYS[way])
    loop.depth = depth
    for index, prompt in enumerate(prompts()):
        loop.scheduler.add(
            GenerateRequest(index, prompt, sampling), Rising() if index % 2 else None
        )
    outputs = run(loop, [])
    if way == "preempted":
        assert loop.stats().preemptions > 0
    for index in range(6):
        tokens = outputs.tokens[index]
        if index % 2:
            assert tokens == sorted(set(tokens))
            assert Rising().complete(tokens)
            assert outputs.reasons[index] == "stop"
        else:
            assert tokens == expected[index]


def test_error_of_a_constraint_that_allows_no_token(folder):
    class Nothing:
        error = "the grammar has come to a dead end"

        def mask(self, tokens):
            return mask_of([])

        def complete(self, tokens):
            return False

    loop = engine(folder)
    loop.scheduler.add(GenerateRequest(1, [4], SamplingParams(max_tokens=3)), Nothing())
    loop.scheduler.add(GenerateRequest(2, [4], SamplingParams(max_tokens=3)))
    outputs = run(loop, [])
    assert outputs.errors == {1: "the grammar has come to a dead end"}
    assert outputs.reasons == {1: "error", 2: "length"}


def test_two_constraints_allow_the_intersection_of_their_tokens():
    both = All([Rising(), Rising(3)])
    assert both.mask([5]) == mask_of(range(6, 13))
    assert both.complete([1, 2, 3])
    assert not both.complete([1, 2])


def test_a_request_whose_constraint_cannot_be_built_is_refused(folder):
    loop = engine(folder)
    loop.constraints = Constraints()  # without a tokenizer
    guided = SamplingParams(max_tokens=3, guide=Guide("json", ""))
    outputs = run(
        loop,
        [GenerateRequest(1, [4], guided), GenerateRequest(2, [4], SamplingParams(max_tokens=3))],
    )
    assert "knows no texts of its tokens" in outputs.errors[1]
    assert outputs.reasons == {1: "error", 2: "length"}


def test_a_request_can_be_cancelled_while_its_constraint_is_built(folder):
    gate = threading.Event()
    loop = engine(folder)
    loop.constraints = Constraints(lambda: gate.wait(20) and None)
    loop.submit(GenerateRequest(1, [4], SamplingParams(guide=Guide("json", ""))))
    assert loop.has_work()
    loop.step()
    loop.cancel([1])
    gate.set()
    outputs = run(loop, [])
    assert outputs.reasons == {1: "cancelled"}
    assert not loop.has_work()


class SlowGuides:
    """Takes the place of `Guides`. Long grammars are compiled when the gate opens."""

    gate = threading.Event()

    def __init__(self, vocabulary):
        pass

    def open(self, guide, end_ids):
        if len(guide.text) > LONG_GUIDE:
            assert self.gate.wait(20)
        return Rising()


def test_a_slow_grammar_delays_neither_words_nor_short_grammars(monkeypatch):
    monkeypatch.setattr(constraints, "Guides", SlowGuides)
    monkeypatch.setattr(SlowGuides, "gate", threading.Event())
    building = Constraints(lambda: Vocabulary([b"a", b"b"], frozenset()))
    long = Guide("regex", "a" * (LONG_GUIDE + 1))
    samplings = [*[SamplingParams(guide=long)] * 4]
    samplings += [SamplingParams(guide=Guide("regex", "a")), SamplingParams(bad_texts=("ab",))]
    for number, sampling in enumerate(samplings):
        building.start(GenerateRequest(number, [1], sampling))
    ready: list[int] = []
    while len(ready) < 2:
        building.wait(20)
        ready += [built.request.request_id for built in building.take_ready()]
    assert sorted(ready) == [4, 5]
    assert len(building) == 4
    SlowGuides.gate.set()
    while len(ready) < 6:
        building.wait(20)
        built = building.take_ready()
        assert not any(one.problem for one in built)
        ready += [one.request.request_id for one in built]


def test_a_request_whose_grammar_takes_too_long_fails_and_names_the_field(monkeypatch):
    monkeypatch.setattr(constraints, "Guides", SlowGuides)
    monkeypatch.setattr(constraints, "MAX_COMPILE_SECONDS", 0.0)
    monkeypatch.setattr(SlowGuides, "gate", threading.Event())
    building = Constraints(lambda: Vocabulary([b"a"], frozenset()))
    guide = Guide("regex", "a" * (LONG_GUIDE + 1))
    building.start(GenerateRequest(1, [1], SamplingParams(guide=guide)))
    built = []
    while not built:
        built = building.take_ready()
    SlowGuides.gate.set()
    assert built[0].constraint is None
    assert built[0].problem == (
        "guided_decoding_guide: takes over 15 s to compile: make it smaller"
    )
    assert len(building) == 0


def test_random_arrivals_and_cancels_release_every_row_and_block(folder):
    import random

    import numpy as np

    from slipstream.engine.request import PromptTable

    chance = random.Random(5)
    table = PromptTable(VOCABULARY, 4, np.ones((4, 64), np.float32).tobytes())
    kinds = [
        {},
        {"no_repeat_ngram": 2},
        {"context_logits": True, "generation_logits": True},
        {"prompt_log_probs": True},
        {"temperature": 1.0, "top_p": 0.9, "top_p_decay": 0.9},
        {"top_log_probs": 3, "timing": True},
    ]
    loop = engine(folder, cache_tokens=1024, policy="max_utilization", block_tokens=8, max_rows=12)
    live: list[int] = []
    for request_id in range(500):
        sampling = SamplingParams(max_tokens=chance.randrange(1, 30), **chance.choice(kinds))
        tuned = chance.random() < 0.2
        prompt = [chance.randrange(VOCABULARY + 4 * tuned) for _ in range(chance.randrange(1, 40))]
        request = GenerateRequest(
            request_id,
            prompt,
            sampling,
            prompt_table=table if tuned else None,
            cache_salt="tuned" if tuned else "",
        )
        loop.scheduler.add(request, Rising() if chance.random() < 0.3 else None)
        live.append(request_id)
        while len(live) > 10:
            loop.cancel([live.pop(chance.randrange(len(live)))])
        if chance.random() < 0.3:
            loop.step()
    loop.cancel(live)
    outputs = run(loop, [])
    assert not outputs.errors
    stats = loop.stats()
    assert (stats.free_blocks, stats.finished) == (stats.total_blocks, 500)

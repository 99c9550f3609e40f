"""Combinations of request features: each works as it does alone, and no other request changes."""

import math
import time

import numpy as np
import pytest
import torch
from run_engine import all_logits, engine, generate, run_all
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.engine.constraints.bad_words import BadTexts, Spelling
from slipstream.engine.constraints.constraints import Constraints
from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.engine.messages import Scores
from slipstream.engine.request import GenerateRequest, PromptTable
from slipstream.engine.sampling_params import Guide, SamplingParams
from slipstream.engine.speculation import DraftProposer
from slipstream.weights.build import build_engine

HIDDEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("combinations")
    random_model(config_of("llama", max_position_embeddings=256)).save_pretrained(place / "hf")
    return build_engine(place / "hf", place / "engine", dtype="float32")


def prompt_of(length: int, seed: int = 3) -> list[int]:
    return torch.randint(
        0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def table_of(value: float, rows: int = 4) -> PromptTable:
    return PromptTable(VOCABULARY, rows, np.full((rows, HIDDEN), value, np.float32).tobytes())


@pytest.mark.parametrize(
    "settings", [{}, {"step_tokens": 7, "block_tokens": 4}], ids=["one step", "in steps"]
)
def test_prompt_scores_are_sent_once_with_beams_and_other_requests(folder, settings):
    loop, prompt = engine(folder, **settings), prompt_of(22)
    searched = SamplingParams(
        max_tokens=6, beam_width=3, prompt_log_probs=True, context_logits=True
    )
    loop.submit(GenerateRequest(1, prompt_of(9, seed=8), SamplingParams(max_tokens=40)))
    loop.submit(GenerateRequest(2, prompt, searched))
    scores = Scores()
    while loop.has_work():
        outputs = loop.step()
        if outputs is not None and 2 in outputs.scores:
            assert 2 in outputs.request_ids  # otherwise the scores are not read
            scores.merge(outputs.scores[2])
    expected = all_logits(folder, torch.float32, [prompt])[0]
    found = np.frombuffer(scores.context_logits, np.float32).reshape(-1, VOCABULARY)
    assert np.allclose(found, expected, atol=1e-3)
    log_probs = expected.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
    assert np.allclose(scores.prompt_log_probs, log_probs, atol=1e-3)


def test_prompt_lookup_proposes_no_prompt_table_tokens(folder):
    prompt = [5, 6, 7, 8, VOCABULARY + 1, VOCABULARY + 2, 5, 6, 7, 8]
    requests = [
        GenerateRequest(1, prompt, SamplingParams(max_tokens=12), prompt_table=table_of(0.1))
    ]
    assert run_all(engine(folder, lookup_tokens=4), requests) == run_all(engine(folder), requests)


def test_draft_tokens_of_the_prompt_table_are_refused(folder):
    request = GenerateRequest(
        1,
        [VOCABULARY],
        SamplingParams(max_tokens=4),
        draft=[VOCABULARY],
        prompt_table=table_of(0.1),
    )
    assert f"token id {VOCABULARY} is outside" in run_all(engine(folder), [request]).errors[1]


def test_a_long_prompt_is_indexed_in_parts():
    tokens = [*range(10_000), 3, 4, 5]
    proposer = DraftProposer(lookup_tokens=2)
    assert proposer.propose(tokens, len(tokens), 2) == [6, 7]  # from the indexed part
    late = [*range(10_000), 9000, 9001, 9002]
    proposer = DraftProposer(lookup_tokens=2)
    found = [proposer.propose(late, len(late), 2) for _ in range(3)]
    assert found == [[], [], [9003, 9004]]


def test_non_finite_embeddings_affect_only_their_own_request(folder):
    """Its blocks are reused by others, and its rows are in the same steps as others' rows."""
    poison = [
        GenerateRequest(
            90 + i,
            [VOCABULARY, *prompt_of(30 + i)],
            SamplingParams(max_tokens=3),
            prompt_table=table_of(math.nan),
            cache_salt=f"{i}",
        )
        for i in range(3)
    ]
    others = [
        GenerateRequest(i, prompt_of(3 + 5 * i, seed=i), SamplingParams(max_tokens=20))
        for i in range(4)
    ]
    settings = {"block_tokens": 8, "cache_tokens": 256, "reuse": False, "max_rows": 8}
    expected = run_all(engine(folder, **settings), others)
    loop = engine(folder, **settings)
    first = run_all(loop, poison)
    assert all("not finite" in first.errors[request.request_id] for request in poison)
    mixed = run_all(loop, [*others[:2], *poison, *others[2:]])
    assert {request.request_id: mixed[request.request_id] for request in others} == expected


@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_a_tiny_temperature_is_greedy(folder, more):
    prompts = [prompt_of(9, seed) for seed in range(3)]
    assert generate(
        engine(folder), prompts, temperature=1e-40, seed=3, max_tokens=8, **more
    ) == generate(engine(folder), prompts, max_tokens=8)


def test_a_deadline_expires_while_a_constraint_is_built(folder):
    import threading

    gate, loop = threading.Event(), engine(folder)
    loop.constraints = Constraints(lambda: gate.wait(20) and None)
    late = SamplingParams(guide=Guide("json", ""))
    loop.submit(GenerateRequest(1, [4], late, deadline=time.monotonic() - 1.0))
    loop.submit(GenerateRequest(2, [4], late))
    outputs = loop.step()
    gate.set()
    assert outputs is not None
    assert (outputs.request_ids, outputs.finish_reasons) == ([1], ["timeout"])
    assert len(loop.constraints) == 1


def test_bad_words_with_a_common_prefix_are_all_forbidden():
    spelling = Spelling(Vocabulary([b"a", b"b", b"c", b"bc", b"ab", b"x", b"bx"], frozenset()))
    constraint = BadTexts(spelling, [b"ab", b"acx", b"bc"])

    def allowed(tokens: list[int]) -> set[int]:
        bits = int.from_bytes(constraint.mask(tokens), "little")
        return {token for token in range(7) if bits >> token & 1}

    assert allowed([]) == {0, 1, 2, 5, 6}
    assert allowed([0]) == {0, 2, 5}
    assert allowed([0, 2]) == {0, 1, 2, 6}
    assert allowed([1]) == {0, 1, 5, 6}
    assert allowed([0]) == {0, 2, 5}

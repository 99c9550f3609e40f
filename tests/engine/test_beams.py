"""Beam search finds the beams of transformers' beam search, on tiny float32 models and in any
batch.
"""

import functools
from dataclasses import replace

import pytest
import torch
from run_engine import engine, run_all
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.engine.beams.search import BeamSearch
from slipstream.engine.constraints.constraints import Constraints
from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.weights.build import build_engine

LETTERS = "abcd"
EARLY_STOPPING = {False: 0, True: 1, "never": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("beams")
    model = random_model(config_of("llama")).eval()
    model.save_pretrained(place / "hf")
    return model, build_engine(place / "hf", place / "engine", dtype="float32")


def prompt_of(length: int) -> list[int]:
    return torch.randint(
        0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()


@functools.cache
def common_tokens(model, length: int) -> list[int]:
    """Return tokens that beams often choose. As end ids they end beams at different times."""
    found = model.generate(
        torch.tensor([prompt_of(length)]),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=12,
        pad_token_id=0,
        eos_token_id=None,
    )
    return found[:, length:].flatten().tolist()


def theirs(
    model, prompt: list[int], sampling: SamplingParams, early_stopping, **more
) -> list[tuple[list[int], float]]:
    """Return (tokens with the end token, score), best first."""
    end_ids = list(sampling.end_ids) or None
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            num_beams=sampling.beam_width,
            num_return_sequences=sampling.beam_width,
            max_new_tokens=sampling.max_tokens,
            length_penalty=sampling.length_penalty,
            early_stopping=early_stopping,
            eos_token_id=end_ids,
            pad_token_id=VOCABULARY - 1,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            repetition_penalty=sampling.repetition_penalty,
            **more,
        )
    beams = []
    for row, score in zip(
        found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True
    ):
        end = next((i + 1 for i, token in enumerate(row) if token in sampling.end_ids), len(row))
        beams.append((row[:end], score))
    return beams


def assert_same(beams, expected, sampling: SamplingParams) -> None:
    assert len(beams) == len(expected) == sampling.beam_width
    for beam, (tokens, score) in zip(beams, expected, strict=True):
        ends = tokens[-1] in sampling.end_ids
        assert beam.tokens == tokens[: len(tokens) - ends]
        assert beam.finish_reason == ("stop" if ends else "length")
        assert beam.total_log_prob / len(tokens) ** sampling.length_penalty == pytest.approx(
            score, abs=2e-4
        )
        if not ends:
            assert sum(beam.log_probs) == pytest.approx(beam.total_log_prob, abs=1e-6)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
def test_beams_equal_transformers_beams(model, early_stopping, length_penalty):
    reference, folder = model
    loop = engine(folder)
    requests, expected, ends = [], {}, set()
    for width in range(2, 9):
        prompt = prompt_of(5 + 9 * width)
        common = common_tokens(reference, len(prompt))
        for count in (0, 2):
            end_ids = tuple(sorted(set(common))[:count])
            sampling = SamplingParams(
                max_tokens=14,
                beam_width=width,
                length_penalty=length_penalty,
                end_ids=end_ids,
                early_stopping=EARLY_STOPPING[early_stopping],
            )
            requests.append(GenerateRequest(len(requests), prompt, sampling))
            expected[requests[-1].request_id] = theirs(reference, prompt, sampling, early_stopping)
    answers = run_all(loop, requests)
    for request in requests:
        beams = answers.beams[request.request_id]
        assert_same(beams, expected[request.request_id], request.sampling)
        ends |= {len(beam.tokens) for beam in beams if beam.finish_reason == "stop"}
    if length_penalty <= 0.0:  # otherwise the longest ones win
        assert len(ends) > 3, "beams ended at different times"


END, GO_ON, ASIDE = 0, 1, 2
REWARDED = [  # for each step, the candidates of each beam
    [[(END, -1.0), (GO_ON, -1.2), (ASIDE, -9.0)]],
    [[(END, -0.1), (GO_ON, -0.8)], [(ASIDE, -1.0)]],
    [[(END, -0.1), (GO_ON, -5.0)], [(ASIDE, -1.0)]],
]
PENALISED = [
    [[(GO_ON, -0.1), (END, -3.0), (ASIDE, -9.0)]],
    [[(GO_ON, -0.1), (END, -4.0)], [(ASIDE, -1.0)]],
    [[(END, -0.1), (GO_ON, -5.0)], [(ASIDE, -1.0)]],
]


@pytest.mark.parametrize(
    ("steps", "length_penalty", "early_stopping", "lengths"),
    [
        (REWARDED, 1.0, 1, [1, 0]),
        (REWARDED, 1.0, 0, [1, 0]),  # -2.0 / 2 is no better than the worst ended beam
        (REWARDED, 1.0, 2, [1, 2]),  # but -2.0 / 50 would be, and -2.1 / 3 is
        (PENALISED, -1.0, 1, [0, 1]),
        (PENALISED, -1.0, 0, [2, 0]),  # -0.2 * 2 is better than the worst ended beam
        (PENALISED, -1.0, 2, [2, 0]),  # and the maximum length does not raise a score
    ],
)
def test_early_stopping_rules_end_the_search_as_in_transformers(
    steps, length_penalty, early_stopping, lengths
):
    search = BeamSearch(
        SamplingParams(
            max_tokens=50,
            beam_width=2,
            end_ids=(END,),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
    )
    for candidates in steps:
        if not search.finished:
            search.advance(candidates)
    assert [len(beam.tokens) for beam in search.results()[:2]] == lengths


class HasWord:
    """A stopping criterion of transformers: the text after the prompt contains a word."""

    def __init__(self, prompt: list[int], words: tuple[str, ...]) -> None:
        self.prompt, self.words = prompt, words

    def end(self, tokens: list[int]) -> int | None:
        """Return the number of tokens up to the word."""
        return next(
            (
                count
                for count in range(1, len(tokens) + 1)
                if any(word in text_of(tokens[:count]) for word in self.words)
            ),
            None,
        )

    def __call__(self, sequences: torch.Tensor, scores, **more) -> torch.Tensor:
        return torch.tensor(
            [self.end(row) is not None for row in sequences[:, len(self.prompt) :].tolist()]
        )


def text_of(tokens: list[int]) -> str:
    return "".join(LETTERS[token % 4] * (1 + token % 2) for token in tokens)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("words", [("ca",), ("ddd", "bca"), ("aac", "d"), ("never",)])
def test_a_beam_ends_at_a_stop_word(model, early_stopping, words):
    """As in transformers with a stopping criterion: such a beam is one of the results, the others
    go on.
    """
    reference, folder = model
    loop = engine(folder)
    loop.constraints = Constraints(
        lambda: Vocabulary([text_of([t]).encode() for t in range(VOCABULARY)], frozenset())
    )
    reasons = set()
    for width in (2, 3, 5):
        prompt = prompt_of(7 + 5 * width)
        sampling = SamplingParams(
            max_tokens=14, beam_width=width, early_stopping=EARLY_STOPPING[early_stopping]
        )
        criterion = HasWord(prompt, words)
        expected = theirs(
            reference, prompt, sampling, early_stopping, stopping_criteria=[criterion]
        )
        found = run_all(
            loop, [GenerateRequest(1, prompt, replace(sampling, stop_texts=words))]
        ).beams[1]
        for beam, (tokens, score) in zip(found, expected, strict=True):
            end = criterion.end(tokens)
            assert beam.tokens == tokens[:end]
            assert beam.finish_reason == ("length" if end is None else "stop")
            assert beam.total_log_prob == pytest.approx(score, abs=2e-4)
        reasons |= {beam.finish_reason for beam in found}
    assert ("stop" in reasons) is (words != ("never",))


def test_no_beam_contains_a_bad_text(model):
    """As in transformers with a function that returns the allowed tokens."""
    reference, folder = model
    loop = engine(folder)
    loop.constraints = Constraints(
        lambda: Vocabulary([text_of([t]).encode() for t in range(VOCABULARY)], frozenset())
    )
    words = ("ab", "cc", "ddb")
    for width in (2, 4):
        prompt = prompt_of(9 + 5 * width)

        def allowed(_, sequence, prompt=prompt):
            text = text_of(sequence.tolist()[len(prompt) :])
            return [
                t
                for t in range(VOCABULARY)
                if not any(word in text + text_of([t]) for word in words)
            ]

        sampling = SamplingParams(max_tokens=12, beam_width=width)
        expected = theirs(reference, prompt, sampling, True, prefix_allowed_tokens_fn=allowed)
        found = run_all(
            loop, [GenerateRequest(1, prompt, replace(sampling, bad_texts=words))]
        ).beams[1]
        assert [beam.tokens for beam in found] == [tokens for tokens, _ in expected]
        plain = run_all(loop, [GenerateRequest(1, prompt, sampling)]).beams[1]
        assert any(word in text_of(beam.tokens) for beam in plain for word in words)


def test_penalties_change_beam_log_probabilities_as_in_transformers(model):
    reference, folder = model
    sampling = SamplingParams(
        max_tokens=12, beam_width=3, repetition_penalty=1.3, length_penalty=1.0
    )
    prompt = prompt_of(20)
    answers = run_all(engine(folder), [GenerateRequest(1, prompt, sampling)])
    assert_same(answers.beams[1], theirs(reference, prompt, sampling, True), sampling)


def test_beams_and_other_requests_do_not_affect_each_other(model):
    _, folder = model
    searching = SamplingParams(max_tokens=20, beam_width=4)
    sampled = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    alone = run_all(engine(folder), [GenerateRequest(1, prompt_of(40), searching)])
    beside = run_all(engine(folder), [GenerateRequest(2, prompt_of(41), sampled)])
    for settings in (
        {},
        {"step_tokens": 5, "block_tokens": 4},
        {"reuse": False, "block_tokens": 8},
        {"policy": "max_utilization", "cache_tokens": 200, "block_tokens": 4},
    ):
        loop = engine(folder, max_rows=9, **settings)
        together = run_all(
            loop,
            [
                GenerateRequest(1, prompt_of(40), searching),
                GenerateRequest(2, prompt_of(41), sampled),
                GenerateRequest(3, prompt_of(40), searching),
            ],
        )
        for request_id in (1, 3):
            assert [beam.tokens for beam in together.beams[request_id]] == [
                beam.tokens for beam in alone.beams[1]
            ]
        assert together[2] == beside[2]


@pytest.mark.parametrize(
    ("settings", "widest"),
    [({}, 64), ({"max_rows": 8}, 8), ({"max_beam_width": 3}, 3), ({"max_beam_width": 100}, 100)],
)
def test_many_rows_do_not_make_beam_searches_wider(model, settings, widest):
    loop = engine(model[1], cache_tokens=16384, **settings)
    assert loop.info.max_beam_width == widest


def test_diversity_rate_favours_later_beams(model):
    _, folder = model
    plain, spread = (
        run_all(
            engine(folder),
            [
                GenerateRequest(
                    1,
                    prompt_of(30),
                    SamplingParams(max_tokens=8, beam_width=4, diversity_rate=rate),
                )
            ],
        )
        for rate in (0.0, 50.0)
    )
    first = {beam.tokens[0] for beam in spread.beams[1]}
    assert [beam.tokens for beam in plain.beams[1]] != [beam.tokens for beam in spread.beams[1]]
    assert len(first) == 1, "with such a rate only the last beam's continuations are chosen"


def test_a_minimum_length_and_bad_words_hold_in_every_beam(model):
    reference, folder = model
    prompt = prompt_of(25)
    end, bad = sorted(set(common_tokens(reference, len(prompt))))[:2]
    sampling = SamplingParams(
        max_tokens=10, beam_width=4, end_ids=(end,), min_tokens=6, bad_words=((bad,),)
    )
    for beam in run_all(engine(folder), [GenerateRequest(1, prompt, sampling)]).beams[1]:
        assert len(beam.tokens) >= 6
        assert bad not in beam.tokens

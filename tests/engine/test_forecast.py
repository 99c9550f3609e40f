"""Requests start when others will have ended by the time they need the room; nobody is ever put off
for it.
"""

import random

import pytest
from scheduler_harness import Device, Harness, expected_answer

from slipstream.engine.blocks import BlockPool
from slipstream.engine.forecast import Forecast
from slipstream.engine.request import GenerateRequest, SamplingParams
from slipstream.engine.scheduler import Scheduler

BLOCK = 4


def serve(requests, blocks, rows=32, step_tokens=64, depth=2, cancel=None):
    """All requests through the scheduler → (answers, steps, most that ran at once)"""
    scheduler = Scheduler(BlockPool(blocks, BLOCK, reuse=False), rows, step_tokens, 400, 50)
    harness, most = Harness(scheduler, depth), 0
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work() or harness.flight:
        harness.turn()
        most = max(most, scheduler.stats().running)
        assert scheduler.stats().preemptions == 0, "nobody who runs is put off"
        if cancel is not None:
            cancel(scheduler)
    assert scheduler.stats().free_blocks == blocks
    return harness.answers, scheduler.stats().steps, most


def requests_of(sizes, ends=False, priorities=(0,)):
    """sizes: of prompt and output. Without `ends` every answer has its full length."""
    end_ids = (3,) if ends else ()
    return [
        GenerateRequest(
            number,
            [1 + (number + place) % 40 for place in range(prompt)],
            SamplingParams(max_tokens=output, end_ids=end_ids),
            priority=priorities[number % len(priorities)],
        )
        for number, (prompt, output) in enumerate(sizes)
    ]


def test_a_short_request_ends_before_the_long_one_needs_its_room():
    # Each alone may come to 15 + 5 blocks: together 20, of which there are 18. Yet when the long
    # one has grown to more than 13, the short one is gone.
    sizes = [(8, 53), (8, 13)]
    answers, steps, most = serve(requests_of(sizes), blocks=18)
    assert most == 2
    assert [len(answers[number]) for number in (0, 1)] == [53, 13]
    assert steps == 53 + 1, "they ran side by side; the last plan finds out that all have ended"


def test_requests_that_grow_alike_start_one_after_the_other():
    sizes = [(8, 33), (8, 33)]  # both come to 10 blocks
    _, together, _ = serve(requests_of(sizes), blocks=20)
    assert together == 33 + 1
    _, steps, most = serve(requests_of(sizes), blocks=19)
    assert most == 2, "the second starts when the first will have ended in time"
    assert together < steps < 2 * 33


def test_where_a_step_has_no_room_for_all_nothing_is_known_of_their_pace():
    _, _, most = serve(requests_of([(8, 53), (8, 13)]), blocks=18, rows=32, step_tokens=16)
    assert most == 1


@pytest.mark.parametrize("seed", range(40))
def test_nobody_is_put_off_whatever_comes(seed):
    chance = random.Random(seed)
    sizes = [(chance.randint(1, 90), chance.randint(1, 90)) for _ in range(chance.randint(2, 40))]
    requests = requests_of(sizes, ends=chance.random() < 0.5, priorities=(0, 0, 5))
    blocks = chance.randint(46, 140)  # the longest request alone takes 45
    gone = set()

    def cancel(scheduler):
        if chance.random() < 0.02:
            number = chance.randrange(len(requests))
            gone.add(number)
            scheduler.cancel(number)

    answers, _, _ = serve(
        requests,
        blocks,
        rows=chance.choice([4, 32]),
        step_tokens=chance.choice([32, 64]),
        depth=chance.choice([1, 2]),
        cancel=cancel,
    )
    for number, request in enumerate(requests):
        if number not in gone and request.sampling.end_ids:
            assert answers[number] == expected_answer(request.prompt, request.sampling.max_tokens)
        elif number not in gone:
            assert len(answers[number]) == request.sampling.max_tokens


def test_guesses_take_nobodys_place_in_a_step(monkeypatch):
    # Two that guess stand before two that decode. Steps have a token for each and no more: guesses
    # would keep the last two waiting, whose end the others count on.
    monkeypatch.setattr(
        "scheduler_harness.next_token", lambda known: 100 + len(known) if len(known) < 226 else 7
    )
    monkeypatch.setattr(Device, "_compute", lambda *_: None)
    scheduler = Scheduler(BlockPool(3490, 1, reuse=False), 14, 14, 400, 1000, lookup_tokens=1)
    harness = Harness(scheduler, 1)
    for number in range(1, 15):
        limit = 275 if number <= 10 else 325 if number <= 12 else 230
        guesses = number in (11, 12)  # scored prompts have no guesses
        sampling = SamplingParams(max_tokens=limit - 1, prompt_log_probs=not guesses)
        scheduler.add(GenerateRequest(number, [1], sampling))
    harness.run_dry()
    assert scheduler.stats().preemptions == 0
    assert set(harness.reasons.values()) == {"length"}


class Decoding:
    deficit, drafter, group, lockstep = 1, None, None, False

    def __init__(self, computed, limit):
        self.computed, self.limit = computed, limit


def test_the_forecast_is_the_most_that_is_held_at_once():
    forecast = Forecast([Decoding(100, 200)], BLOCK, lambda request: 1000)
    assert forecast.most(7, None) == 203 // BLOCK + 1 + 7, (
        "the one that decodes, three steps late, and one that stays"
    )
    # At the short one's end, 13 steps from now, both: 100 + 13 and 50 + 13 tokens. At the long
    # one's, it alone: 203.
    both = max((163 + 13) // BLOCK + 2, 203 // BLOCK + 1)
    assert forecast.most(15, (50, 60)) == both
    forecast.add(15, (50, 60))
    forecast.add(9, None)
    assert forecast.most(0, None) == both + 9


@pytest.mark.parametrize("pace", [{"deficit": 5}, {"drafter": object()}, {"lockstep": True}])
def test_requests_at_their_own_pace_hold_what_they_may_for_good(pace):
    request = Decoding(10, 20)
    vars(request).update(pace)
    assert Forecast([request], BLOCK, lambda request: 1000).most(0, None) == 1000

"""Requests are admitted when others end before their blocks are needed, without preemptions."""

import random

import pytest
from scheduler_harness import Device, Harness, expected_answer

from slipstream.engine.blocks import BlockPool
from slipstream.engine.peak_usage import PeakUsage
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import Scheduler

BLOCK = 4


def serve(requests, blocks, rows=32, step_tokens=64, depth=2, cancel=None):
    """Run all requests; return the answers, the steps and the most requests that ran at once."""
    scheduler = Scheduler(BlockPool(blocks, BLOCK, reuse=False), rows, step_tokens, 400, 50)
    harness, most = Harness(scheduler, depth), 0
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work() or harness.flight:
        harness.step()
        most = max(most, scheduler.stats().running)
        assert scheduler.stats().preemptions == 0, "no running request is preempted"
        if cancel is not None:
            cancel(scheduler)
    assert scheduler.stats().free_blocks == blocks
    return harness.answers, scheduler.stats().steps, most


def requests_of(sizes, ends=False, priorities=(0,)):
    """sizes: of prompt and output. Without `ends` every output has its full length."""
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


def test_a_short_request_is_admitted_when_it_ends_before_the_long_one_grows():
    # Alone they need up to 15 and 5 blocks, together 20 of the 18 that there are. But the short
    # one ends before the long one has more than 13.
    sizes = [(8, 53), (8, 13)]
    answers, steps, most = serve(requests_of(sizes), blocks=18)
    assert most == 2
    assert [len(answers[number]) for number in (0, 1)] == [53, 13]
    assert steps == 53 + 1, "they ran side by side; the last plan finds out that all have ended"


def test_requests_with_the_same_growth_run_one_after_the_other():
    sizes = [(8, 33), (8, 33)]  # both need up to 10 blocks
    _, together, _ = serve(requests_of(sizes), blocks=20)
    assert together == 33 + 1
    _, steps, most = serve(requests_of(sizes), blocks=19)
    assert most == 2, "the second starts when the first will have ended in time"
    assert together < steps < 2 * 33


def test_no_peak_is_predicted_when_a_step_cannot_hold_all_rows():
    _, _, most = serve(requests_of([(8, 53), (8, 13)]), blocks=18, rows=32, step_tokens=16)
    assert most == 1


@pytest.mark.parametrize("seed", range(40))
def test_no_running_request_is_preempted_under_guaranteed_no_evict(seed):
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


def test_draft_tokens_never_displace_decoding_requests(monkeypatch):
    # Two requests with draft tokens come before two that decode. A step has one token for each:
    # draft tokens would delay the last two, whose end the prediction depends on.
    monkeypatch.setattr(
        "scheduler_harness.next_token", lambda known: 100 + len(known) if len(known) < 226 else 7
    )
    monkeypatch.setattr(Device, "_compute", lambda *_: None)
    scheduler = Scheduler(BlockPool(3490, 1, reuse=False), 14, 14, 400, 1000, lookup_tokens=1)
    harness = Harness(scheduler, 1)
    for number in range(1, 15):
        limit = 275 if number <= 10 else 325 if number <= 12 else 230
        drafts = number in (11, 12)  # scored prompts have no draft tokens
        sampling = SamplingParams(max_tokens=limit - 1, prompt_log_probs=not drafts)
        scheduler.add(GenerateRequest(number, [1], sampling))
    harness.run_dry()
    assert scheduler.stats().preemptions == 0
    assert set(harness.reasons.values()) == {"length"}


class Decoding:
    deficit, proposer, group, needs_host_result = 1, None, None, False

    def __init__(self, scheduled, limit):
        self.scheduled, self.limit = scheduled, limit


def test_peak_usage_is_the_most_blocks_held_at_once():
    peak = PeakUsage([Decoding(100, 200)], BLOCK, lambda request: 1000)
    assert peak.with_request(7, None) == 203 // BLOCK + 1 + 7, (
        "the decoding request, three steps late, and one without a predictable end"
    )
    # At the end of the short one, in 13 steps, both hold blocks: 100 + 13 and 50 + 13 tokens. At
    # the end of the long one, only it: 203 tokens.
    both = max((163 + 13) // BLOCK + 2, 203 // BLOCK + 1)
    assert peak.with_request(15, (50, 60)) == both
    peak.add(15, (50, 60))
    peak.add(9, None)
    assert peak.with_request(0, None) == both + 9


@pytest.mark.parametrize(
    "pace", [{"deficit": 5}, {"proposer": object()}, {"needs_host_result": True}]
)
def test_unpredictable_requests_count_with_their_maximum(pace):
    request = Decoding(10, 20)
    vars(request).update(pace)
    assert PeakUsage([request], BLOCK, lambda request: 1000).with_request(0, None) == 1000

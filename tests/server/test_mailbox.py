"""Mailboxes: the rows of steps on their way to the readers of requests."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.messages import StepOutputs, Timing
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.mailbox import Mailboxes, RequestOutput

PLAIN = SamplingParams(timing=True)
SCORED = SamplingParams(log_probs=True, top_log_probs=1, timing=True)
TIMING = Timing(arrived_ns=1)


def step(rows):
    """Return the outputs of a step. A row: request id, tokens, finish reason."""
    outputs = StepOutputs()
    for request_id, tokens, reason in rows:
        outputs.request_ids.append(request_id)
        outputs.token_counts.append(len(tokens))
        outputs.finish_reasons.append(reason)
        outputs.cached_tokens.append(request_id)
        outputs.tokens += tokens
        outputs.log_probs += [-float(token) for token in tokens]
        outputs.top_log_probs[request_id] = [[(token, -0.5)] for token in tokens]
        if reason:
            outputs.timings[request_id] = TIMING
    return outputs


# For each step: whether the requests are read after it, and the tokens of both requests.
steps = st.lists(st.tuples(st.booleans(), st.integers(1, 2), st.integers(1, 2)), max_size=6)


@settings(deadline=None)
@given(steps)
def test_readers_get_every_token_once_with_its_scores_whenever_they_read(steps):
    asyncio.run(read_steps(steps))


async def read_steps(steps):
    boxes = Mailboxes()
    requests = [
        boxes.open(GenerateRequest(0, [1], sampling), lambda *_: None)
        for sampling in (PLAIN, SCORED)
    ]
    ids = [request.request_id for request in requests]
    found = [RequestOutput(), RequestOutput()]
    expected = [[], []]
    for number, (reads, *counts) in enumerate(steps):
        tokens = [list(range(10 * number, 10 * number + count)) for count in counts]
        boxes.deliver(step([(ids[place], tokens[place], "") for place in (0, 1)]))
        for place in (0, 1):
            expected[place] += tokens[place]
            if reads:
                found[place].merge(await anext(requests[place]))
    boxes.deliver(step([(one, [99], "length") for one in ids]))
    for place in (0, 1):
        expected[place].append(99)
        async for output in requests[place]:
            found[place].merge(output)
    assert [one.tokens for one in found] == expected
    assert found[0].log_probs is None
    assert found[1].log_probs == [-float(token) for token in expected[1]]
    assert found[1].top_log_probs == [[(token, -0.5)] for token in expected[1]]
    assert [(one.finish_reason, one.timing) for one in found] == [("length", TIMING)] * 2
    assert [one.cached_tokens for one in found] == ids
    assert len(boxes) == 0


@pytest.mark.parametrize("last", [[], [6]])
async def test_an_error_comes_after_the_unread_tokens(last):
    boxes = Mailboxes()
    request = boxes.open(GenerateRequest(0, [1], SCORED), lambda *_: None)
    boxes.deliver(step([(request.request_id, [3], "")]))
    boxes.deliver(step([(request.request_id, [4, 5], "")]))
    end = step([(request.request_id, last, "error")])
    end.errors[request.request_id] = "no token can come next"
    boxes.deliver(end)
    tokens, error = [output async for output in request]
    assert (tokens.tokens, tokens.finish_reason, tokens.error) == ([3, 4, 5, *last], "", "")
    assert tokens.log_probs == [-float(token) for token in tokens.tokens]
    assert (error.tokens, error.finish_reason) == ([], "error")
    assert (error.error, error.timing) == ("no token can come next", TIMING)
    assert (tokens.received_ns, error.received_ns > 0) == (0, True)

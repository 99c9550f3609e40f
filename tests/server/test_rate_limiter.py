"""The rate limiter: resources are not exceeded, all instances execute, priorities are respected."""

from __future__ import annotations

import pytest

from slipstream.server.kserve.errors import InferenceError
from slipstream.server.python_models.rate_limiter import (
    GLOBAL,
    Contender,
    RateLimiter,
    parse_resources,
)

SHARED = {("R", GLOBAL): 1}


def contender(name: str, count: int = 1, priority: int = 1) -> Contender:
    return Contender(name, {("R", GLOBAL): count}, priority)


def join_all(limiter: RateLimiter, *contenders: Contender) -> tuple[Contender, ...]:
    for one in contenders:
        limiter.join(one)
    return contenders


def test_second_instance_waits_for_the_resource_of_the_first() -> None:
    limiter = RateLimiter(SHARED)
    woken = []
    first, second = join_all(limiter, contender("first"), contender("second"))
    assert limiter.acquire(first, lambda: woken.append("first"))
    assert not limiter.acquire(second, lambda: woken.append("second"))
    assert woken == []
    limiter.release(first)
    assert woken == ["second"]
    assert limiter.acquire(second, lambda: woken.append("again")), (
        "the resource is granted when the instance is woken"
    )


def test_default_limit_is_the_largest_count_that_an_instance_needs() -> None:
    limiter = RateLimiter()
    small, other, large = join_all(
        limiter, contender("small"), contender("other"), contender("large", 2)
    )
    assert limiter.acquire(small, lambda: None)
    assert limiter.acquire(other, lambda: None)
    assert not limiter.acquire(large, lambda: None)
    limiter.release(small)
    assert not large.granted
    limiter.release(other)
    assert large.granted


def test_instance_that_needs_more_than_the_limit_is_refused() -> None:
    with pytest.raises(InferenceError) as raised:
        RateLimiter(SHARED).join(contender("greedy", 3))
    assert raised.value.message == (
        'Resource count for "R" is limited to 1 which will prevent scheduling of one or more model instances, '
        "the minimum required count is 3"
    )


def test_instances_execute_in_proportion_to_their_priority() -> None:
    """Under constant demand, priority 2 executes half as high as priority 1."""
    limiter = RateLimiter(SHARED)
    contenders = join_all(
        limiter, *(contender(str(number), priority=1 + number % 2) for number in range(4))
    )
    for _ in range(300):
        for one in contenders:
            limiter.acquire(one, lambda: None)
        limiter.release(next(one for one in contenders if one.granted))
    assert contenders[0].executions == pytest.approx(100, abs=2)
    assert contenders[1].executions == pytest.approx(50, abs=2)


def test_each_device_has_its_own_resources() -> None:
    limiter = RateLimiter({("R", GLOBAL): 1})
    first = Contender("gpu0", {("R", 0): 1})
    second = Contender("gpu1", {("R", 1): 1})
    join_all(limiter, first, second)
    assert limiter.acquire(first, lambda: None)
    assert limiter.acquire(second, lambda: None)


def test_leaving_instance_releases_its_resource_and_is_not_woken() -> None:
    limiter = RateLimiter(SHARED)
    woken = []
    first, second, third = join_all(
        limiter, contender("first"), contender("second"), contender("third")
    )
    for one in (first, second, third):
        limiter.acquire(one, lambda one=one: woken.append(one.name))
    limiter.leave(second)
    limiter.leave(first)
    assert woken == ["third"]


def test_resources_are_parsed_from_the_command_line() -> None:
    assert parse_resources(["R1:10", "R2:5:0"]) == {("R1", GLOBAL): 10, ("R2", 0): 5}
    for text in ("R1", "R1:x", ":3", "R1:1:2:3", "R1:-1"):
        with pytest.raises(ValueError, match="must be <name>:<count>"):
            parse_resources([text])

"""Whether the time to refuse a wrong key says how much of it is right."""

from __future__ import annotations

import random
import time

from gates.table import Row
from slipstream.server.kserve.access import Access

_SAMPLES = 40_000  # of each kind
_ROUNDS = 3  # other work on the machine may disturb one
_MOST_DIFFERENCE = 0.02  # of the share in which one kind is slower, from a half
_KEY = "k" * 200


def compare_times() -> Row:
    """Compare keys that differ at the first letter with keys that differ at the last one.

    The samples alternate at random, so that the machine slows both kinds equally.
    """
    access = Access(api_key=_KEY)
    near = f"{_KEY[:-1]}x"
    far = f"x{_KEY[1:]}"
    shares = []
    for seed in range(_ROUNDS):
        share = _share(access, near, far, random.Random(seed))
        shares.append(share)
        if abs(share - 0.5) <= _MOST_DIFFERENCE:
            break
    text = f"the almost right key is slower in {shares[-1]:.1%} of {_SAMPLES} pairs"
    return Row("time of the comparison of keys", text, abs(shares[-1] - 0.5) <= _MOST_DIFFERENCE)


def _share(access: Access, near: str, far: str, chance: random.Random) -> float:
    """Return how often the nearly right key takes longer. Equal times count half."""
    slower = 0.0
    for _ in range(_SAMPLES):
        if chance.random() < 0.5:
            first, second = _measure(access, near), _measure(access, far)
        else:
            second, first = _measure(access, far), _measure(access, near)
        slower += 1.0 if first > second else 0.5 if first == second else 0.0
    return slower / _SAMPLES


def _measure(access: Access, key: str) -> int:
    header = {"x-api-key": key}.get
    begun = time.perf_counter_ns()
    refusal = access.refuse_http("inference", header)
    ended = time.perf_counter_ns()
    assert refusal is not None
    return ended - begun

"""The shares of several models on one device: given or computed, never more than the whole."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.memory.division import cpu_share
from slipstream.engine.memory.host import HostMemory
from slipstream.engine.memory.shares import Demand, memory_shares

GIB = 1 << 30


def demand(name: str, gib: int, *devices: int, share: float | None = None) -> Demand:
    return Demand(name, share, gib * GIB, devices or (0,))


def test_a_single_model_has_the_whole_memory() -> None:
    assert memory_shares([demand("one", 16)]) == {"one": 1.0}
    assert memory_shares([demand("one", 16, share=0.25)]) == {"one": 0.25}


def test_models_share_in_proportion_to_their_weights() -> None:
    found = memory_shares([demand("large", 15), demand("small", 3)])
    assert found == {"large": 16 / 20, "small": 4 / 20}


def test_given_shares_come_first() -> None:
    found = memory_shares([demand("large", 15, share=0.5), demand("a", 1), demand("b", 3)])
    assert found == {"large": 0.5, "a": pytest.approx(0.5 / 3), "b": pytest.approx(1 / 3)}
    assert memory_shares([demand("a", 1, share=0.7), demand("b", 1, share=0.3)])["b"] == 0.3


def test_models_on_other_devices_do_not_share() -> None:
    found = memory_shares([demand("one", 7), demand("two", 7, 1), demand("both", 7, 0, 1)])
    assert found == {"one": 0.5, "two": 0.5, "both": 0.5}
    # two processes on a device need twice as much of it
    found = memory_shares([demand("one", 1), demand("replicas", 1, 0, 0)])
    assert found == {"one": pytest.approx(1 / 3), "replicas": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("demands", "text"),
    [
        (
            [demand("a", 1, share=0.7), demand("b", 1, share=0.5)],
            "memory_share: a 0.7, b 0.5 on device 0: more than the whole memory; lower them",
        ),
        (
            [demand("a", 1, share=0.5), demand("b", 1, share=0.5), demand("c", 1)],
            "memory_share: a 0.5, b 0.5 on device 0: leave nothing for c; lower them",
        ),
    ],
)
def test_shares_of_more_than_the_whole_are_refused(demands: list[Demand], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        memory_shares(demands)


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 40), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_no_device_is_ever_over_committed(models: list[tuple[int, list[int]]]) -> None:
    demands = [
        Demand(f"model {index}", None, size, tuple(devices))
        for index, (size, devices) in enumerate(models)
    ]
    shares = memory_shares(demands)
    assert all(share > 0 for share in shares.values())
    for device in range(4):
        here = [shares[one.name] for one in demands if device in one.devices]
        assert sum(here) <= 1 + 1e-9


def test_a_share_of_the_host_is_divided_among_replicas() -> None:
    host = HostMemory(total=64 * GIB, available=24 * GIB)
    assert cpu_share(host, 2, sized=False, memory_share=0.25) == 3 * GIB
    assert cpu_share(host, 2, sized=True, memory_share=0.25) == 8 * GIB

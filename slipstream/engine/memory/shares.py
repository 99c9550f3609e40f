"""The share of a device's memory that each of several models on it may take. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# What a process takes beside its weights and its cache, so that small models have room, too.
_PROCESS_BYTES = 1 << 30
_MOST = 1.0 + 1e-9  # of the sum of given shares, which are decimal fractions


class Demand(NamedTuple):
    """What is known of a model before its engines start."""

    name: str
    given: float | None  # share that its configuration gives; None: it is computed
    process_bytes: int  # weights of one process
    devices: tuple[int, ...]  # device of each of its processes

    def bytes_on(self, device: int) -> int:
        return self.devices.count(device) * (self.process_bytes + _PROCESS_BYTES)


def memory_shares(demands: Iterable[Demand]) -> dict[str, float]:
    """Return the share of each model, by its name. Shares on one device add up to at most 1.

    Given shares come first. The other models divide the rest of a device in proportion to their
    weights. A model on several devices has the least of its shares on all of them. Raises
    ValueError if the given shares leave nothing.
    """
    shares: dict[str, float] = {}
    demands = list(demands)
    for device in sorted({device for demand in demands for device in demand.devices}):
        here = [demand for demand in demands if device in demand.devices]
        for name, share in _shares_on(device, here).items():
            shares[name] = min(share, shares.get(name, 1.0))
    return shares


def _shares_on(device: int, demands: list[Demand]) -> dict[str, float]:
    given = {demand.name: demand.given for demand in demands if demand.given is not None}
    rest = 1.0 - sum(given.values())
    others = [demand for demand in demands if demand.given is None]
    if sum(given.values()) > _MOST or (others and rest <= 0.0):
        listed = ", ".join(f"{name} {share:g}" for name, share in given.items())
        without = ", ".join(demand.name for demand in others)
        text = f"memory_share: {listed} on device {device}: more than the whole memory"
        if others:
            text = f"memory_share: {listed} on device {device}: leave nothing for {without}"
        raise ValueError(f"{text}; lower them")
    needed = sum(demand.bytes_on(device) for demand in others)
    return given | {demand.name: rest * demand.bytes_on(device) / needed for demand in others}

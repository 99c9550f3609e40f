"""Limits the instances that execute at the same time (`--rate-limit=execution_count`).

An instance group names resources and the amount of each that one execution takes. An instance waits
until all of them are free. Of the waiting instances, the instance with the fewest executions goes
first, weighted by its priority (priority 2 gets half the executions of priority 1). Without a flag,
the amount of a resource is what the most demanding instance needs. The built-in models need none:
an engine accepts requests at any time and limits itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from slipstream.server.kserve.errors import InferenceError

GLOBAL = "global"  # device of a resource that all devices share
Device = int | str
Amounts = Mapping[tuple[str, Device], int]  # amount by resource name and device


@dataclass(eq=False)
class Contender:
    """One instance: the resources that it needs, and what to call when it may execute."""

    name: str
    needs: Amounts
    priority: int = 1
    executions: int = 0
    granted: bool = False
    wake: Callable[[], None] | None = None  # set while the instance waits


class RateLimiter:
    def __init__(self, given: Amounts | None = None) -> None:
        # by --rate-limit-resource; device GLOBAL stands for any that is not named
        self._given = dict(given or {})
        self._used: dict[tuple[str, Device], int] = {}
        self._contenders: list[Contender] = []

    def join(self, contender: Contender) -> None:
        """Add an instance. Raises InferenceError where it could never execute."""
        for (name, device), count in contender.needs.items():
            limit = self._flag(name, device)
            if limit is not None and count > limit:
                raise InferenceError(
                    f'Resource count for "{name}" is limited to {limit} which will prevent '
                    "scheduling of one or more model instances, the minimum required count is "
                    f"{count}"
                )
        self._contenders.append(contender)

    def leave(self, contender: Contender) -> None:
        contender.wake = None
        if contender in self._contenders:
            self.release(contender)
            self._contenders.remove(contender)
            self._admit()

    def acquire(self, contender: Contender, wake: Callable[[], None]) -> bool:
        """Return whether the instance may execute until `release`; else `wake` is called later."""
        if contender.granted:
            return True
        contender.wake = wake
        self._admit(asking=contender)
        return contender.granted

    def release(self, contender: Contender) -> None:
        if not contender.granted:
            return
        contender.granted = False
        for resource, count in contender.needs.items():
            self._used[resource] -= count
        self._admit()

    def _admit(self, asking: Contender | None = None) -> None:
        waiting = [contender for contender in self._contenders if contender.wake is not None]
        for contender in sorted(waiting, key=lambda one: one.executions * one.priority):
            if not self._fits(contender.needs):
                continue
            wake = contender.wake
            contender.wake = None
            contender.granted = True
            contender.executions += 1
            for resource, count in contender.needs.items():
                self._used[resource] = self._used.get(resource, 0) + count
            if contender is not asking and wake is not None:
                wake()

    def _fits(self, needs: Amounts) -> bool:
        return all(
            self._used.get(one, 0) + count <= self._limit(one) for one, count in needs.items()
        )

    def _limit(self, resource: tuple[str, Device]) -> int:
        flag = self._flag(*resource)
        most = max((one.needs.get(resource, 0) for one in self._contenders), default=0)
        return most if flag is None else flag

    def _flag(self, name: str, device: Device) -> int | None:
        return self._given.get((name, device), self._given.get((name, GLOBAL)))


def parse_resources(texts: Iterable[str]) -> dict[tuple[str, Device], int]:
    """Return the amounts of texts like `R1:10` and `R2:5:0` (for device 0). Raises ValueError."""
    found: dict[tuple[str, Device], int] = {}
    for text in texts:
        name, *rest = text.split(":")
        if not name or not 1 <= len(rest) <= 2 or not all(part.isdigit() for part in rest):
            raise ValueError(f"'{text}' must be <name>:<count>[:<device>]")
        found[name, int(rest[1]) if len(rest) == 2 else GLOBAL] = int(rest[0])
    return found

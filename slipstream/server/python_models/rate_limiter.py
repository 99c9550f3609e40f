"""Which model instance may execute next, where they share resources
(`--rate-limit=execution_count`).

An instance group names resources and how many it takes to execute once; who cannot have all of them
waits. Among those that wait, the one goes first that has executed least, weighted by its priority
(2 gets half the turns of 1). Without a flag, there is as much of a resource as the most demanding
instance needs. Instances of the built-in models need nothing: an engine takes requests in at any
time and limits itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from slipstream.server.kserve.errors import InferenceError

GLOBAL = "global"  # the one of a machine, instead of one for each device
Device = int | str
Amounts = Mapping[tuple[str, Device], int]  # of resources, by their name and device


@dataclass(eq=False)
class Contender:
    """One instance: what it needs, and what to call when it may execute."""

    name: str
    needs: Amounts
    priority: int = 1
    executions: int = 0
    granted: bool = False
    wake: Callable[[], None] | None = None  # waits for its turn


class RateLimiter:
    def __init__(self, given: Amounts | None = None) -> None:
        # by --rate-limit-resource; device GLOBAL stands for any that is not named
        self._given = dict(given or {})
        self._used: dict[tuple[str, Device], int] = {}
        self._contenders: list[Contender] = []

    def join(self, contender: Contender) -> None:
        """InferenceError where it could never execute."""
        for (name, device), count in contender.needs.items():
            limit = self._flag(name, device)
            if limit is not None and count > limit:
                raise InferenceError(
                    f'Resource count for "{name}" is limited to {limit} which will prevent scheduling of one or more '
                    f"model instances, the minimum required count is {count}"
                )
        self._contenders.append(contender)

    def leave(self, contender: Contender) -> None:
        contender.wake = None
        if contender in self._contenders:
            self.release(contender)
            self._contenders.remove(contender)
            self._admit()

    def acquire(self, contender: Contender, wake: Callable[[], None]) -> bool:
        """True: it may execute now, and gives back with `release`. Otherwise `wake` is called when
        it is its turn.
        """
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
            wake, contender.wake, contender.granted = contender.wake, None, True
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
    """`R1:10` and `R2:5:0` (for device 0), as tritonserver takes them. ValueError says what is
    wrong.
    """
    found: dict[tuple[str, Device], int] = {}
    for text in texts:
        name, *rest = text.split(":")
        if not name or not 1 <= len(rest) <= 2 or not all(part.isdigit() for part in rest):
            raise ValueError(f"'{text}' must be <name>:<count>[:<device>]")
        found[name, int(rest[1]) if len(rest) == 2 else GLOBAL] = int(rest[0])
    return found

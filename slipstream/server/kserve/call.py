"""An inference call of either protocol: the request, and how its response is to be written."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from slipstream.server.kserve.inference import InferRequest


@dataclass(frozen=True)
class SharedPlace:
    """A place in a shared memory region."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True)
class WantedOutput:
    """The encoding that a client requests for one output."""

    name: str
    binary: bool = False
    classes: int = 0  # number of classes to report; 0: the values themselves
    place: SharedPlace | None = None


@dataclass
class InferCall:
    request: InferRequest
    outputs: list[WantedOutput] = field(default_factory=list)
    binary_output: bool = False  # form of the outputs where `outputs` is empty

    def wanted(self, name: str) -> WantedOutput | None:
        """Return how to write this output; None if the client did not request it."""
        if not self.outputs:
            return _unnamed_output(name, self.binary_output)
        return next((output for output in self.outputs if output.name == name), None)


@lru_cache(maxsize=256)
def _unnamed_output(name: str, binary: bool) -> WantedOutput:
    return WantedOutput(name, binary)

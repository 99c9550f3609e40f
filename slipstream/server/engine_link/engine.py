"""The types that an engine and its callers share, and the interface of an engine.

A request has one shape on its way to an engine: `TextRequest` while it may still be text, and the
engine's own `GenerateRequest` once it is tokens. Its output has one shape, too: `RequestOutput`,
which `TextOutput` extends by the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.cache.eviction import Retention
from slipstream.engine.messages import Beam, EngineInfo, EngineStats
from slipstream.engine.request import GenerateRequest, PromptTable
from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.mailbox import EngineUnavailable as EngineUnavailable
from slipstream.server.engine_link.mailbox import RequestOutput

UNASSIGNED = 0  # request id of a GenerateRequest before `Engine.submit` gives it one


@dataclass(frozen=True)
class AdapterUse:
    """The LoRA adapter of one request."""

    number: int
    name: str  # name of the adapter in error texts
    source: AdapterSource | None = None  # None: the engine has loaded it before

    def explains(self, error: str) -> bool:
        """Return whether an error of the engine is about this adapter."""
        return error.startswith(self.name)


@dataclass(slots=True)
class StageTimes:
    """The times at which a request reached the stages from text to tokens and back, by
    `time.monotonic_ns()`.

    0: not reached. Rounds of speculative decoding repeat the stages: the first round sets those up
    to `submitted_ns`, the last one the others.
    """

    encoded_ns: int = 0  # the prompt is tokenized
    prepared_ns: int = 0  # the sampling parameters and words are tokens
    submitted_ns: int = 0  # the engine process has the request
    produced_ns: int = 0  # the engine has the last token
    received_ns: int = 0  # the server has the last token
    taken_ns: int = 0  # the request's reader has the last token
    decoded_ns: int = 0  # the last text is complete


@dataclass(frozen=True)
class TextRequest:
    """A request whose prompt, stop words and bad words may still be text."""

    prompt: str | list[int]  # token ids are used unchanged
    sampling: SamplingParams = field(default_factory=SamplingParams)  # no end ids: the model's own
    bad_words: Sequence[str] = ()  # besides those that `sampling` has as tokens
    stop_words: Sequence[str] = ()
    show_stop_word: bool = False  # append the stop word that ends the text to the text
    # tokens that end the text besides its end ids, also where those are ignored
    stop_ids: Sequence[int] = ()
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    # special tokens that the text shows although `skip_special_tokens` is set
    shown_special_ids: frozenset[int] = frozenset()
    ignore_end: bool = False  # continue past the model's end-of-text token
    priority: int = 0  # the engine runs higher ones first
    deadline: float | None = None
    cache_salt: str = ""
    # samples of the one prompt; for a beam search, the number of beams to return
    sequences: int = 1
    draft: Sequence[int] = ()  # draft tokens for the beginning of the answer
    adapter: AdapterUse | None = None
    # embeddings for prompt tokens beyond the vocabulary
    prompt_table: PromptTable | None = None
    retention: Retention | None = None  # retention priority of the cache blocks it leaves
    # called with each request in flight, so that it can be cancelled from elsewhere
    submitted: Callable[[InFlight], None] | None = None
    stages: StageTimes | None = None  # filled as the request passes the stages


@dataclass(frozen=True, slots=True)
class TextBeam(Beam):
    """A beam with its text."""

    text: str = ""


@dataclass(slots=True)
class TextOutput(RequestOutput):
    """The new output of one sequence, with its text.

    The last output of a beam search has the whole result: `beams`, and the best of them as text
    and tokens.
    """

    text: str = ""
    prompt_tokens: int = 0
    sequence: int = 0  # index among the sequences of its request
    beams: Sequence[TextBeam] | None = None


class InFlight(Protocol):
    """A submitted request: an async iterator of outputs, up to the one with a finish reason."""

    @property
    def request_id(self) -> int: ...

    def cancel(self, reason: str = "cancelled") -> None: ...
    def __aiter__(self) -> InFlight: ...
    async def __anext__(self) -> RequestOutput: ...


class Engine(Protocol):
    """An engine as the server uses it: `EngineClient`, `Replicas`, or in a thread
    `InProcessEngine`. Secondary front ends use `LinkedEngine` or `LinkedReplicas`.
    """

    on_stats: Callable[[], None] | None  # called for new `stats` at verbose levels

    @property
    def info(self) -> EngineInfo | None:
        """Its sizes; None before it has started."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def ready(self) -> bool:
        """Return whether it accepts requests and makes progress with those it has."""
        ...

    @property
    def outstanding(self) -> int:
        """The number of requests in flight."""
        ...

    def submit(self, request: GenerateRequest) -> InFlight:
        """Start a request, under a request id that the engine assigns.

        Raises EngineUnavailable when the engine accepts no work.
        """
        ...

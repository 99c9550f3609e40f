"""Text in, text out: the path that HTTP, gRPC and `slipstream.LLM` share, over any engine with this surface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from slipstream.engine.messages import EngineInfo
from slipstream.engine.request import SamplingParams
from slipstream.server.generation import Delta
from slipstream.server.text.chat import Message, encode_chat, render_chat
from slipstream.server.text.stream import TextStream
from slipstream.server.text.tokenizer import Tokenizer

# Longer texts are tokenised in a thread: on the event loop they would hold up everybody's streams.
_LONG_TEXT_CHARS = 8192

Result = TypeVar("Result")


class PromptError(ValueError):
    """The prompt cannot be run. The text is one line, fit for the caller to see."""


class EngineGeneration(Protocol):
    """One request in flight: an async iterator of `Delta` that ends after one with a finish reason."""

    request_id: int

    def cancel(self, reason: str = "cancelled") -> None: ...
    def __aiter__(self) -> EngineGeneration: ...
    async def __anext__(self) -> Delta: ...


class Engine(Protocol):
    """What `EngineClient` and `InProcessEngine` have in common."""

    info: EngineInfo | None

    @property
    def ready(self) -> bool: ...
    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> EngineGeneration: ...


@dataclass(frozen=True)
class TextRequest:
    prompt: str | list[int]  # token ids are taken as they are
    sampling: SamplingParams = field(default_factory=SamplingParams)  # no end ids: the model's own
    bad_words: Sequence[str] = ()  # besides those that `sampling` has as tokens
    stop_words: Sequence[str] = ()
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    ignore_end: bool = False  # go on past the model's end-of-text token
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    submitted: Callable[[EngineGeneration], None] | None = None  # told of the generation, to stop it from elsewhere


@dataclass(slots=True)
class TextDelta:
    """What is new. A non-empty `finish_reason` makes it the last one."""

    text: str
    tokens: list[int]
    log_probs: list[float] | None = None
    top_log_probs: list[list[tuple[int, float]]] | None = None
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class TextGenerator:
    def __init__(self, tokenizer: Tokenizer, engine: Engine) -> None:
        self.tokenizer = tokenizer
        self.engine = engine

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextDelta, None]:
        """Run a request. Closing the iterator early cancels it in the engine at once.

        Raises, before anything runs, PromptError, TokenizerError, or the engine's own refusal.
        """
        prompt = await self._prompt(request)
        sampling = self._sampling(request, len(prompt))
        stream = TextStream(self.tokenizer, request.stop_words, request.skip_special_tokens)
        generation = self.engine.submit(
            prompt, sampling, priority=request.priority, deadline=request.deadline, cache_salt=request.cache_salt
        )
        if request.submitted is not None:
            request.submitted(generation)
        ended = False
        try:
            async for delta in generation:
                news = _advance(stream, delta, sampling.end_ids)
                news.prompt_tokens = len(prompt)
                if stream.stopped and not delta.finish_reason:
                    generation.cancel("stop")
                ended = bool(news.finish_reason)
                yield news
                if ended:
                    return
        finally:
            if not ended:
                generation.cancel()

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation, rendered and cut up beside the event loop."""

        def render_and_encode() -> list[int]:
            rendered = render_chat(
                self.tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                variables=variables,
            )
            return encode_chat(self.tokenizer, rendered)

        return await asyncio.to_thread(render_and_encode)

    async def _prompt(self, request: TextRequest) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, str):
            ids = await _in_thread_if_long(len(prompt), self.tokenizer.encode, prompt, request.add_special_tokens)
        else:
            self.tokenizer.check_ids(prompt)
            ids = list(prompt)
        if not ids:
            raise PromptError("The prompt is empty: it has no tokens.")
        if self.engine.info is not None:
            longest = self.engine.info.max_sequence_tokens - 1
            if len(ids) > longest:
                raise PromptError(f"Prompt length ({len(ids)}) exceeds maximum input length ({longest}).")
        return ids

    def _sampling(self, request: TextRequest, prompt_tokens: int) -> SamplingParams:
        """The request's parameters with what only the tokenizer and the engine's size can tell."""
        given = request.sampling
        end_ids = given.end_ids or tuple(self.tokenizer.end_ids)
        room = given.max_tokens
        if self.engine.info is not None:
            room = self.engine.info.max_sequence_tokens - prompt_tokens
        bad_words = [*given.bad_words, *bad_word_tokens(self.tokenizer, request.bad_words)]
        return replace(
            given,
            max_tokens=min(given.max_tokens, room),
            end_ids=() if request.ignore_end else end_ids,
            bad_words=tuple(dict.fromkeys(bad_words)),
        )


async def _in_thread_if_long(size: int, function: Callable[..., Result], *args: Any) -> Result:
    return await asyncio.to_thread(function, *args) if size > _LONG_TEXT_CHARS else function(*args)


def _advance(stream: TextStream, delta: Delta, end_ids: tuple[int, ...]) -> TextDelta:
    """Turn the engine's news into text, cut at a stop word."""
    before = stream.tokens_used
    written = delta.tokens
    if delta.finish_reason == "stop" and written and written[-1] in end_ids:
        written = written[:-1]  # an end mark is never text, even where special tokens are shown
    text = stream.push(written)
    if delta.finish_reason:
        text += stream.finish()
    count = max(stream.tokens_used - before, 0) if stream.stopped else len(delta.tokens)
    return TextDelta(
        text=text,
        tokens=delta.tokens[:count],
        log_probs=None if delta.log_probs is None else delta.log_probs[:count],
        top_log_probs=None if delta.top_log_probs is None else delta.top_log_probs[:count],
        finish_reason="stop" if stream.stopped else delta.finish_reason,
        cached_tokens=delta.cached_tokens,
        error="" if stream.stopped else delta.error,
    )


def bad_word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The token sequences of words: as they stand at the beginning of a text, inside it, and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if word:
            for ids in (tokenizer.encode(word, False), _inside(tokenizer, word), _inside(tokenizer, " " + word)):
                found[tuple(ids)] = None
    found.pop((), None)
    return list(found)


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that follows another: some tokenizers put a space before the first word only."""
    before = tokenizer.encode("\n", False)
    both = tokenizer.encode("\n" + text, False)
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text, False)

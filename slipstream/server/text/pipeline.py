"""Text in, text out: the path that HTTP, gRPC and `slipstream.LLM` share, over any engine with this
surface.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, Unpack

from slipstream.engine.cache.retention import Retention
from slipstream.engine.constraints.guided import GuideError, check_guide
from slipstream.engine.messages import Beam, EngineInfo, Scores, Timing
from slipstream.engine.request import PromptTable, SamplingParams
from slipstream.server.engine_link.mailbox import RequestOutput
from slipstream.server.engine_link.submission import Submission
from slipstream.server.fields.adapters import AdapterRegistry, AdapterUse
from slipstream.server.text.chat import Message, Tools, encode_chat, render_chat
from slipstream.server.text.sequences import (
    TextBeam,
    beam_problem,
    merged,
    sampling_of_sequence,
    write_beams,
)
from slipstream.server.text.stops import StopWords
from slipstream.server.text.stream import TextStream
from slipstream.server.text.tokenizer import Tokenizer

# Longer texts are tokenised in a thread: on the event loop they would hold up everybody's streams.
_LONG_TEXT_CHARS = 8192

# What one request may be answered with in logits.
MOST_LOGITS_BYTES = 256 << 20

Result = TypeVar("Result")


class PromptError(ValueError):
    """The prompt cannot be run. The text is one line, fit for the caller to see."""


class InFlightRequest(Protocol):
    """One request in flight: an async iterator of `RequestOutput` that ends after one with a finish reason."""

    request_id: int

    def cancel(self, reason: str = "cancelled") -> None: ...
    def __aiter__(self) -> InFlightRequest: ...
    async def __anext__(self) -> RequestOutput: ...


class Engine(Protocol):
    """What `EngineClient` and `InProcessEngine` have in common."""

    info: EngineInfo | None

    @property
    def ready(self) -> bool: ...
    def submit(
        self, prompt: list[int], sampling: SamplingParams, **more: Unpack[Submission]
    ) -> InFlightRequest: ...


@dataclass(frozen=True)
class TextRequest:
    prompt: str | list[int]  # token ids are taken as they are
    sampling: SamplingParams = field(default_factory=SamplingParams)  # no end ids: the model's own
    bad_words: Sequence[str] = ()  # besides those that `sampling` has as tokens
    stop_words: Sequence[str] = ()
    show_stop_word: bool = False  # the one that ends the text, behind it
    # tokens that end the text besides its end ids, also where those are ignored
    stop_ids: Sequence[int] = ()
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    ignore_end: bool = False  # go on past the model's end-of-text token
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    # samples of the one prompt; of a beam search, how many of its beams are wanted
    sequences: int = 1
    draft: Sequence[int] = ()  # a guess at how the answer begins
    adapter: AdapterUse | None = None
    # for a prompt of tokens, some of them beyond the vocabulary
    prompt_table: PromptTable | None = None
    retention: Retention | None = None  # how dear the blocks are that it leaves in the cache
    # told of the generation, to stop it from elsewhere
    submitted: Callable[[InFlightRequest], None] | None = None


@dataclass(slots=True)
class TextOutput:
    """What is new of one sequence. A non-empty `finish_reason` makes it the last one of that
    sequence.

    The last delta of a beam search has all there is: `beams`, and the best of them as text and
    tokens.
    """

    text: str
    tokens: list[int]
    log_probs: list[float] | None = None
    top_log_probs: list[list[tuple[int, float]]] | None = None
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    scores: Scores | None = None
    timing: Timing | None = None
    lost: bool = False  # the engine is gone
    sequence: int = 0
    beams: list[TextBeam] | None = None


class TextGenerator:
    def __init__(
        self, tokenizer: Tokenizer, engine: Engine, adapters: AdapterRegistry | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.engine = engine
        self.adapters = adapters or AdapterRegistry()

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextOutput, None]:
        """Run a request. Closing the iterator early cancels it in the engine at once.

        Raises, before anything runs, PromptError, TokenizerError, or the engine's own refusal.
        """
        prompt = await self._prompt(request)
        words = sum(map(len, (*request.bad_words, *request.stop_words)))
        sampling = await in_thread_if_long(words, self._sampling, request, len(prompt))
        self._check_logits(sampling, len(prompt), max(request.sequences, sampling.beam_width))
        if sampling.guide is not None:
            await _check_guide(sampling)
        letters = sum(map(len, request.stop_words))
        stop_words = await in_thread_if_long(
            letters, StopWords, request.stop_words, request.show_stop_word
        )
        generations = self._submit(request, prompt, sampling)
        streams = [
            TextStream(self.tokenizer, stop_words, request.skip_special_tokens) for _ in generations
        ]
        running = set(range(len(generations)))
        # ended at a stop word, and wait for the times the engine tells at its end
        held: dict[int, TextOutput] = {}
        try:
            async with aclosing(merged(generations)) as arrivals:
                async for index, delta in arrivals:
                    if index in held and delta.finish_reason:
                        news = held.pop(index)
                        news.timing = delta.timing
                    elif index in held or index not in running:
                        continue  # it ended at a stop word; this is the engine's own end
                    else:
                        news = _advance(streams[index], delta, sampling.end_ids)
                        if delta.scores is not None:
                            news.scores = _kept(delta.scores, len(news.tokens), len(delta.tokens))
                        if delta.beams:
                            self._add_beams(news, delta.beams, request, stop_words)
                        news.prompt_tokens, news.sequence = len(prompt), index
                        if streams[index].stopped and not delta.finish_reason:
                            generations[index].cancel("stop")
                            if request.sampling.timing:
                                held[index] = news
                                continue
                    if news.finish_reason:
                        running.discard(index)
                    yield news
                    if not running:
                        return
        finally:
            for index in running:
                generations[index].cancel()

    def _submit(
        self, request: TextRequest, prompt: list[int], sampling: SamplingParams
    ) -> list[InFlightRequest]:
        """One generation for each sequence; those after the first share its prompt. Beams are one
        generation.
        """
        generations: list[InFlightRequest] = []
        try:
            self._submit_each(request, prompt, sampling, generations)
        except BaseException:  # whatever it is, those that were begun have no reader
            for generation in generations:
                generation.cancel()
            raise
        return generations

    def _submit_each(
        self,
        request: TextRequest,
        prompt: list[int],
        sampling: SamplingParams,
        generations: list[InFlightRequest],
    ) -> None:
        table = request.prompt_table
        more = Submission(
            priority=request.priority,
            deadline=request.deadline,
            draft=request.draft,
            adapter=request.adapter,
            retention=request.retention,
            prompt_table=table,
            cache_salt=request.cache_salt
            if table is None
            else f"{request.cache_salt}\0{table.digest}",
        )
        for index in range(1 if sampling.beams else request.sequences):
            if generations:
                more["prompt_of"] = generations[0].request_id
                if request.adapter is not None:  # the first has brought it
                    more["adapter"] = replace(request.adapter, source=None)
            generation = self.engine.submit(prompt, sampling_of_sequence(sampling, index), **more)
            generations.append(generation)
            if request.submitted is not None:
                request.submitted(generation)

    def _add_beams(
        self, news: TextOutput, beams: Sequence[Beam], request: TextRequest, stop_words: StopWords
    ) -> None:
        written = write_beams(self.tokenizer, beams, stop_words, request.skip_special_tokens)
        news.beams = written[: request.sequences] if request.sequences > 1 else written
        best = news.beams[0]
        news.text, news.tokens, news.log_probs = best.text, best.tokens, best.log_probs

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Tools = None,
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
            ids = await in_thread_if_long(
                len(prompt), self.tokenizer.encode, prompt, request.add_special_tokens
            )
        else:
            ids = list(prompt)
            table = request.prompt_table
            self.tokenizer.check_ids(
                ids if table is None else [token for token in ids if token < table.first_token]
            )
        if not ids:
            raise PromptError("The prompt is empty: it has no tokens.")
        if self.engine.info is not None:
            longest = self.engine.info.max_sequence_tokens - 1
            if len(ids) > longest:
                raise PromptError(
                    f"Prompt length ({len(ids)}) exceeds maximum input length ({longest})."
                )
        return ids

    def _check_logits(self, sampling: SamplingParams, prompt_tokens: int, sequences: int) -> None:
        """Logits are a number for every token of the vocabulary, so a long request can ask for
        gigabytes.
        """
        if self.engine.info is None:
            return
        wanted = {
            "context_logits": prompt_tokens * sampling.context_logits,
            "generation_logits": sampling.max_tokens * sampling.generation_logits * sequences,
        }
        if sum(wanted.values()) * 4 * self.engine.info.vocab_size > MOST_LOGITS_BYTES:
            named = " and ".join(
                f"{name} of {count} tokens" for name, count in wanted.items() if count
            )
            most = MOST_LOGITS_BYTES // (4 * self.engine.info.vocab_size)
            raise PromptError(
                f"{named} exceed the bound of {MOST_LOGITS_BYTES >> 20} MiB a request, which is {most} tokens "
                f"of this model's vocabulary"
            )

    def _sampling(self, request: TextRequest, prompt_tokens: int) -> SamplingParams:
        """The request's parameters with what only the tokenizer and the engine's size can tell."""
        given = request.sampling
        problem = beam_problem(given, request.sequences, bool(request.draft), self.engine.info)
        if problem:
            raise PromptError(problem)
        end_ids = given.end_ids or tuple(self.tokenizer.end_ids)
        room = given.max_tokens
        if self.engine.info is not None:
            room = self.engine.info.max_sequence_tokens - prompt_tokens
        bad_words = [*given.bad_words, *bad_word_tokens(self.tokenizer, request.bad_words)]
        sampling = replace(
            given,
            max_tokens=min(given.max_tokens, room),
            end_ids=(
                *(() if request.ignore_end else end_ids),
                *self._stop_marks(request),
                *request.stop_ids,
            ),
            bad_words=tuple(dict.fromkeys(bad_words)),
            bad_texts=self._bad_texts(request),
            stop_texts=self._stop_texts(request),
            timing=True,  # the time in the queue is counted, whoever asks
        )
        return (
            sampling if self.engine.info is None else within(sampling, self.engine.info.vocab_size)
        )

    def _bad_texts(self, request: TextRequest) -> tuple[str, ...]:
        """The words themselves, where what a token writes is known; otherwise their likely tokens
        must do.
        """
        if self.tokenizer.token_bytes is None:
            return ()
        return tuple(dict.fromkeys(word for word in request.bad_words if word))

    def _stop_marks(self, request: TextRequest) -> tuple[int, ...]:
        """Stop words that are special tokens, which do not show in a text that leaves those out."""
        found = [
            self.tokenizer.encode(word, False)
            for word in request.stop_words
            if word and request.skip_special_tokens
        ]
        return tuple(
            {
                ids[0]: None
                for ids in found
                if len(ids) == 1 and ids[0] in self.tokenizer.special_ids
            }
        )

    def _stop_texts(self, request: TextRequest) -> tuple[str, ...]:
        """Nobody sees a beam's text before its end, so that the engine must know where it stops."""
        if self.tokenizer.token_bytes is None or not request.sampling.beams:
            return ()
        return tuple(dict.fromkeys(word for word in request.stop_words if word))


def within(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """Without what concerns tokens that the model cannot say: a tokenizer may know more than its
    model has.
    """

    def known(token: int) -> bool:
        if token < 0:
            raise PromptError(f"{token} is no token: ids are at least 0")
        return token < vocab_size

    return replace(
        sampling,
        end_ids=tuple(token for token in sampling.end_ids if known(token)),
        bad_words=tuple(word for word in sampling.bad_words if all(map(known, word))),
        logit_bias=tuple((token, weight) for token, weight in sampling.logit_bias if known(token)),
    )


async def in_thread_if_long(size: int, function: Callable[..., Result], *args: Any) -> Result:
    return await asyncio.to_thread(function, *args) if size > _LONG_TEXT_CHARS else function(*args)


def _advance(stream: TextStream, delta: RequestOutput, end_ids: tuple[int, ...]) -> TextOutput:
    """Turn the engine's news into text, cut at a stop word."""
    before = stream.tokens_used
    written = delta.tokens
    if delta.finish_reason == "stop" and written and written[-1] in end_ids:
        written = written[:-1]  # an end mark is never text, even where special tokens are shown
    text = stream.push(written)
    if delta.finish_reason:
        text += stream.finish()
    count = max(stream.tokens_used - before, 0) if stream.stopped else len(delta.tokens)
    return TextOutput(
        text=text,
        tokens=delta.tokens[:count],
        log_probs=None if delta.log_probs is None else delta.log_probs[:count],
        top_log_probs=None if delta.top_log_probs is None else delta.top_log_probs[:count],
        finish_reason="stop" if stream.stopped else delta.finish_reason,
        cached_tokens=delta.cached_tokens,
        error="" if stream.stopped else delta.error,
        timing=delta.timing,
        lost=delta.lost,
    )


async def _check_guide(sampling: SamplingParams) -> None:
    """Before anything runs; in a thread, because a grammar may be long."""
    assert sampling.guide is not None
    try:
        await asyncio.to_thread(check_guide, sampling.guide)
    except GuideError as error:
        raise PromptError(f"guided_decoding_guide: {error}") from error


def _kept(scores: Scores, kept: int, tokens: int) -> Scores:
    """Without the logits of tokens that come after a stop word."""
    if kept < tokens:
        row_bytes = len(scores.generation_logits) // tokens
        scores.generation_logits = scores.generation_logits[: kept * row_bytes]
    return scores


def bad_word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The token sequences of words: as they stand at the beginning of a text, inside it, and after
    a space.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if word:
            for ids in (
                tokenizer.encode(word, False),
                _inside(tokenizer, word),
                _inside(tokenizer, " " + word),
            ):
                found[tuple(ids)] = None
    found.pop((), None)
    return list(found)


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that follows another: some tokenizers put a space before the first word
    only.
    """
    before = tokenizer.encode("\n", False)
    both = tokenizer.encode("\n" + text, False)
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text, False)

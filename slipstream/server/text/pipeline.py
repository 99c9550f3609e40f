"""Text in, text out: HTTP, gRPC and `slipstream.LLM` all generate through `TextGenerator`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from slipstream.engine.constraints.guided import GuideError
from slipstream.engine.messages import Beam
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.engine import (
    UNASSIGNED,
    Engine,
    InFlight,
    StageTimes,
    TextOutput,
    TextRequest,
)
from slipstream.server.engine_link.mailbox import RequestOutput
from slipstream.server.kserve.access import TENANT
from slipstream.server.text.chat import (
    Message,
    Tools,
    conversation_size,
    encode_chat,
    render_chat,
)
from slipstream.server.text.guides import check_guide_in_thread
from slipstream.server.text.longest_token import TooManyTokens
from slipstream.server.text.sandbox import NotBrief
from slipstream.server.text.sequences import (
    beam_problem,
    merge_streams,
    sampling_of_sequence,
    write_beams,
)
from slipstream.server.text.stream import StopWords, TextStream
from slipstream.server.text.threads import THREAD_ABOVE_SIZE, in_thread_if_long
from slipstream.server.text.tokenizer import Tokenizer

# Largest conversation that is rendered without a thread.
_MAX_BRIEF_SIZE = 4096
# Longest logits that one request may return.
MAX_LOGITS_BYTES = 256 << 20


class PromptError(ValueError):
    """The prompt cannot be run. The text is one line that the client may see."""


def _too_long(tokens: int, longest: int | None) -> PromptError:
    return PromptError(f"Prompt length ({tokens}) exceeds maximum input length ({longest}).")


class TextGenerator:
    """Generates text with one engine and its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, client: Engine) -> None:
        self.tokenizer = tokenizer
        self.client = client
        self._has_rendered = False  # a conversation without tools

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextOutput, None]:
        """Run a request. Closing the iterator early cancels the request in the engine at once.

        Raises PromptError, TokenizerError or EngineUnavailable before anything runs.
        """
        prompt = await self._prompt(request)
        encoded_ns = time.monotonic_ns()
        words = sum(map(len, (*request.bad_words, *request.stop_words)))
        sampling = await in_thread_if_long(words, self._sampling, request, len(prompt))
        self._check_logits(sampling, len(prompt), max(request.sequences, sampling.beam_width))
        if sampling.guide is not None:
            await _check_guide(sampling)
        stop_words: StopWords | None = None
        if request.stop_words:
            stop_words = await in_thread_if_long(
                words, StopWords, request.stop_words, request.show_stop_word
            )
        prepared_ns = time.monotonic_ns()
        sequences = self._submit(request, prompt, sampling, stop_words)
        if request.stages is not None and not request.stages.submitted_ns:
            request.stages.encoded_ns = encoded_ns
            request.stages.prepared_ns = prepared_ns
            request.stages.submitted_ns = time.monotonic_ns()
        try:
            if len(sequences) == 1:
                async for output in sequences[0].in_flight:
                    text_output = sequences[0].advance(output)
                    if text_output is not None:
                        yield text_output
                    if sequences[0].ended:
                        return
                return
            async with aclosing(merge_streams([one.in_flight for one in sequences])) as arrivals:
                async for index, output in arrivals:
                    text_output = sequences[index].advance(output)
                    if text_output is not None:
                        yield text_output
                    if all(one.ended for one in sequences):
                        return
        finally:
            for one in sequences:
                if not one.ended:
                    one.in_flight.cancel()

    def _submit(
        self,
        request: TextRequest,
        prompt: list[int],
        sampling: SamplingParams,
        stop_words: StopWords | None,
    ) -> list[_Sequence]:
        """Submit each sequence to the engine. A beam search is one sequence."""
        sequences: list[_Sequence] = []
        engine_request = _engine_request(request, prompt, sampling)
        try:
            for index in range(1 if sampling.beams else request.sequences):
                if index == 1:
                    # the sequences after the first share its prompt and its adapter
                    engine_request = replace(
                        engine_request,
                        shares_prompt_with=sequences[0].in_flight.request_id,
                        adapter_source=None,
                    )
                if index:
                    sequence_sampling = sampling_of_sequence(sampling, index)
                    engine_request = replace(engine_request, sampling=sequence_sampling)
                in_flight = self.client.submit(engine_request)
                sequences.append(
                    _Sequence(index, in_flight, request, engine_request, self.tokenizer, stop_words)
                )
                if request.submitted is not None:
                    request.submitted(in_flight)
        except BaseException:  # whatever it is, the submitted sequences have no reader
            for one in sequences:
                one.in_flight.cancel()
            raise
        return sequences

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        tools: Tools = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation. A thread renders and tokenizes it if it is long.

        Raise TooManyTokens where a long conversation has more than `most` tokens.
        """

        def render_and_encode(brief: bool = False) -> list[int]:
            rendered = render_chat(
                self.tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                variables=variables,
                brief=brief,
            )
            return encode_chat(self.tokenizer, rendered, add_special_tokens, most)

        size = conversation_size(messages)
        # the first rendering compiles the template
        if self._has_rendered and not tools and not documents and size <= _MAX_BRIEF_SIZE:
            with suppress(NotBrief):  # a template may compute for long
                return render_and_encode(brief=True)
        tokens = await in_thread_if_long(max(THREAD_ABOVE_SIZE + 1, size), render_and_encode)
        self._has_rendered = self._has_rendered or not tools
        return tokens

    async def _prompt(self, request: TextRequest) -> list[int]:
        prompt = request.prompt
        info = self.client.info
        longest = None if info is None else info.max_sequence_tokens - 1
        if isinstance(prompt, str):
            special = request.add_special_tokens
            try:
                ids = await in_thread_if_long(
                    len(prompt), self.tokenizer.encode, prompt, special, longest
                )
            except TooManyTokens as error:
                raise _too_long(error.count, longest) from error
        else:
            ids = list(prompt)
            table = request.prompt_table
            self.tokenizer.check_ids(
                ids if table is None else [token for token in ids if token < table.first_token]
            )
        if not ids:
            raise PromptError("The prompt is empty: it has no tokens.")
        if longest is not None and len(ids) > longest:
            raise _too_long(len(ids), longest)
        return ids

    def _check_logits(self, sampling: SamplingParams, prompt_tokens: int, sequences: int) -> None:
        """Refuse a request for too many logits: each token has one for the whole vocabulary."""
        if self.client.info is None:
            return
        wanted = {
            "context_logits": prompt_tokens * sampling.context_logits,
            "generation_logits": sampling.max_tokens * sampling.generation_logits * sequences,
        }
        if sum(wanted.values()) * 4 * self.client.info.vocab_size > MAX_LOGITS_BYTES:
            counts = [f"{name} of {count} tokens" for name, count in wanted.items() if count]
            most = MAX_LOGITS_BYTES // (4 * self.client.info.vocab_size)
            raise PromptError(
                f"{' and '.join(counts)} exceed the bound of {MAX_LOGITS_BYTES >> 20} MiB a "
                f"request, which is {most} tokens of this model's vocabulary"
            )

    def _sampling(self, request: TextRequest, prompt_tokens: int) -> SamplingParams:
        """Return the request's parameters, completed from the tokenizer and the engine's limits."""
        given = request.sampling
        if given.beams:
            problem = beam_problem(given, request.sequences, bool(request.draft), self.client.info)
            if problem:
                raise PromptError(problem)
        end_ids: tuple[int, ...] = ()
        if not request.ignore_end:
            end_ids = given.end_ids or tuple(self.tokenizer.end_ids)
        room = given.max_tokens
        if self.client.info is not None:
            room = self.client.info.max_sequence_tokens - prompt_tokens
        bad_words = [*given.bad_words, *bad_word_tokens(self.tokenizer, request.bad_words)]
        sampling = replace(
            given,
            max_tokens=min(given.max_tokens, room),
            end_ids=(*end_ids, *self._special_stop_ids(request), *request.stop_ids),
            bad_words=tuple(dict.fromkeys(bad_words)),
            bad_texts=self._bad_texts(request),
            stop_texts=self._stop_texts(request),
            # The metrics count the time in the queue. It is not known for a request that ends at a
            # stop word, unless the request asks for times: the engine's own end is not awaited.
            timing=True,
        )
        if self.client.info is None:
            return sampling
        return drop_unknown_tokens(sampling, self.client.info.vocab_size)

    def _bad_texts(self, request: TextRequest) -> tuple[str, ...]:
        """Return the bad words as texts, where the tokenizer knows the text of each token.

        Elsewhere the engine only sees the likely tokens of the words.
        """
        if self.tokenizer.token_bytes is None:
            return ()
        return tuple(dict.fromkeys(word for word in request.bad_words if word))

    def _special_stop_ids(self, request: TextRequest) -> tuple[int, ...]:
        """Return the stop words that are special tokens, where the text leaves those out."""
        if not request.skip_special_tokens:
            return ()
        found: dict[int, None] = {}
        for word in request.stop_words:
            ids = self.tokenizer.encode(word, False) if word else []
            if len(ids) == 1 and ids[0] in self.tokenizer.special_ids:
                found[ids[0]] = None
        return tuple(found)

    def _stop_texts(self, request: TextRequest) -> tuple[str, ...]:
        """Return the stop words of a beam search, where only the engine sees the texts in time."""
        if self.tokenizer.token_bytes is None or not request.sampling.beams:
            return ()
        return tuple(dict.fromkeys(word for word in request.stop_words if word))


class _Sequence:
    """One sequence of a request: the engine's outputs in, text out."""

    def __init__(
        self,
        index: int,
        in_flight: InFlight,
        request: TextRequest,
        engine_request: GenerateRequest,
        tokenizer: Tokenizer,
        stop_words: StopWords | None,
    ) -> None:
        self.in_flight = in_flight
        self.ended = False  # its last output was returned
        self._index = index
        self._request = request
        self._stages = request.stages or StageTimes()
        self._prompt_tokens = len(engine_request.prompt)
        self._end_ids = engine_request.sampling.end_ids
        self._tokenizer = tokenizer
        self._stop_words = stop_words
        self._stream = TextStream(
            tokenizer, stop_words or (), request.skip_special_tokens, request.shown_special_ids
        )
        # the last output, ended by a stop word; it waits for the times of the engine's own end
        self._last: TextOutput | None = None

    def advance(self, output: RequestOutput) -> TextOutput | None:
        """Return the output with its text, cut at a stop word; None where there is nothing new."""
        if self._stop_words is None and not output.finish_reason:  # nothing can end the text here
            return self._with_text(output, self._stream.push(output.tokens))
        if self._last is not None:
            if not output.finish_reason:
                return None
            self._last.timing = output.timing
            self.ended = True
            return self._last
        if self.ended:
            return None  # it ended at a stop word before the engine did
        text_output = self._write(output)
        if output.beams:
            self._add_beams(text_output, output.beams)
        if self._stream.stopped and not output.finish_reason:
            self.in_flight.cancel("stop")
            if self._request.sampling.timing:
                self._last = text_output
                return None
        self.ended = bool(text_output.finish_reason)
        return text_output

    def _write(self, output: RequestOutput) -> TextOutput:
        stream = self._stream
        used = stream.tokens_used
        written = output.tokens
        if output.finish_reason:
            self._note_last(output)
            if output.finish_reason == "stop" and written and written[-1] in self._end_ids:
                # an end token is never text, even where special tokens are shown
                written = written[:-1]
        text = stream.push(written)
        if output.finish_reason:
            text += stream.finish()
            self._stages.decoded_ns = time.monotonic_ns()
        text_output = self._with_text(output, text)
        if stream.stopped:
            self._stages.decoded_ns = time.monotonic_ns()
            _stop_after(text_output, max(stream.tokens_used - used, 0))
        return text_output

    def _with_text(self, output: RequestOutput, text: str) -> TextOutput:
        return TextOutput(
            output.tokens,
            output.log_probs,
            output.top_log_probs,
            output.finish_reason,
            output.cached_tokens,
            output.error,
            output.scores,
            output.timing,
            lost=output.lost,
            text=text,
            prompt_tokens=self._prompt_tokens,
            sequence=self._index,
        )

    def _note_last(self, output: RequestOutput) -> None:
        """Note when the last output reached each stage on its way here."""
        self._stages.produced_ns = 0 if output.timing is None else output.timing.last_token_ns
        self._stages.received_ns = output.received_ns
        self._stages.taken_ns = time.monotonic_ns()

    def _add_beams(self, output: TextOutput, beams: Sequence[Beam]) -> None:
        """Add the beams of a search with their texts. The best one is the output's own text."""
        request = self._request
        found = write_beams(self._tokenizer, beams, self._stop_words, request.skip_special_tokens)
        if request.sequences > 1:
            found = found[: request.sequences]
        output.beams = found
        output.text = found[0].text
        output.tokens = found[0].tokens
        output.log_probs = found[0].log_probs


def _stop_after(output: TextOutput, count: int) -> None:
    """End an output at a stop word. The first `count` tokens are kept."""
    output.finish_reason = "stop"
    output.error = ""
    if output.scores is not None and count < len(output.tokens):
        logits = output.scores.generation_logits
        output.scores.generation_logits = logits[: count * (len(logits) // len(output.tokens))]
    output.tokens = output.tokens[:count]
    if output.log_probs is not None:
        output.log_probs = output.log_probs[:count]
    if output.top_log_probs is not None:
        output.top_log_probs = output.top_log_probs[:count]


def _engine_request(
    request: TextRequest, prompt: list[int], sampling: SamplingParams
) -> GenerateRequest:
    """Return the request for the engine. Tenants, salts and tables never share cached blocks."""
    salt = request.cache_salt
    if request.prompt_table is not None:
        salt = f"{salt}\0{request.prompt_table.digest}"
    tenant = TENANT.get()
    if tenant:
        salt = f"{tenant}\0{salt}"
    adapter = request.adapter
    return GenerateRequest(
        UNASSIGNED,
        prompt,
        sampling,
        priority=request.priority,
        deadline=request.deadline,
        adapter=0 if adapter is None else adapter.number,
        adapter_name="" if adapter is None else adapter.name,
        adapter_source=None if adapter is None else adapter.source,
        cache_salt=salt,
        draft=list(request.draft),
        prompt_table=request.prompt_table,
        retention=request.retention,
    )


def drop_unknown_tokens(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return the parameters without tokens that the model does not have.

    A tokenizer may have more tokens than its model.
    """

    def known(token: int) -> bool:
        if token < 0:
            raise PromptError(f"{token} is not a token id: ids are at least 0")
        return token < vocab_size

    return replace(
        sampling,
        end_ids=tuple(token for token in sampling.end_ids if known(token)),
        bad_words=tuple(word for word in sampling.bad_words if all(map(known, word))),
        logit_bias=tuple((token, weight) for token, weight in sampling.logit_bias if known(token)),
    )


async def _check_guide(sampling: SamplingParams) -> None:
    """Check the grammar before anything runs; in a thread, because it may be long."""
    assert sampling.guide is not None
    try:
        await check_guide_in_thread(sampling.guide)
    except GuideError as error:
        raise PromptError(f"guided_decoding_guide: {error}") from error


def bad_word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the token sequences of words: at the beginning of a text, inside, after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if word:
            found[tuple(tokenizer.encode(word, False))] = None
            found[tuple(_inside(tokenizer, word))] = None
            found[tuple(_inside(tokenizer, " " + word))] = None
    found.pop((), None)
    return list(found)


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that follows another text.

    Some tokenizers add a space before the first word only.
    """
    before = tokenizer.encode("\n", False)
    both = tokenizer.encode("\n" + text, False)
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text, False)

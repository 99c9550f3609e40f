"""The models that generate: text to text (an ensemble, or a BLS model under any name) and ids to ids (the engine).

What is wrong with a request is an answer with an error, as from any Triton model; only an engine that takes no
work raises (`Unavailable`). Closing the generator of `infer` cancels the request in the engine at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from slipstream.engine.messages import EngineInfo
from slipstream.repository.config import ModelConfig
from slipstream.repository.models import EngineModel, RepositoryModel, TextChain
from slipstream.repository.roles import engine_fields
from slipstream.server.errors import Code, InferenceError, Unavailable
from slipstream.server.generation import EngineUnavailable
from slipstream.server.generation_outputs import Progress, log_prob_outputs, named
from slipstream.server.inference import InferRequest, InferResponse
from slipstream.server.limits import LISTS, Given, check_batch, check_prompt_length, given_fields, require
from slipstream.server.queue_policy import TIMED_OUT, urgency
from slipstream.server.sampling import never_ends, sampling_params, word_ids
from slipstream.server.stop_requests import StopRequests, asks_to_stop
from slipstream.server.tensors import Tensor
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.pipeline import PromptError, TextDelta, TextRequest
from slipstream.server.text.tokenizer import Tokenizer

ENSEMBLE_PARAMETERS: Mapping[str, bool | int] = {"sequence_end": False, "sequence_id": 0, "sequence_start": False}


class Engine(Protocol):
    info: EngineInfo | None

    @property
    def ready(self) -> bool: ...


class Generator(Protocol):
    """Text generation over one engine; `TextGenerator` is the real one."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def engine(self) -> Engine: ...

    def generate(self, request: TextRequest) -> AsyncGenerator[TextDelta, None]: ...


async def run(generator: Generator, request: TextRequest) -> AsyncGenerator[TextDelta, None]:
    """The deltas of one generation, with every way to fail told as an InferenceError."""
    begun = False
    try:
        async with aclosing(generator.generate(request)) as deltas:
            async for delta in deltas:
                begun = begun or bool(delta.tokens)
                if delta.finish_reason == "timeout" and not begun:
                    raise Unavailable(TIMED_OUT)
                if delta.finish_reason == "error":
                    raise InferenceError(delta.error or "the engine failed", Code.INTERNAL)
                if delta.finish_reason == "cancelled":
                    raise InferenceError("the request was cancelled", Code.CANCELLED)
                yield delta
    except (PromptError, TokenizerError) as error:
        raise InferenceError(str(error)) from error
    except EngineUnavailable as error:
        raise Unavailable(str(error)) from error


def check_tokens(prompt: list[int], longest: int) -> None:
    if len(prompt) > longest:
        raise InferenceError(f"Prompt length ({len(prompt)}) exceeds maximum input length ({longest}).")


def is_true(fields: Mapping[str, Given], field: str, otherwise: bool = False) -> bool:
    return bool(fields[field].value) if field in fields else otherwise


class TextModel:
    """Text in, text out."""

    def __init__(
        self, model: RepositoryModel, chain: TextChain, engine: EngineModel, generator: Generator
    ) -> None:
        self._model = model
        self._chain = chain
        self._engine = engine
        self._generator = generator
        self._names = {field: name for name, field in chain.fields.inputs.items()}
        self._outputs = {field: name for name, field in chain.fields.outputs.items()}

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def decoupled(self) -> bool:
        return self._chain.decoupled

    @property
    def ready(self) -> bool:
        return self._generator.engine.ready

    @property
    def parts(self) -> Mapping[str, str]:
        """The models of the repository whose work is done here, by the phase of the request that is theirs."""
        steps = [step.model_name for step in self.config.ensemble_steps]
        if self._chain.engine not in steps[1:-1]:
            return {"compute_infer": self._chain.engine}
        return {"compute_input": steps[0], "compute_infer": self._chain.engine, "compute_output": steps[-1]}

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        try:
            check_batch(request, self.config)
            fields = given_fields(request, self._chain.fields.inputs)
            async with aclosing(self._answer(fields, request)) as answers:
                async for answer in answers:
                    yield answer
        except Unavailable:
            raise
        except InferenceError as error:
            prefix = f"in ensemble '{self._chain.name}', " if self._chain.ensemble else ""
            yield InferResponse(error=InferenceError(prefix + error.message, error.code), final=self._marks_end)

    @property
    def _marks_end(self) -> bool:
        """An ensemble's last answer says so; a BLS model ends apart from its answers, as upstream's do."""
        return self._chain.ensemble

    async def _answer(
        self, fields: Mapping[str, Given], given: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        trail, urgent = given.trail, urgency(given, self._engine)
        text_request = self._text_request(fields)
        text_request = replace(
            text_request,
            prompt=await self._fitting(text_request.prompt),
            priority=urgent.priority,
            deadline=urgent.deadline,
        )
        progress = self._progress(text_request)
        log_probs = text_request.sampling.log_probs
        if text_request.prompt == []:
            yield self._response("", log_probs, progress, [], final=True)
            return
        streaming = self.decoupled and is_true(fields, "stream")
        answered = False
        trail.end_input()
        async with aclosing(run(self._generator, text_request)) as deltas:
            async for delta in deltas:
                trail.add_tokens(delta.prompt_tokens, len(delta.tokens))
                news = progress.add(delta)
                if streaming and (news.text or news.tokens):
                    text = progress.text if self._chain.accumulate_tokens else news.text
                    yield self._response(text, log_probs, progress, news.log_probs or [], bool(delta.finish_reason))
                    answered = True
        trail.end_infer()
        if not answered:
            text = progress.text if streaming else self._whole(fields, progress)
            yield self._response(text, log_probs, progress, progress.log_probs, final=True)

    def _text_request(self, fields: Mapping[str, Given]) -> TextRequest:
        tokenizer = self._generator.tokenizer
        prompt = require(fields, "text_input", self._name("text_input"))
        require(fields, "max_tokens", self._name("max_tokens"))
        check_prompt_length(prompt, self._engine.engine.build.max_input_len)
        sampling = sampling_params(fields, lambda word: tokenizer.encode(word, False))
        return TextRequest(
            prompt=self._prompt(prompt.tensor.text()),
            sampling=sampling,
            bad_words=_words(fields, "bad_words"),
            stop_words=_words(fields, "stop_words"),
            add_special_tokens=self._engine.add_special_tokens,
            skip_special_tokens=self._engine.skip_special_tokens,
            ignore_end=never_ends(fields),
        )

    def _prompt(self, text: str) -> str | list[int]:
        """An empty text begins with the model's own beginning; a model without one has nothing to say to it."""
        tokenizer = self._generator.tokenizer
        if text or tokenizer.encode("", self._engine.add_special_tokens):
            return text
        return [] if tokenizer.bos_id is None else [tokenizer.bos_id]

    async def _fitting(self, prompt: str | list[int]) -> str | list[int]:
        """The prompt, as tokens where they had to be counted: the engine may be built for less than its context."""
        longest, info = self._engine.engine.build.max_input_len, self._generator.engine.info
        if info is not None and longest >= info.max_sequence_tokens - 1:
            return prompt  # the generator counts against the context, which is the tighter bound
        if isinstance(prompt, str):
            encode = self._generator.tokenizer.encode
            prompt = await asyncio.to_thread(encode, prompt, self._engine.add_special_tokens)
        check_tokens(prompt, longest)
        return prompt

    def _progress(self, request: TextRequest) -> Progress:
        end_ids = request.sampling.end_ids or tuple(self._generator.tokenizer.end_ids)
        return Progress(frozenset(() if request.ignore_end else end_ids), self._engine.normalize_log_probs)

    def _name(self, field: str) -> str:
        return self._names.get(field, field)

    def _whole(self, fields: Mapping[str, Given], progress: Progress) -> str:
        if is_true(fields, "exclude_input_in_output", self._engine.exclude_input_in_output):
            return progress.text
        prompt = fields["text_input"].tensor.text()
        return prompt + joint(self._generator.tokenizer, prompt, progress.tokens) + progress.text

    def _response(
        self, text: str, asked: bool, progress: Progress, log_probs: list[float], final: bool
    ) -> InferResponse:
        outputs = [Tensor("text_output", "BYTES", (1,), [text.encode("utf-8", "replace")])]
        outputs += log_prob_outputs(asked, self._chain.placeholders, progress, log_probs)
        parameters = ENSEMBLE_PARAMETERS if self._chain.ensemble else {}
        return InferResponse(named(outputs, self._outputs), parameters, final=final and self._marks_end)


def _words(fields: Mapping[str, Given], field: str) -> list[str]:
    return [word for word in fields[field].tensor.texts() if word] if field in fields else []


def joint(tokenizer: Tokenizer, prompt: str, tokens: list[int]) -> str:
    """What stands between a prompt and its continuation: SentencePiece drops the first space of a text."""
    before = tokenizer.encode(prompt[-64:], False)[-8:]
    first, second = tokenizer.decode(before), tokenizer.decode(tokens)
    both = tokenizer.decode([*before, *tokens])
    if not both.startswith(first) or not both.endswith(second):
        return ""
    return both[len(first) : len(both) - len(second)]


class TokenModel:
    """Token ids in, token ids out: the engine model itself, with its own names and its own defaults."""

    decoupled: bool

    def __init__(
        self, model: RepositoryModel, engine: EngineModel, generator: Generator, placeholders: bool = True
    ) -> None:
        self._model = model
        self._engine = engine
        self._generator = generator
        self._placeholders = placeholders
        self._fields = engine_fields(model.config)
        self._outputs = {name: name for name in model.config.output_names}
        self.decoupled = engine.decoupled
        self._stops = StopRequests()

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def ready(self) -> bool:
        return self._generator.engine.ready

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        try:
            if asks_to_stop(request, self._fields):
                self._stops.stop(request.id)
                yield InferResponse(final=True)
                return
            check_batch(request, self.config)
            fields = given_fields(request, self._fields)
            async with aclosing(self._answer(fields, request)) as answers:
                async for answer in answers:
                    yield answer
        except Unavailable:
            raise
        except InferenceError as error:
            yield InferResponse(error=error, final=True)

    async def _answer(
        self, fields: Mapping[str, Given], given: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        trail, urgent = given.trail, urgency(given, self._engine)
        prompt = self._prompt(fields)
        request = replace(
            self._token_request(prompt, fields), priority=urgent.priority, deadline=urgent.deadline
        )
        progress = Progress(frozenset(request.sampling.end_ids), self._engine.normalize_log_probs)
        asked = request.sampling.log_probs
        streaming = self.decoupled and is_true(fields, "stream")
        answered = False
        trail.end_input()
        with self._stops.listing(given.id) as running:
            request = replace(request, submitted=running.append)
            async with aclosing(run(self._generator, request)) as deltas:
                async for delta in deltas:
                    trail.add_tokens(delta.prompt_tokens, len(delta.tokens))
                    news = progress.add(delta)
                    if streaming and news.tokens:
                        final = bool(delta.finish_reason)
                        yield self._response(news.tokens, asked, progress, news.log_probs or [], final)
                        answered = True
        trail.end_infer()
        if not answered:
            echo = not streaming and not is_true(
                fields, "exclude_input_in_output", self._engine.exclude_input_in_output
            )
            ids = prompt + progress.tokens if echo else progress.tokens
            yield self._response(ids, asked, progress, progress.log_probs, final=True)

    def _prompt(self, fields: Mapping[str, Given]) -> list[int]:
        given = require(fields, "input_ids", "input_ids")
        ids = given.tensor.data
        if "input_lengths" in fields:
            ids = ids[: fields["input_lengths"].value]
        if min(ids) < 0:
            raise InferenceError(f"{given.name} holds the id {min(ids)}, which no vocabulary has")
        check_tokens(ids, self._engine.engine.build.max_input_len)
        vocabulary = self._engine.engine.spec.vocab_size
        return [token % vocabulary for token in ids]  # load generators send ids of other vocabularies

    def _token_request(self, prompt: list[int], fields: Mapping[str, Given]) -> TextRequest:
        tokenizer = self._generator.tokenizer
        require(fields, "max_tokens", "request_output_len")
        sampling = sampling_params(fields, lambda word: tokenizer.encode(word, False))
        stop_words = self._word_lists(fields, "stop_words_list", LISTS["stop_words"].count)
        return TextRequest(
            prompt=prompt,
            sampling=replace(sampling, bad_words=tuple(self._word_lists(fields, "bad_words_list", 256))),
            stop_words=[tokenizer.decode(word, False) for word in stop_words],
            skip_special_tokens=False,  # the ids are what counts here, so a stop word may be a special token
            ignore_end=not sampling.end_ids,  # the engine itself knows no end but the one it is told
        )

    def _word_lists(self, fields: Mapping[str, Given], field: str, most: int) -> list[tuple[int, ...]]:
        if field not in fields:
            return []
        words = word_ids(fields[field].tensor)
        if len(words) > most:
            raise InferenceError(f"{field} must hold at most {most} words, got {len(words)}")
        vocabulary = self._engine.engine.spec.vocab_size
        if any(not 0 <= token < vocabulary for word in words for token in word):
            raise InferenceError(f"{field} holds ids that are not in the vocabulary (0 to {vocabulary - 1})")
        return words

    def _response(
        self, ids: list[int], asked: bool, progress: Progress, log_probs: list[float], final: bool
    ) -> InferResponse:
        outputs = [
            Tensor("output_ids", "INT32", (1, 1, len(ids)), list(ids)),
            Tensor("sequence_length", "INT32", (1, 1), [len(ids)]),
        ]
        outputs += log_prob_outputs(asked, self._placeholders, progress, log_probs)
        return InferResponse(named(outputs, self._outputs), final=final)

"""The models that generate: text to text (an ensemble, or a BLS model under any name) and ids to
ids (the engine).

What is wrong with a request is an answer with an error, as from any Triton model; only an engine
that takes no work raises (`Unavailable`). Closing the generator of `infer` cancels the request in
the engine at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from slipstream.engine.constraints.guided import FIELD as GUIDE
from slipstream.engine.messages import EngineInfo
from slipstream.repository.config import ModelConfig
from slipstream.repository.models import EngineModel, RepositoryModel, TextChain
from slipstream.repository.roles import engine_fields, engine_outputs
from slipstream.server.engine_link.engine import (
    AdapterUse,
    EngineUnavailable,
    TextOutput,
    TextRequest,
)
from slipstream.server.fields.adapters import FIELDS as ADAPTER_FIELDS
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.server.fields.limits import (
    RequestFields,
    check_batch,
    check_prompt_length,
    check_tokens,
    given_fields,
)
from slipstream.server.fields.prompts import (
    MESSAGES,
    check_prompt,
    conversation_tokens,
    refuse_prompt_table,
)
from slipstream.server.fields.sampling import (
    bias_words_size,
    cache_salt,
    never_ends,
    read_words,
    sampling_params,
    sequence_count,
)
from slipstream.server.fields.token_requests import token_request
from slipstream.server.kserve.errors import Code, InferenceError, Unavailable
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.drafting import DraftedGenerator, Generates
from slipstream.server.models.generation_outputs import (
    Completion,
    OutputRequest,
    as_declared,
    made,
    named,
    read_output_request,
    side_outputs,
)
from slipstream.server.models.queue_policy import TIMED_OUT, urgency
from slipstream.server.models.sequence_outputs import sequence_index, stacked
from slipstream.server.models.stop_requests import StopRequests, asks_to_stop
from slipstream.server.text.chat import Message, Tools
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.pipeline import PromptError
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.text.tokenizer import Tokenizer

ENSEMBLE_PARAMETERS: Mapping[str, bool | int] = {
    "sequence_end": False,
    "sequence_id": 0,
    "sequence_start": False,
}


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

    @property
    def adapters(self) -> AdapterRegistry: ...

    def generate(self, request: TextRequest) -> AsyncGenerator[TextOutput, None]: ...
    async def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]: ...


async def run(generator: Generates, request: TextRequest) -> AsyncGenerator[TextOutput, None]:
    """The deltas of one generation, with every way to fail told as an InferenceError."""
    begun = False
    try:
        async with aclosing(generator.generate(request)) as deltas:
            async for delta in deltas:
                begun = begun or bool(delta.tokens)
                if delta.finish_reason == "timeout" and not begun:
                    raise Unavailable(TIMED_OUT)
                if delta.lost:
                    raise Unavailable(delta.error)
                if delta.finish_reason == "error":
                    own = delta.error.startswith(GUIDE) or (
                        request.adapter and request.adapter.explains(delta.error)
                    )
                    raise InferenceError(
                        delta.error or "the engine failed",
                        Code.INVALID_ARG if own else Code.INTERNAL,
                    )
                if delta.finish_reason == "cancelled":
                    raise InferenceError("the request was cancelled", Code.CANCELLED)
                yield delta
    except (PromptError, TokenizerError) as error:
        raise InferenceError(str(error)) from error
    except EngineUnavailable as error:
        raise Unavailable(str(error)) from error


async def chosen_adapter(generator: Generator, fields: RequestFields) -> AdapterUse | None:
    return (
        await generator.adapters.chosen(fields)
        if any(field in fields for field in ADAPTER_FIELDS)
        else None
    )


def is_true(fields: RequestFields, field: str, otherwise: bool = False) -> bool:
    return bool(fields[field].value) if field in fields else otherwise


class TextModel:
    """Text in, text out."""

    def __init__(
        self,
        model: RepositoryModel,
        chain: TextChain,
        engine: EngineModel,
        generator: Generator,
        draft: Generator | None = None,
    ) -> None:
        self._model = model
        self._chain = chain
        self._draft = draft
        self.engine = engine
        self.generator = generator
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
        return self.generator.engine.ready

    @property
    def parts(self) -> Mapping[str, str]:
        """The models of the repository whose work is done here, by the phase of the request that is
        theirs.
        """
        steps = [step.model_name for step in self.config.ensemble_steps]
        if self._chain.engine not in steps[1:-1]:
            return {"compute_infer": self._chain.engine}
        return {
            "compute_input": steps[0],
            "compute_infer": self._chain.engine,
            "compute_output": steps[-1],
        }

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        try:
            async with aclosing(self._answers(request)) as answers:
                async for answer in answers:
                    yield answer
        except Unavailable:
            raise
        except InferenceError as error:
            prefix = (
                f"in ensemble '{self._chain.name}', "
                if self._chain.ensemble and request.text is None
                else ""
            )
            yield InferResponse(
                error=InferenceError(prefix + error.message, error.code), final=self._marks_end
            )

    @property
    def _marks_end(self) -> bool:
        """An ensemble's last answer says so; a BLS model ends apart from its answers, as upstream's
        do.
        """
        return self._chain.ensemble

    def _answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        if request.text is not None:
            return self._continue(request.text, request)
        check_batch(request, self.config)
        fields = given_fields(request, self._chain.fields.inputs)
        check_prompt(fields, self._names, request.parameters)
        return self._answer(fields, request)

    async def _continue(
        self, text: TextRequest, given: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        """What is new, as it comes, whether or not the model is decoupled; its end mark is no part
        of it.
        """
        urgent = urgency(given, self.engine)
        request = replace(
            text,
            skip_special_tokens=self.engine.skip_special_tokens,
            priority=urgent.priority,
            deadline=urgent.deadline,
        )
        sequences = [self._progress(request, index) for index in range(request.sequences)]
        given.times.end_input()
        async with aclosing(run(self.generator, request)) as deltas:
            async for delta in deltas:
                given.times.add_tokens(delta.prompt_tokens, len(delta.tokens), delta.timing)
                news = sequences[delta.sequence].add(delta)
                yield InferResponse(
                    text_output=news, final=all(progress.finish_reason for progress in sequences)
                )
        given.times.end_infer()

    async def _answer(
        self, fields: RequestFields, given: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        times, urgent = given.times, urgency(given, self.engine)
        text_request = await in_thread_if_long(bias_words_size(fields), self._text_request, fields)
        asked = read_output_request(
            fields, text_request.sampling, self._names, self._outputs, self._chain.placeholders
        )
        text_request = replace(
            text_request,
            sampling=asked.completed(text_request.sampling),
            prompt=await self._prompt(fields),
            adapter=await chosen_adapter(self.generator, fields),
            priority=urgent.priority,
            deadline=urgent.deadline,
        )
        count = 1 if text_request.sampling.beams else text_request.sequences
        sequences = [self._progress(text_request, index) for index in range(count)]
        if text_request.prompt == []:
            sequences[0].finish_reason = "stop"
            yield self._response([""], asked, sequences[:1], final=True)
            return
        streaming = self.decoupled and is_true(fields, "stream")
        answered = False
        times.end_input()
        async with aclosing(run(self._guessing(fields), text_request)) as deltas:
            async for delta in deltas:
                times.add_tokens(delta.prompt_tokens, len(delta.tokens), delta.timing)
                progress = sequences[delta.sequence]
                news = progress.add(delta)
                ended = bool(delta.finish_reason)
                if (
                    streaming
                    and not news.beams
                    and (news.text or news.tokens or (ended and asked.tells_end))
                ):
                    text = progress.text if self._chain.accumulate_tokens else news.text
                    final = all(other.finish_reason for other in sequences)
                    place = delta.sequence if count > 1 else None
                    yield await made(self._response, [text], asked, [progress], final, place)
                    answered = True
        times.end_infer()
        if not answered:
            parts = [part for progress in sequences for part in progress.parts()]
            texts = [
                part.text if streaming else self._whole(fields, text_request.prompt, part)
                for part in parts
            ]
            yield await made(self._response, texts, asked, parts, True)

    def _guessing(self, fields: RequestFields) -> Generates:
        """The generator of a request: with the draft model's guesses where it asks for them."""
        count = int(fields["num_draft_tokens"].value or 0) if "num_draft_tokens" in fields else 0
        if not count:
            return self.generator
        if self._draft is None:
            text = "num_draft_tokens needs a draft model, and tensorrt_llm_draft_model_name does not name one"
            raise InferenceError(text)
        return DraftedGenerator(self.generator, self.generator.tokenizer, self._draft, count)

    def _text_request(self, fields: RequestFields) -> TextRequest:
        """All but the prompt, which takes longest to read and so comes last."""
        tokenizer = self.generator.tokenizer
        fields.require("max_tokens", self._name("max_tokens"))
        refuse_prompt_table(fields, self._chain.engine)
        sampling = sampling_params(fields, lambda word: tokenizer.encode(word, False))
        return TextRequest(
            prompt="",
            sampling=sampling,
            bad_words=read_words(fields, "bad_words", self._chain.comma_words),
            stop_words=read_words(fields, "stop_words", self._chain.comma_words),
            add_special_tokens=self.engine.add_special_tokens,
            skip_special_tokens=self.engine.skip_special_tokens,
            ignore_end=never_ends(fields),
            sequences=sequence_count(fields),
            cache_salt=cache_salt(fields),
        )

    async def _prompt(self, fields: RequestFields) -> str | list[int]:
        """As tokens where they had to be counted: the engine may be built for less than its
        context.
        """
        longest, info = self.engine.engine.build.max_input_len, self.generator.engine.info
        prompt: str | list[int]
        if MESSAGES in fields:
            prompt = await conversation_tokens(fields[MESSAGES], self.generator, longest)
        else:
            check_prompt_length(fields["text_input"], longest)
            prompt = self._text_or_beginning(fields["text_input"].tensor.text())
        if info is not None and longest >= info.max_sequence_tokens - 1:
            return prompt  # the generator counts against the context, which is the tighter bound
        if isinstance(prompt, str):
            encode = self.generator.tokenizer.encode
            prompt = await in_thread_if_long(
                len(prompt), encode, prompt, self.engine.add_special_tokens
            )
        check_tokens(prompt, longest)
        return prompt

    def _text_or_beginning(self, text: str) -> str | list[int]:
        """An empty text begins with the model's own beginning; a model without one has nothing to
        say to it.
        """
        tokenizer = self.generator.tokenizer
        if text or tokenizer.encode("", self.engine.add_special_tokens):
            return text
        return [] if tokenizer.bos_id is None else [tokenizer.bos_id]

    def _progress(self, request: TextRequest, index: int) -> Completion:
        end_ids = frozenset(
            ()
            if request.ignore_end
            else request.sampling.end_ids or self.generator.tokenizer.end_ids
        )
        return Completion(end_ids, self.engine.normalize_log_probs, context_told=index > 0)

    def _name(self, field: str) -> str:
        return self._names.get(field, field)

    def _whole(self, fields: RequestFields, prompt: str | list[int], progress: Completion) -> str:
        """With the prompt, unless it is to be left out: as it was sent or, of a conversation, as
        its tokens read.
        """
        if is_true(fields, "exclude_input_in_output", self.engine.exclude_input_in_output):
            return progress.text
        tokenizer = self.generator.tokenizer
        if MESSAGES in fields and isinstance(prompt, list):
            text = tokenizer.decode(prompt, self.engine.skip_special_tokens)
        else:
            text = fields["text_input"].tensor.text()
        return text + joint(tokenizer, text, progress.tokens) + progress.text

    def _response(
        self,
        texts: list[str],
        asked: OutputRequest,
        parts: list[Completion],
        final: bool,
        sequence: int | None = None,
    ) -> InferResponse:
        outputs = stacked(
            [
                [
                    Tensor("text_output", "BYTES", (1,), [text.encode("utf-8", "replace")]),
                    *side_outputs(asked, part),
                ]
                for text, part in zip(texts, parts, strict=True)
            ]
        )
        if sequence is not None:
            outputs.append(sequence_index(sequence))
        parameters = ENSEMBLE_PARAMETERS if self._chain.ensemble else {}
        answer = as_declared(named(outputs, self._outputs, asked.by_name), self.config)
        return InferResponse(answer, parameters, final=final and self._marks_end)


def joint(tokenizer: Tokenizer, prompt: str, tokens: list[int]) -> str:
    """What stands between a prompt and its continuation: SentencePiece drops the first space of a
    text.
    """
    before = tokenizer.encode(prompt[-64:], False)[-8:]
    first, second = tokenizer.decode(before), tokenizer.decode(tokens)
    both = tokenizer.decode([*before, *tokens])
    if not both.startswith(first) or not both.endswith(second):
        return ""
    return both[len(first) : len(both) - len(second)]


class TokenModel:
    """Token ids in, token ids out: the engine model itself, with its own names and its own
    defaults.
    """

    decoupled: bool

    def __init__(
        self,
        model: RepositoryModel,
        engine: EngineModel,
        generator: Generator,
        placeholders: bool = True,
    ) -> None:
        self._model = model
        self._engine = engine
        self._generator = generator
        self._placeholders = placeholders
        self._fields = engine_fields(model.config)
        self._outputs = engine_outputs(model.config)
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
                self._stops.stop(request)
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
        self, fields: RequestFields, given: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        times, urgent = given.times, urgency(given, self._engine)
        request = replace(
            token_request(fields, self._engine, self._generator.tokenizer),
            priority=urgent.priority,
            deadline=urgent.deadline,
            adapter=await chosen_adapter(self._generator, fields),
        )
        count = 1 if request.sampling.beams else request.sequences
        end_ids, normalise = frozenset(request.sampling.end_ids), self._engine.normalize_log_probs
        sequences = [
            Completion(end_ids, normalise, context_told=index > 0) for index in range(count)
        ]
        inputs = set(self._fields.values())
        asked = read_output_request(
            fields, request.sampling, inputs, self._outputs, self._placeholders
        )
        request = replace(request, sampling=asked.completed(request.sampling))
        streaming = self.decoupled and is_true(fields, "stream")
        answered = False
        times.end_input()
        with self._stops.listing(given) as running:
            request = replace(request, submitted=running.append)
            async with aclosing(run(self._generator, request)) as deltas:
                async for delta in deltas:
                    times.add_tokens(delta.prompt_tokens, len(delta.tokens), delta.timing)
                    progress = sequences[delta.sequence]
                    news = progress.add(delta)
                    ended = bool(delta.finish_reason)
                    if (
                        streaming
                        and not news.beams
                        and (news.tokens or (ended and asked.tells_end))
                    ):
                        final = all(other.finish_reason for other in sequences)
                        place = delta.sequence if count > 1 else None
                        yield await made(
                            self._response, [news.tokens], asked, [progress], final, place
                        )
                        answered = True
        times.end_infer()
        if not answered:
            echo = not streaming and not is_true(
                fields, "exclude_input_in_output", self._engine.exclude_input_in_output
            )
            parts = [part for progress in sequences for part in progress.parts()]
            rows = [[*request.prompt, *part.tokens] if echo else part.tokens for part in parts]
            yield await made(self._response, rows, asked, parts, True)

    def _response(
        self,
        rows: list[list[int]],
        asked: OutputRequest,
        parts: list[Completion],
        final: bool,
        sequence: int | None = None,
    ) -> InferResponse:
        outputs = stacked(
            [
                [
                    Tensor.from_values("output_ids", "INT32", (1, 1, len(ids)), ids),
                    Tensor.from_values("sequence_length", "INT32", (1, 1), [len(ids)]),
                    *side_outputs(asked, part),
                ]
                for ids, part in zip(rows, parts, strict=True)
            ]
        )
        if sequence is not None:
            outputs.append(sequence_index(sequence))
        return InferResponse(
            as_declared(named(outputs, self._outputs, asked.by_name), self.config), final=final
        )

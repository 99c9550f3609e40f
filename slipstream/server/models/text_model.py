"""Models with text inputs and text outputs: an ensemble, or a BLS model under any name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from slipstream.repository.models import RepositoryModel, TextPipeline
from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.fields.prompts import conversation_tokens
from slipstream.server.fields.values import (
    MESSAGES,
    RequestFields,
    bias_words_size,
    cache_salt,
    check_batch,
    check_prompt,
    check_prompt_length,
    check_tokens,
    never_ends,
    read_request_fields,
    read_words,
    refuse_prompt_table,
    sampling_params,
    sequence_count,
    too_long,
)
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelRegistry,
    ModelVersion,
)
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.drafting import DraftedGenerator
from slipstream.server.models.generating import (
    GenerateCall,
    Generates,
    GeneratingModel,
    ServedEngine,
    read_scheduling,
)
from slipstream.server.models.generation_outputs import Completion, read_output_request
from slipstream.server.text.longest_token import TooManyTokens
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.text.tokenizer import Tokenizer

ENSEMBLE_PARAMETERS: Mapping[str, bool | int] = {
    "sequence_end": False,
    "sequence_id": 0,
    "sequence_start": False,
}


class TextModel(GeneratingModel):
    """Runs tokenizer, engine and detokenizer of a pipeline in one step."""

    def __init__(
        self,
        model: RepositoryModel,
        pipeline: TextPipeline,
        engine: ServedEngine,
        draft: ServedEngine | None = None,
    ) -> None:
        output_names = {field: name for name, field in pipeline.fields.outputs.items()}
        super().__init__(model.config, engine, output_names)
        self._pipeline = pipeline
        self._draft = draft
        self._input_names = {field: name for name, field in pipeline.fields.inputs.items()}
        # An ensemble marks its last response. The responses of a BLS model end without a mark.
        self.marks_end = pipeline.ensemble
        if pipeline.ensemble:
            self.response_parameters = ENSEMBLE_PARAMETERS

    @property
    def decoupled(self) -> bool:
        return self._pipeline.decoupled

    @property
    def composing_models(self) -> Mapping[str, str]:
        steps = [step.model_name for step in self.config.ensemble_steps]
        if self._pipeline.engine not in steps[1:-1]:
            return {"compute_infer": self._pipeline.engine}
        return {
            "compute_input": steps[0],
            "compute_infer": self._pipeline.engine,
            "compute_output": steps[-1],
        }

    def explain(self, error: InferenceError, request: InferRequest) -> InferenceError:
        if self._pipeline.ensemble and request.text is None:
            return InferenceError(
                f"in ensemble '{self._pipeline.name}', {error.message}", error.code
            )
        return error

    async def read(self, request: InferRequest) -> GenerateCall | InferResponse:
        if request.text is not None:
            return self._read_text(request.text, request)
        check_batch(request, self.config)
        fields = read_request_fields(request, self._pipeline.fields.inputs)
        check_prompt(fields, self._input_names, request.parameters)
        scheduling = read_scheduling(request, self.engine.model)
        text_request = await in_thread_if_long(bias_words_size(fields), self._text_request, fields)
        outputs = read_output_request(
            fields,
            text_request.sampling,
            self._input_names,
            self.output_names,
            self._pipeline.placeholders,
        )
        text_request = replace(
            text_request,
            sampling=outputs.complete_sampling(text_request.sampling),
            prompt=await self._prompt(fields),
            adapter=await self.engine.choose_adapter(fields),
            priority=scheduling.priority,
            deadline=scheduling.deadline,
        )
        count = 1 if text_request.sampling.beams else text_request.sequences
        streaming = self.decoupled and fields.flag("stream")
        call = GenerateCall(
            text_request,
            self._choose_generator(fields),
            self._completions(text_request, count),
            outputs,
            self._choose_writer(fields, text_request.prompt, streaming),
            streaming,
        )
        if text_request.prompt == []:
            return self._empty_response(call)
        return call

    def _read_text(self, text: TextRequest, request: InferRequest) -> GenerateCall:
        """Read the request of a protocol without tensors, such as OpenAI's."""
        scheduling = read_scheduling(request, self.engine.model)
        level = -scheduling.priority - text.priority
        if levels := self.engine.model.priority_levels:
            level = min(max(level, 1), levels)
        text_request = replace(text, priority=-level, deadline=scheduling.deadline)
        completions = self._completions(text_request, text_request.sequences)
        return GenerateCall(
            text_request, self.engine.generator, completions, None, TextWriter(), streaming=True
        )

    def _empty_response(self, call: GenerateCall) -> InferResponse:
        """Return the response to an empty prompt of a model without a beginning-of-text token."""
        completion = call.completions[0]
        completion.finish_reason = "stop"
        return self.write(replace(call, writer=TextWriter()), [completion])

    def _completions(self, request: TextRequest, count: int) -> list[Completion]:
        end_ids: frozenset[int] = frozenset()
        if not request.ignore_end and not request.sampling.include_end:
            own = self.engine.generator.tokenizer.end_ids
            end_ids = frozenset(request.sampling.end_ids or own)
        normalise = self.engine.model.normalize_log_probs
        return [
            Completion(end_ids=end_ids, normalise=normalise, prompt_scored=index > 0)
            for index in range(count)
        ]

    def _choose_generator(self, fields: RequestFields) -> Generates:
        """Return the generator of a request: with a draft model if the request asks for one."""
        count = int(fields.value("num_draft_tokens") or 0)
        generator = self.engine.generator
        if not count:
            return generator
        if self._draft is None:
            raise InferenceError(
                "num_draft_tokens needs a draft model, and tensorrt_llm_draft_model_name does not "
                "name one"
            )
        return DraftedGenerator(generator, generator.tokenizer, self._draft.generator, count)

    def _choose_writer(
        self, fields: RequestFields, prompt: str | list[int], streaming: bool
    ) -> TextWriter:
        model = self.engine.model
        excluded = fields.flag("exclude_input_in_output", model.exclude_input_in_output)
        if streaming or excluded:
            return TextWriter(accumulate=self._pipeline.accumulate_tokens)
        tokenizer = self.engine.generator.tokenizer
        if MESSAGES in fields and isinstance(prompt, list):
            text = tokenizer.decode(prompt, model.skip_special_tokens)
        else:
            text = fields["text_input"].tensor.text()
        return TextWriter(prompt=text, tokenizer=tokenizer)

    def _text_request(self, fields: RequestFields) -> TextRequest:
        """Return the request without its prompt, which takes longest to read."""
        tokenizer = self.engine.generator.tokenizer
        fields.require("max_tokens", self._input_names.get("max_tokens", "max_tokens"))
        refuse_prompt_table(fields, self._pipeline.engine)
        sampling = sampling_params(fields, lambda word: tokenizer.encode(word, False))
        return TextRequest(
            prompt="",
            sampling=sampling,
            bad_words=read_words(fields, "bad_words", self._pipeline.comma_words),
            stop_words=read_words(fields, "stop_words", self._pipeline.comma_words),
            add_special_tokens=self.engine.model.add_special_tokens,
            skip_special_tokens=self.engine.model.skip_special_tokens,
            ignore_end=never_ends(fields),
            sequences=sequence_count(fields),
            cache_salt=cache_salt(fields),
        )

    async def _prompt(self, fields: RequestFields) -> str | list[int]:
        """Return the prompt; as tokens where the engine is built for fewer than its context."""
        generator = self.engine.generator
        longest = self.engine.model.engine_config.build.max_input_len
        info = generator.client.info
        prompt: str | list[int]
        if MESSAGES in fields:
            prompt = await conversation_tokens(fields[MESSAGES], generator, longest)
        else:
            surely_exceeds = generator.tokenizer.surely_exceeds
            check_prompt_length(fields["text_input"], longest, surely_exceeds)
            prompt = self._text_or_beginning(fields["text_input"].tensor.text())
        if info is not None and longest >= info.max_sequence_tokens - 1:
            return prompt  # the generator checks the context, which is the tighter bound
        if isinstance(prompt, str):
            add_special = self.engine.model.add_special_tokens
            encode = generator.tokenizer.encode
            try:
                prompt = await in_thread_if_long(len(prompt), encode, prompt, add_special, longest)
            except TooManyTokens as error:
                raise too_long(error.count, longest) from error
        check_tokens(prompt, longest)
        return prompt

    def _text_or_beginning(self, text: str) -> str | list[int]:
        """Return the text; for an empty text the beginning-of-text token, where there is one."""
        tokenizer = self.engine.generator.tokenizer
        if text or tokenizer.encode("", self.engine.model.add_special_tokens):
            return text
        return [] if tokenizer.bos_id is None else [tokenizer.bos_id]


@dataclass(frozen=True)
class TextWriter:
    """Writes texts."""

    accumulate: bool = False  # each response of a stream has the whole text so far
    prompt: str | None = None  # text to put before the whole answer
    tokenizer: Tokenizer | None = None  # given together with the prompt

    def has_output(self, output: TextOutput) -> bool:
        return bool(output.text or output.tokens)

    def write_new(self, completion: Completion, output: TextOutput) -> list[Tensor]:
        return [_text_tensor(completion.text if self.accumulate else output.text)]

    def write_whole(self, completion: Completion) -> list[Tensor]:
        text = completion.text
        if self.prompt is not None and self.tokenizer is not None:
            text = self.prompt + text_between(self.tokenizer, self.prompt, completion.tokens) + text
        return [_text_tensor(text)]


def find_text_model(registry: ModelRegistry, name: str) -> tuple[ModelVersion, TextModel] | None:
    """Return the latest version of a model and its text model. None: it is no text model."""
    entry = registry.find(name)
    model = entry.model.unwrapped
    return (entry, model) if isinstance(model, TextModel) else None


def find_text_models(registry: ModelRegistry) -> list[tuple[ModelVersion, TextModel]]:
    """Return the latest versions of all text models, sorted by name."""
    names = sorted({entry.name for entry in registry})
    found = [find_text_model(registry, name) for name in names]
    return [pair for pair in found if pair is not None]


def _text_tensor(text: str) -> Tensor:
    return Tensor("text_output", "BYTES", (1,), [text.encode("utf-8", "replace")])


def text_between(tokenizer: Tokenizer, prompt: str, tokens: list[int]) -> str:
    """Return the text between a prompt and its answer: SentencePiece drops a text's first space."""
    before = tokenizer.encode(prompt[-64:], False)[-8:]
    first = tokenizer.decode(before)
    second = tokenizer.decode(tokens)
    both = tokenizer.decode([*before, *tokens])
    if not both.startswith(first) or not both.endswith(second):
        return ""
    return both[len(first) : len(both) - len(second)]

"""POST /v1/completions: the continuation of texts or token ids."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.models.text_model import text_between
from slipstream.server.openai.calls import Call, Document
from slipstream.server.openai.choices import ChoicesWriter, token_report
from slipstream.server.openai.errors import field_error
from slipstream.server.openai.fields import CompletionFields, read_fields
from slipstream.server.openai.generation import finish_reason
from slipstream.server.openai.guides import read_guide
from slipstream.server.openai.log_probs import CompletionLogProbs, ScoredTokens, TokenFormat
from slipstream.server.openai.models import OpenAIModel, find_model
from slipstream.server.openai.prompts import Prompt, prompt_tokens, read_prompts
from slipstream.server.openai.sampling import (
    build_text_request,
    read_max_tokens,
    read_n,
    read_stop_words,
    read_top_log_probs,
    sampling_params,
    skips_special_tokens,
)
from slipstream.server.text.threads import in_thread_if_long

DEFAULT_TOKENS = 16  # OpenAI's default of max_tokens


async def completion_call(body: bytes, registry: ModelRegistry) -> Call:
    fields, ignored = await in_thread_if_long(len(body), read_fields, body, CompletionFields)
    model = await find_model(registry, fields.model)
    prompts = await in_thread_if_long(len(body), read_prompts, fields)
    answers = read_n(fields, len(prompts))
    generated = _read_best_of(fields, answers, len(prompts))
    max_tokens = _read_max_tokens(fields)
    best_of = generated > answers
    guided_by, sampling = await in_thread_if_long(
        len(body), _sampling, fields, model, max_tokens, best_of
    )
    texts = await _text_requests(fields, model, prompts, sampling, generated)
    choice_writer = CompletionChoiceWriter(
        _token_format(fields, model),
        _echoed(fields, model, prompts, texts),
        answers,
        fields.logprobs,
        bool(texts[0].stop_words),
        frozenset({*model.tokenizer.end_ids, *texts[0].stop_ids}),
    )
    report = token_report(fields, model.tokenizer, texts, in_choices=True)
    writer = ChoicesWriter.create("cmpl", model.id, choice_writer, fields, report)
    return Call(
        model,
        texts,
        writer.id,
        writer,
        bool(fields.stream),
        ignored,
        guided_by,
        returned=answers,
        prompts_only=max_tokens == 0,
    )


def _read_best_of(fields: CompletionFields, answers: int, prompts: int) -> int:
    """Return the number of answers to generate for each prompt. `answers`: those to return."""
    if fields.best_of is None or fields.best_of == answers:
        return answers
    if fields.best_of < answers:
        raise field_error("best_of", f"must be at least n, here {answers}, got {fields.best_of}")
    if fields.stream:
        raise field_error("best_of", f"must be n, here {answers}, in a stream")
    return read_n(fields, prompts, "best_of")


def _read_max_tokens(fields: CompletionFields) -> int:
    """Return the most tokens to generate. 0: only the prompt is scored or echoed."""
    if fields.max_tokens is None:
        return DEFAULT_TOKENS
    if fields.max_tokens == 0 and (fields.echo or fields.prompt_logprobs is not None):
        return 0
    return read_max_tokens("max_tokens", fields.max_tokens)


def _sampling(
    fields: CompletionFields, model: OpenAIModel, max_tokens: int, best_of: bool
) -> tuple[str, SamplingParams]:
    """Return the field that constrains the answers, and the parameters.

    `best_of`: answers are compared by their log-probabilities.
    """
    guided_by, guide = read_guide(fields)
    top = read_top_log_probs("logprobs", fields.logprobs)
    log_probs = fields.logprobs is not None
    sampling = sampling_params(
        fields, model.vocab_size, max(1, max_tokens), log_probs or best_of, top, guide
    )
    if fields.echo and log_probs:
        sampling = replace(
            sampling,
            prompt_log_probs=True,
            top_prompt_log_probs=max(top, sampling.top_prompt_log_probs),
            # A prompt and its answer are one list of tokens, whose end some clients cut off.
            include_end=True,
        )
    if max_tokens == 0:
        # The engine generates at least one token. It is dropped.
        sampling = replace(sampling, guide=None, min_tokens=0, temperature=0.0)
    return guided_by, sampling


async def _text_requests(
    fields: CompletionFields,
    model: OpenAIModel,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    answers: int,
) -> list[TextRequest]:
    stop_words = read_stop_words(fields)
    adapter = model.adapter()
    texts = []
    for prompt in prompts:
        tokens = await prompt_tokens(prompt, fields, model)
        if fields.seed is None:
            # The same prompt given twice gets two different answers.
            sampling = replace(sampling, seed=secrets.randbits(64))
        texts.append(
            build_text_request(fields, tokens, sampling, stop_words, answers, model, adapter)
        )
    return texts


def _token_format(fields: CompletionFields, model: OpenAIModel) -> TokenFormat:
    skips = skips_special_tokens(fields, model)
    hidden = model.tokenizer.special_ids if skips else frozenset[int]()
    return TokenFormat(model.tokenizer, hidden, bool(fields.return_tokens_as_token_ids))


class EchoedPrompt(NamedTuple):
    text: str
    tokens: list[int]


def _echoed(
    fields: CompletionFields,
    model: OpenAIModel,
    prompts: Sequence[Prompt],
    texts: Sequence[TextRequest],
) -> list[EchoedPrompt]:
    """Return the prompts that the answers begin with."""
    if not fields.echo:
        return []
    skips = skips_special_tokens(fields, model)
    truncated = fields.truncate_prompt_tokens is not None and fields.logprobs is not None
    echoed = []
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = [token for token in text.prompt if isinstance(token, int)]
        if isinstance(prompt, str) and not truncated:
            echoed.append(EchoedPrompt(prompt, tokens))
        else:
            echoed.append(EchoedPrompt(model.tokenizer.decode(tokens, skips), tokens))
    return echoed


@dataclass(frozen=True)
class CompletionChoiceWriter:
    """Writes the choices of a text completion."""

    form: TokenFormat
    echoed: Sequence[EchoedPrompt]  # prompts that the answers begin with; empty: no echo
    answers: int  # number of answers to each prompt
    log_probs: int | None  # most likely tokens to report at each token; None: no scores
    stop_words: bool  # whether stop words may end the text
    end_ids: frozenset[int]  # tokens that end an answer
    object: str = "text_completion"
    chunk_object: str = "text_completion"
    _scorers: dict[int, tuple[ScoredTokens, CompletionLogProbs]] = field(default_factory=dict)

    def whole(self, index: int, choice: Completion) -> Document:
        text = self._echo(index, choice.tokens) + choice.text
        scores = _joined(self._prompt_scores(index, choice), self._scores(index, choice))
        return _choice(index, text, scores, finish_reason(choice.finish_reason))

    def opening(self, index: int, output: TextOutput) -> Document | None:
        if not self.echoed:
            return None
        return _choice(index, self._echo(index, output.tokens), self._prompt_scores(index, output))

    def pieces(self, index: int, output: TextOutput) -> Iterator[Document]:
        scores = self._scores(index, output)
        if output.text or (scores is not None and scores["tokens"]):
            yield _choice(index, output.text, scores)

    def text_piece(self, index: int, text: str) -> Document | None:
        return _choice(index, text) if self.log_probs is None else None

    def ending(self, index: int, choice: Completion) -> Document:
        return _choice(index, "", reason=finish_reason(choice.finish_reason))

    def _echo(self, index: int, tokens: list[int]) -> str:
        if not self.echoed:
            return ""
        text = self.echoed[index // self.answers].text
        # Only the first token decides, because a stream has no more yet.
        return text + text_between(self.form.tokenizer, text, tokens[:1])

    def _prompt_scores(self, index: int, output: TextOutput | Completion) -> Document | None:
        if self.log_probs is None or not self.echoed or output.scores is None:
            return None
        prompt = self.echoed[index // self.answers]
        _, log_probs = self._scorer(index)
        return log_probs.prompt_document(prompt.tokens, prompt.text, output.scores)

    def _scores(self, index: int, output: TextOutput | Completion) -> Document | None:
        if self.log_probs is None:
            return None
        tokens, log_probs = self._scorer(index)
        return log_probs.document(tokens.push(output))

    def _scorer(self, index: int) -> tuple[ScoredTokens, CompletionLogProbs]:
        if index not in self._scorers:
            tokens = ScoredTokens(
                self.form.tokenizer, self.stop_words, self.form.hidden, self.end_ids
            )
            log_probs = CompletionLogProbs(self.form, self.log_probs or 0)
            self._scorers[index] = tokens, log_probs
        return self._scorers[index]


def _joined(first: Document | None, second: Document | None) -> Document | None:
    """Return the log-probabilities of a prompt and of its answer as one document."""
    if first is None or second is None:
        return second
    return {name: None if first[name] is None else first[name] + second[name] for name in first}


def _choice(
    index: int, text: str, scores: Document | None = None, reason: str | None = None
) -> Document:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": reason}

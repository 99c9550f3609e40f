"""POST /v1/completions: the continuation of texts or token ids."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.models.text_model import text_between
from slipstream.server.openai.calls import Call, Document
from slipstream.server.openai.choices import ChoicesWriter
from slipstream.server.openai.errors import field_error
from slipstream.server.openai.fields import CompletionFields, read_fields
from slipstream.server.openai.generation import finish_reason
from slipstream.server.openai.log_probs import CompletionLogProbs, ScoredTokens
from slipstream.server.openai.models import find_model
from slipstream.server.openai.prompts import Prompt, prompt_tokens, read_prompts
from slipstream.server.openai.sampling import (
    build_text_request,
    read_guide,
    read_max_tokens,
    read_n,
    read_stop_words,
    read_top_log_probs,
    sampling_params,
)
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.text.tokenizer import Tokenizer

DEFAULT_TOKENS = 16  # OpenAI's default of max_tokens


async def completion_call(body: bytes, registry: ModelRegistry) -> Call:
    fields, ignored = await in_thread_if_long(len(body), read_fields, body, CompletionFields)
    model = await find_model(registry, fields.model)
    prompts = await in_thread_if_long(len(body), read_prompts, fields)
    answers = read_n(fields, len(prompts))
    if fields.best_of not in (None, answers):
        raise field_error("best_of", f"must be n, here {answers}: every answer is returned")
    if fields.echo and fields.logprobs is not None:
        problem = "cannot be combined with logprobs: the prompt's are not reported here"
        raise field_error("echo", problem)
    guided_by, guide = read_guide(fields)
    max_tokens = DEFAULT_TOKENS if fields.max_tokens is None else fields.max_tokens
    sampling = sampling_params(
        fields,
        model.vocab_size,
        read_max_tokens("max_tokens", max_tokens),
        fields.logprobs is not None,
        read_top_log_probs("logprobs", fields.logprobs),
        guide,
    )
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
    choice_writer = CompletionChoiceWriter(
        model.tokenizer,
        prompts if fields.echo else [],
        answers,
        fields.logprobs is not None,
        bool(fields.logprobs),
        bool(stop_words),
    )
    writer = ChoicesWriter.create("cmpl", model.id, choice_writer, fields)
    return Call(model, texts, writer.id, writer, bool(fields.stream), ignored, guided_by)


@dataclass(frozen=True)
class CompletionChoiceWriter:
    """Writes the choices of a text completion."""

    tokenizer: Tokenizer
    echoed: Sequence[Prompt]  # prompts that the answers begin with; empty: no echo
    answers: int  # number of answers to each prompt
    log_probs: bool
    top: bool  # whether the most likely tokens are reported
    stop_words: bool  # whether stop words may end the text
    object: str = "text_completion"
    chunk_object: str = "text_completion"
    _scorers: dict[int, tuple[ScoredTokens, CompletionLogProbs]] = field(default_factory=dict)

    def whole(self, index: int, choice: Completion) -> Document:
        text = self._echo(index, choice.tokens) + choice.text
        return _choice(
            index, text, self._scores(index, choice), finish_reason(choice.finish_reason)
        )

    def opening(self, index: int, output: TextOutput) -> Document | None:
        return _choice(index, self._echo(index, output.tokens)) if self.echoed else None

    def pieces(self, index: int, output: TextOutput) -> Iterator[Document]:
        scores = self._scores(index, output)
        if output.text or (scores is not None and scores["tokens"]):
            yield _choice(index, output.text, scores)

    def ending(self, index: int, choice: Completion) -> Document:
        return _choice(index, "", reason=finish_reason(choice.finish_reason))

    def _echo(self, index: int, tokens: list[int]) -> str:
        if not self.echoed:
            return ""
        prompt = self.echoed[index // self.answers]
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        # Only the first token decides, because a stream has no more yet.
        return text + text_between(self.tokenizer, text, tokens[:1])

    def _scores(self, index: int, output: TextOutput | Completion) -> Document | None:
        if not self.log_probs:
            return None
        if index not in self._scorers:
            tokens = ScoredTokens(self.tokenizer, self.stop_words)
            self._scorers[index] = tokens, CompletionLogProbs(self.tokenizer, self.top)
        tokens, log_probs = self._scorers[index]
        return log_probs.document(tokens.push(output))


def _choice(
    index: int, text: str, scores: Document | None = None, reason: str | None = None
) -> Document:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": reason}

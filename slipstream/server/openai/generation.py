"""The answers to one call: one request to the model for each prompt, all at the same time."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.kserve.inference import InferRequest, InferResponse, RequestTrace
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.openai.models import OpenAIModel
from slipstream.server.text.sequences import merge_streams

CountTokens = Callable[[Sequence[int]], int]


@dataclass
class CallAnswers:
    """The answers to a call. `choices` has those to the first prompt, then to the second, …"""

    model: OpenAIModel
    requests: Sequence[InferRequest]
    answers: int  # number of answers to each prompt
    returned: int | None = None  # number of answers to each prompt that are returned; None: all
    prompts_only: bool = False  # prompts are scored, and what is generated is dropped
    count_reasoning: CountTokens | None = None  # counts the reasoning among an answer's tokens
    choices: list[Completion] = field(init=False)
    # the first answer to each scored prompt → outputs that wait for the scores, which come with
    # that answer; None once they have come
    _waiting: dict[int, list[tuple[int, TextOutput]] | None] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.requests) * self.answers
        self.choices = [Completion() for _ in range(count)]
        texts = [request.text for request in self.requests]
        self._waiting = {
            number * self.answers: []
            for number, text in enumerate(texts)
            if text is not None and text.sampling.prompt_log_probs
        }

    async def outputs(self) -> AsyncGenerator[tuple[int, TextOutput], None]:
        """Yield each new output with the index of its choice.

        The outputs of scored prompts all have the scores, and none comes before them. Raises the
        first InferenceError. Closing the generator cancels the running requests.
        """
        async with AsyncExitStack() as stack:
            infer = self.model.entry.model.infer
            sources = [
                await stack.enter_async_context(aclosing(infer(request)))
                for request in self.requests
            ]
            if len(sources) == 1:
                async for response in sources[0]:
                    for ready in self._take(0, response):
                        yield ready
                return
            arrivals = await stack.enter_async_context(
                aclosing(merge_streams([aiter(source) for source in sources]))
            )
            async for prompt, response in arrivals:
                for ready in self._take(prompt, response):
                    yield ready

    def _take(self, prompt: int, response: InferResponse) -> Iterable[tuple[int, TextOutput]]:
        """Merge a response to one of the prompts. Return the outputs that are ready."""
        if response.error is not None:
            raise response.error
        output = response.text_output
        if output is None:
            return ()
        index = prompt * self.answers + output.sequence
        if self.prompts_only:
            _drop_tokens(output)
        self.choices[index].add(output)
        if not self._waiting:
            return ((index, output),)
        return self._with_prompt_scores(index, output)

    def _with_prompt_scores(
        self, index: int, output: TextOutput
    ) -> Iterator[tuple[int, TextOutput]]:
        first = index - index % self.answers
        scored = self.choices[first]
        waiting = self._waiting[first]
        if waiting is None:
            output.scores = scored.scores
            yield index, output
            return
        waiting.append((index, output))
        if not scored.tokens and not scored.finish_reason:
            return
        self._waiting[first] = None
        for place in range(first, first + self.answers):
            self.choices[place].scores = scored.scores
        for index, output in waiting:
            output.scores = scored.scores
            yield index, output

    def returned_choices(self) -> list[Completion]:
        """Return the answers that the client gets: all, or the likeliest ones to each prompt."""
        if self.returned is None or self.returned == self.answers:
            return self.choices
        chosen: list[Completion] = []
        for first in range(0, len(self.choices), self.answers):
            group = self.choices[first : first + self.answers]
            chosen += sorted(group, key=_mean_log_prob, reverse=True)[: self.returned]
        return chosen

    def usage(self) -> dict[str, Any]:
        # A prompt is counted once, whatever the number of its answers.
        return self._usage(self.choices[:: self.answers], self.choices)

    def usage_so_far(self, index: int) -> dict[str, Any]:
        """Return the usage of one answer to one prompt, up to now."""
        return self._usage([self.choices[index]], [self.choices[index]])

    def _usage(
        self, prompts: Sequence[Completion], answers: Sequence[Completion]
    ) -> dict[str, Any]:
        prompt = sum(choice.prompt_tokens for choice in prompts)
        completion = sum(len(choice.tokens) for choice in answers)
        cached = sum(choice.cached_tokens for choice in prompts)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.count_reasoning is not None:
            reasoning = sum(self.count_reasoning(choice.tokens) for choice in answers)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage


def _drop_tokens(output: TextOutput) -> None:
    output.tokens = []
    output.text = ""
    output.log_probs = None
    output.top_log_probs = None
    if output.finish_reason == "stop":
        output.finish_reason = "length"  # no token was allowed


def _mean_log_prob(choice: Completion) -> float:
    """Return the mean log-probability of an answer's tokens. An empty answer has the least."""
    return sum(choice.log_probs) / len(choice.log_probs) if choice.log_probs else -math.inf


def infer_request(
    model: OpenAIModel, text: TextRequest, identity: str, trace: RequestTrace | None = None
) -> InferRequest:
    request = InferRequest(model.entry.name, model.entry.version, {}, identity, text=text)
    request.times.trace = trace
    return request


def finish_reason(reason: str) -> str:
    """Return OpenAI's finish reason. Answers that a deadline cut short have "length", too."""
    return "stop" if reason == "stop" else "length"

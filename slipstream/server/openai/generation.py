"""The answers to one call: one request to the model for each prompt, all at the same time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.kserve.inference import InferRequest, RequestTrace
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.openai.models import OpenAIModel
from slipstream.server.text.sequences import merge_streams


@dataclass
class CallAnswers:
    """The answers to a call. `choices` has those to the first prompt, then to the second, …"""

    model: OpenAIModel
    requests: Sequence[InferRequest]
    answers: int  # number of answers to each prompt
    choices: list[Completion] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.requests) * self.answers
        self.choices = [Completion() for _ in range(count)]

    async def outputs(self) -> AsyncGenerator[tuple[int, TextOutput], None]:
        """Yield each new output with the index of its choice.

        Raises the first InferenceError. Closing the generator cancels the running requests.
        """
        async with AsyncExitStack() as stack:
            infer = self.model.entry.model.infer
            sources = [
                await stack.enter_async_context(aclosing(infer(request)))
                for request in self.requests
            ]
            arrivals = await stack.enter_async_context(
                aclosing(merge_streams([aiter(source) for source in sources]))
            )
            async for prompt, response in arrivals:
                if response.error is not None:
                    raise response.error
                if (output := response.text_output) is not None:
                    index = prompt * self.answers + output.sequence
                    self.choices[index].add(output)
                    yield index, output

    def usage(self) -> dict[str, Any]:
        # A prompt is counted once, whatever the number of its answers.
        firsts = self.choices[:: self.answers]
        prompt = sum(choice.prompt_tokens for choice in firsts)
        completion = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.cached_tokens for choice in firsts)
            },
        }


def infer_request(
    model: OpenAIModel, text: TextRequest, identity: str, trace: RequestTrace | None = None
) -> InferRequest:
    request = InferRequest(model.entry.name, model.entry.version, {}, identity, text=text)
    request.times.trace = trace
    return request


def finish_reason(reason: str) -> str:
    """Return OpenAI's finish reason. Answers that a deadline cut short have "length", too."""
    return "stop" if reason == "stop" else "length"

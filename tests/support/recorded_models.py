"""The small models of the recordings, implemented for this server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable

from slipstream.repository.config import ModelConfig
from slipstream.repository.models import RepositoryModel
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse, ServedModel
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.text_model import ENSEMBLE_PARAMETERS


class RecordedModel(ServedModel):
    ready = True

    def __init__(self, model: RepositoryModel, version: int) -> None:
        self.config: ModelConfig = model.config
        self.version = version
        self.cancelled: list[str] = []  # ids of requests whose client disconnected

    @property
    def decoupled(self) -> bool:
        return self.config.decoupled

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        finished = False
        try:
            async for response in self.answers(request):
                yield response
            finished = True
        finally:
            if not finished:
                self.cancelled.append(request.id)

    def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        raise NotImplementedError


def text(content: str | bytes, final: bool = False) -> InferResponse:
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")
    return InferResponse([Tensor("text_output", "BYTES", (1,), [data])], final=final)


def failed(message: str, code: Code = Code.INTERNAL, final: bool = True) -> InferResponse:
    return InferResponse(error=InferenceError(message, code), final=final)


def first(request: InferRequest, name: str = "text_input") -> str:
    return request.inputs[name].strings()[0].decode("utf-8", "surrogateescape")


class EchoWords(RecordedModel):
    """Returns the words of text_input, at most max_tokens, with one response per word in a stream."""

    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        words = request.inputs["text_input"].text().split()
        given = request.inputs.get("max_tokens")
        words = words[: given.first if given else len(words)]
        streams = request.inputs["stream"].first if "stream" in request.inputs else False
        if streams and not self.decoupled:
            yield failed("Streaming is only supported in decoupled mode.")
            return
        pieces = [" ".join(words)]
        if streams:
            pieces = [(" " if position else "") + word for position, word in enumerate(words)] or [
                ""
            ]
        last = pieces[-1]
        for piece in pieces:
            await asyncio.sleep(int(self.config.parameters.get("delay_ms", "0")) / 1000)
            zeros = [
                Tensor.from_values(tensor.name, "FP32", (1,) * (1 + len(tensor.dims)), [0.0])
                for tensor in self.config.outputs[1:]
            ]
            # `llm_bls` sends its end separately, like upstream's BLS models.
            yield InferResponse(
                [*text(piece).outputs, *zeros],
                final=self.config.name != "llm_bls" and piece is last,
            )


class Echo(RecordedModel):
    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        given = request.inputs["text_input"]
        yield InferResponse([Tensor("text_output", "BYTES", given.shape, given.data)])


class ErrorsOnDemand(RecordedModel):
    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        for response in self.script(first(request)):
            yield response

    def script(self, command: str) -> list[InferResponse]:
        if command.startswith("code:"):
            return [failed(f"injected {command[5:]}", Code[command[5:]])]
        scripts: dict[str, list[InferResponse]] = {
            "error_first": [failed("injected error first")],
            "error_mid": [text("one"), failed("injected error mid", final=False), text("three")],
            "error_last": [text("one"), text("two"), failed("injected error last")],
            "error_only_then_final": [failed("injected error then final", final=False)],
            "zero": [],
            "two": [text("one"), text("two", final=True)],
            "one_then_final": [text("one")],
            "unicode": [text('h\u00e9llo \u4f60\u597d \U0001f600 "q" \\ \n\t\u0001 </x>')],
            "badutf8": [text(b"\xff\xfeA")],
        }
        return scripts.get(command, [text(command, final=True)])


class RequestInfo(RecordedModel):
    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        command = first(request)
        parameters = json.dumps(request.parameters, separators=(",", ":"))
        timeout = request.timeout_microseconds
        info = {"id": request.id, "corr": 0, "timeout": timeout, "flags": 0, "params": parameters}
        if command == "error":
            yield failed("injected error nd")
        elif command.startswith("code:"):
            yield failed(f"injected {command[5:]}", Code[command[5:]])
        else:
            yield text(json.dumps(info) if command == "reqinfo" else command)


class Version(RecordedModel):
    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield text(f"v{self.version}")


class Identity(RecordedModel):
    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield InferResponse(
            [Tensor("o" + t.name[1:], t.datatype, t.shape, t.data) for t in request.inputs.values()]
        )


class Slow(RecordedModel):
    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        for number in range(int(first(request))):
            yield text(f"tok{number}")
            await asyncio.sleep(0.05)


class SlowOnce(RecordedModel):
    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        await asyncio.sleep(int(first(request)) / 1000)
        yield text(first(request))


class EchoThenErrors(ErrorsOnDemand):
    """The ensemble `ens`: echo, then errors on demand. An error ends the request."""

    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        for response in self.script(first(request)):
            if response.error is not None:
                yield failed(
                    f"in ensemble '{self.config.name}', {response.error.message}",
                    response.error.code,
                )
                return
            yield InferResponse(response.outputs, ENSEMBLE_PARAMETERS, final=response.final)


RECORDED: dict[str, Callable[[RepositoryModel, int], ServedModel]] = {
    "llm": EchoWords,
    "llm_nd": EchoWords,
    "llm_bls": EchoWords,
    "llm_slow": EchoWords,
    "echo": Echo,
    "oops": ErrorsOnDemand,
    "oops_nd": RequestInfo,
    "ens": EchoThenErrors,
    "multiver": Version,
    "types": Identity,
    "slow": Slow,
    "slow_nd": SlowOnce,
}

"""The two calls that run models: one request with one response, and a stream of both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from slipstream.server.grpc.errors import BYTES_PER_SIZE, STATUS
from slipstream.server.grpc.infer_messages import (
    FINAL,
    NextResponses,
    encode_long,
    read_call,
    set_parameters,
    wants_empty_final,
    write_head,
    write_response,
)
from slipstream.server.grpc.protocol import messages
from slipstream.server.grpc.transport import INTERNAL, Call, ClientGone, Status, StreamCall
from slipstream.server.kserve.call import InferCall
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.errors import (
    Code,
    InferenceError,
    NeedsPrimary,
    PlainTextError,
    Unavailable,
)
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelRegistry,
    ModelVersion,
    Parameter,
    RequestTrace,
    read_version,
)
from slipstream.server.kserve.tensors import count_values
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.tracing.tracing import Finishing, Headers

logger = logging.getLogger(__name__)

DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
# Metadata of a client whose stream is to end at its first error, with the status of the error.
ERRORS_END_STREAM = "triton_grpc_error"

# A response with more values is encoded in a thread.
_MAX_VALUES = 1 << 18
_MAX_RUNNING = 1024  # requests of one stream that run at the same time
# of a model that was unloaded here after its request was read
_LEFT = "the model was unloaded meanwhile; send the request again"


def version_number(text: str) -> str:
    """Return the version of a message as digits, or nothing for the latest."""
    return str(read_version(text)) if text else ""


class Admitted(NamedTuple):
    """A request that may run."""

    entry: ModelVersion
    call: InferCall


class Inference:
    def __init__(self, registry: ModelRegistry, state: ServerState, shared: ServerContext) -> None:
        self._registry = registry
        self._state = state
        self._memory = shared.memory
        self._trace = shared.trace
        self._forwarded = shared.grpc_forwarded_headers

    async def model_infer(self, message: Any, call: Call, size: int) -> Any:
        """Answer a message of `size` bytes. A long one is read in a thread."""
        entry = self._find(message)
        if entry.model.decoupled:
            raise InferenceError(DECOUPLED, Code.UNSUPPORTED)
        asked = await self._read_in_thread_if_long(message, entry, size)
        asked.request.parameters |= self.forwarded(call)
        asked.request.peer = call.peer
        if (trace := self._trace.begin(entry.name, call.metadata)) is None:
            return await self._only_answer(entry, asked)
        begin_grpc(trace, asked.request)
        with Finishing(trace, "GRPC_SEND_START", "GRPC_SEND_END"):
            return await self._only_answer(entry, asked)

    async def _only_answer(self, entry: ModelVersion, call: InferCall) -> Any:
        answer = InferResponse()
        # A client that leaves, or whose deadline passes, cancels this call, which closes the
        # model's generator.
        async with aclosing(entry.model.infer(call.request)) as responses:
            async for answer in responses:
                if answer.error is not None:
                    raise answer.error
        admitted = Admitted(entry, call)
        if count_values(answer.outputs) <= _MAX_VALUES:
            return self.write(admitted, answer)
        return await in_thread_if_long(
            count_values(answer.outputs), self.encode_long, admitted, answer
        )

    async def model_stream_infer(
        self, call: StreamCall, on_ordered: Callable[[asyncio.Task[None]], None] | None = None
    ) -> None:
        """Answer the requests of a stream concurrently. After an error the stream continues.

        on_ordered: gets the task of each request whose response later responses must follow
        """
        stream = _Stream(call, self.forwarded(call))
        room = asyncio.Semaphore(_MAX_RUNNING)
        try:
            # a client that leaves cancels this call, and with it all of them
            async with asyncio.TaskGroup() as answering:
                ordered: asyncio.Task[None] | None = None
                async for data in call:
                    try:
                        message = await in_thread_if_long(
                            len(data) // BYTES_PER_SIZE, messages.ModelInferRequest.FromString, data
                        )
                    except DecodeError:
                        break  # an unreadable message ends the stream, as with Triton
                    answers = _Answers(self, message, stream)
                    await answers.admit(len(data))
                    # while it waits, gRPC's flow control stops the client
                    await room.acquire()
                    task = answering.create_task(answers.run(after=ordered))
                    task.add_done_callback(lambda _: room.release())
                    if answers.keep_order:
                        ordered = task
                        if on_ordered is not None:
                            on_ordered(task)
        except* Status as group:
            raise group.exceptions[0] from None  # the other requests ended with the stream
        except* ClientGone:
            pass  # while an error was sent to it

    def forwarded(self, call: Call) -> dict[str, Parameter]:
        """Return the metadata that models see as parameters."""
        if self._forwarded is None:
            return {}
        return {
            key: value
            for key, value in call.metadata
            if isinstance(value, str) and self._forwarded.fullmatch(key)
        }

    async def admit(
        self, message: Any, size: int, forwarded: dict[str, Parameter], headers: Headers
    ) -> Admitted:
        """Admit a message of `size` bytes. A long one is read in a thread."""
        entry = self._find(message)
        call = await self._read_in_thread_if_long(message, entry, size)
        call.request.parameters |= forwarded
        if (trace := self._trace.begin(entry.name, headers)) is not None:
            begin_grpc(trace, call.request)
        return Admitted(entry, call)

    async def _read_in_thread_if_long(
        self, message: Any, entry: ModelVersion, size: int
    ) -> InferCall:
        return await in_thread_if_long(size // BYTES_PER_SIZE, self._read, message, entry)

    def _read(self, message: Any, entry: ModelVersion) -> InferCall:
        call = read_call(message, entry.model.config, entry.version, self._memory)
        self._memory.check_places(output.place for output in call.outputs)
        return call

    def write(self, admitted: Admitted, answer: InferResponse) -> Any:
        entry = admitted.entry
        version = "" if answer.error is not None else entry.version
        return write_response(
            admitted.call, entry.name, version, answer, entry.model.config, self._memory
        )

    def encode_long(
        self, admitted: Admitted, answer: InferResponse, final: bool | None = None
    ) -> bytes:
        """Return a response, encoded. `final`: whether it is the last of a stream."""
        entry, call = admitted
        head, data = write_head(
            call, entry.name, entry.version, answer, entry.model.config, self._memory
        )
        if final is not None:
            set_parameters(head, [(FINAL, final)])
        return encode_long(head, data, streamed=final is not None)

    def _find(self, message: Any) -> ModelVersion:
        if self._state.draining:
            raise Unavailable("the server is shutting down and takes no new requests")
        return self._registry.find(message.model_name, version_number(message.model_version))


def begin_grpc(trace: RequestTrace, request: InferRequest) -> None:
    """Attach a trace. gRPC has read the message before, so reading takes no time in it."""
    now = time.monotonic_ns()
    trace.stamp("GRPC_WAITREAD_START", now)
    trace.stamp("GRPC_WAITREAD_END", now)
    request.times.trace = trace


class _Stream:
    """Writes the responses of one stream. gRPC takes one message at a time."""

    def __init__(self, call: StreamCall, forwarded: dict[str, Parameter]) -> None:
        self.forwarded = forwarded
        self.peer = call.peer
        self.metadata = call.metadata
        self._call = call
        self._errors_end = any(
            key == ERRORS_END_STREAM and value == "true" for key, value in call.metadata
        )
        self._ended = False
        self._turn = asyncio.Lock()

    async def write(self, response: Any) -> None:
        message = messages.ModelStreamInferResponse(infer_response=response)
        await self.write_encoded(message.SerializeToString())

    async def write_encoded(self, message: bytes) -> None:
        async with self._turn:
            await self._send(message)

    async def _send(self, message: bytes) -> None:
        if self._ended:
            raise ClientGone
        await self._call.write(message)

    async def fail(self, message: str, code: Code, response: Any) -> None:
        async with self._turn:
            if self._errors_end:
                self._ended = True
                raise Status(STATUS[code], message)
            failure = messages.ModelStreamInferResponse(
                error_message=message, infer_response=response
            )
            await self._send(failure.SerializeToString())


class _Answers:
    """Answers one request of a stream."""

    def __init__(self, inference: Inference, message: Any, stream: _Stream) -> None:
        self._inference = inference
        self._message = message
        self._stream = stream
        self._next = NextResponses()
        self._refusal: InferenceError | None = None
        self._admitted: Admitted | None = None

    async def admit(self, size: int) -> None:
        """Read the message of `size` bytes. It must have happened before `run`."""
        stream = self._stream
        try:
            self._admitted = await self._inference.admit(
                self._message, size, stream.forwarded, stream.metadata
            )
            self._admitted.call.request.peer = stream.peer
        except InferenceError as error:
            self._refusal = error
        except NeedsPrimary:
            self._refusal = Unavailable(_LEFT)

    @property
    def keep_order(self) -> bool:
        """Return whether responses keep the order of their requests: the model answers once."""
        return self._admitted is not None and not self._admitted.entry.model.decoupled

    async def run(self, after: asyncio.Task[None] | None) -> None:
        try:
            if self._admitted is None:
                assert self._refusal is not None
                raise self._refusal
            await self._answer_traced(self._admitted, after if self.keep_order else None)
        except InferenceError as error:
            await self._refuse(error)
        except NeedsPrimary:
            await self._refuse(Unavailable(_LEFT))
        except Status:
            raise
        except ClientGone:
            return  # the model's generator is closed, and with it the request
        except Exception:
            logger.exception("gRPC call failed:")
            await self._refuse(InferenceError(INTERNAL, Code.INTERNAL))

    async def _refuse(self, error: InferenceError) -> None:
        response = messages.ModelInferResponse(id=self._message.id)
        if isinstance(error, PlainTextError):  # Triton's backend answers
            response.model_name = self._message.model_name
            set_parameters(response, [(FINAL, True)])
        await self._stream.fail(error.message, error.code, response)

    async def _answer_traced(self, admitted: Admitted, after: asyncio.Task[None] | None) -> None:
        with Finishing(admitted.call.request.times.trace, "GRPC_SEND_END"):
            await self._answer(admitted, after)

    async def _answer(self, admitted: Admitted, after: asyncio.Task[None] | None) -> None:
        model = admitted.entry.model
        request = admitted.call.request
        final = False
        async with aclosing(model.infer(request)) as responses:
            async for response in responses:
                if after is not None:
                    await asyncio.wait([after])
                final = response.final or not model.decoupled
                await self._send(admitted, response, final)
        if not final and wants_empty_final(self._message):
            end = messages.ModelInferResponse(model_name=admitted.entry.name, id=request.id)
            set_parameters(end, [(FINAL, True)])
            await self._stream.write(end)

    async def _send(self, admitted: Admitted, response: InferResponse, final: bool) -> None:
        if not final and (encoded := self._next.write(response)) is not None:
            if (trace := admitted.call.request.times.trace) is not None:
                trace.stamp("GRPC_SEND_START")
            await self._stream.write_encoded(encoded)
            return
        if response.error is None and (count := count_values(response.outputs)) > _MAX_VALUES:
            encode = self._inference.encode_long
            encoded = await in_thread_if_long(count, encode, admitted, response, final)
            if (trace := admitted.call.request.times.trace) is not None:
                trace.stamp("GRPC_SEND_START")
            await self._stream.write_encoded(encoded)
            return
        message = self._inference.write(admitted, response)
        set_parameters(message, [(FINAL, final)])
        if not final and response.error is None:
            self._next.remember(admitted.call, response, message)
        if (trace := admitted.call.request.times.trace) is not None:
            trace.stamp("GRPC_SEND_START")
        if response.error is not None:
            await self._stream.fail(response.error.message, response.error.code, message)
        else:
            await self._stream.write(message)

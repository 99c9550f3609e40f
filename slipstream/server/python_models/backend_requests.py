"""The requests that a `model.py` gets and makes. Part of `triton_python_backend_utils`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from slipstream.server.python_models.backend_tensors import (
    InferenceResponse,
    Tensor,
    TritonError,
    TritonModelException,
)
from slipstream.server.python_models.channel import Channel, PendingCall
from slipstream.server.python_models.frames import (
    Call,
    CallAck,
    CallCancel,
    RequestFrame,
    Response,
)

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2


class PreferredMemory:
    """The memory in which a model prefers the response of another one. Only CPU memory is
    supported.
    """

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request. Requests that a model makes with it belong to the same trace."""

    def __init__(self, context: str | None = None, number: int = 0) -> None:
        self._context = context
        self.number = number  # number of the request; 0 if it is not traced

    def get_context(self) -> str | None:
        return self._context


class ResponseSender:
    """Sends the responses to one request, from any thread, also after `execute` has returned."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number
        self.closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response. Unless it is final, waits while too much is unread (`flow_control`)."""
        frame = self.frame(response, bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL))
        if frame.final:
            self._channel.send(frame)
        else:
            self._channel.answer(frame)

    def frame(self, response: InferenceResponse | None, final: bool) -> Response:
        """Return the frame of a response. Raises after the final one."""
        if self.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send takes an InferenceResponse, not {type(response).__name__}")
        if response is None and not final:
            raise TritonModelException(
                "a response may be left out only with TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            )
        frame = Response(self._number, None if response is None else response.frame(), final)
        self.closed = final
        if final:
            self._channel.forget(self._number)
        return frame

    def is_cancelled(self) -> bool:
        return self._channel.is_cancelled(self._number)


class ResponseIterator:
    """The responses of a decoupled model as they arrive."""

    def __init__(self, channel: Channel, call: PendingCall) -> None:
        self._channel = channel
        self._call = call
        self._ended = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        while not self._ended:
            answer = self._call.next()
            self._ended = answer.final
            if answer.response is not None:
                return InferenceResponse.from_frame(answer.response)
            if not self._ended:
                self._channel.send(CallAck(self._call.number))
        raise StopIteration

    def cancel(self) -> None:
        """Cancel the call."""
        if not self._ended:
            self._channel.send(CallCancel(self._call.number))


class InferenceRequest:
    """A request to this model, or one that it makes to another."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | str | None = None,
    ) -> None:
        if not all(isinstance(tensor, Tensor) for tensor in inputs):
            raise TypeError("inputs of an InferenceRequest must be Tensor objects")
        written = parameters if isinstance(parameters, str) else json.dumps(dict(parameters or {}))
        self._frame = RequestFrame(
            0,
            request_id,
            correlation_id,
            flags,
            timeout,
            written,
            tuple(requested_output_names),
            [],
        )
        self._inputs = list(inputs)
        self._flags = flags
        self._model_name = model_name
        self._model_version = model_version
        self._trace = trace
        self.preferred_memory = preferred_memory
        self._sender: ResponseSender | None = None  # only for a request to this model

    @classmethod
    def from_frame(cls, frame: RequestFrame, channel: Channel) -> InferenceRequest:
        request = cls.__new__(cls)
        request._frame = frame
        request._inputs = [Tensor.from_frame(tensor) for tensor in frame.inputs]
        request._flags = frame.flags
        request._model_name = ""
        request._model_version = -1
        request._trace = InferenceTrace(frame.trace_context or None, frame.trace)
        request.preferred_memory = None
        request._sender = ResponseSender(channel, frame.number)
        return request

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._frame.id

    def correlation_id(self) -> int | str:
        return self._frame.correlation_id

    def requested_output_names(self) -> list[str]:
        return list(self._frame.requested_outputs)

    def parameters(self) -> str:
        return self._frame.parameters

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def set_release_flags(self, flags: int) -> None:
        if flags & TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            raise TritonModelException("rescheduling a request is not supported")

    def timeout(self) -> int:
        return self._frame.timeout

    def trace(self) -> InferenceTrace:
        return self._trace or InferenceTrace()

    def is_cancelled(self) -> bool:
        return self._sender is not None and self._sender.is_cancelled()

    def get_response_sender(self) -> ResponseSender:
        if self._sender is None:
            raise TritonModelException("only a request to this model has a response sender")
        return self._sender

    def exec(self, decoupled: bool = False) -> Any:
        """Send the request; return its response, or with `decoupled` an iterator of responses."""
        channel = Channel.current()
        answers = ResponseIterator(channel, self._begin(channel, decoupled))
        if decoupled:
            return answers
        responses = list(answers)
        if len(responses) != 1:
            text = f"gave {len(responses)} responses where one was expected"
            return InferenceResponse([], TritonError(f"model '{self._model_name}' {text}"))
        return responses[0]

    async def async_exec(self, decoupled: bool = False) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, self.exec, decoupled)

    def _begin(self, channel: Channel, decoupled: bool) -> PendingCall:
        if not self._model_name:
            raise TritonModelException("an InferenceRequest to be executed needs a model_name")
        call = channel.begin()
        inputs = [tensor.frame() for tensor in self._inputs]
        trace = self._trace.number if self._trace is not None else 0
        frame = msgspec.structs.replace(
            self._frame, number=call.number, flags=self._flags, inputs=inputs, trace=trace
        )
        channel.send(Call(frame, self._model_name, self._model_version, decoupled))
        return call

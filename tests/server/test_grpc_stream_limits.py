"""Limits of one gRPC stream, and its end when the client disconnects."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_stack import until

from slipstream.repository.models import inspect_repository
from slipstream.server.grpc.core_transport import CoreStreamCall
from slipstream.server.grpc.infer import Inference
from slipstream.server.grpc.protocol import messages
from slipstream.server.grpc.service import create_grpc_server
from slipstream.server.grpc.transport import ClientGone, Streaming, create_server
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import InferResponse, ModelRegistry, ServedModel
from slipstream.server.services import create_context

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
CONFIG = """name: "gate" backend: "python" model_transaction_policy { decoupled: true }
input [ { name: "in" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "out" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


class Gate(ServedModel):
    """A model that answers when its semaphore is released."""

    ready = True
    decoupled = True

    def __init__(self, folder):
        (folder / "gate" / "1").mkdir(parents=True)
        (folder / "gate" / "config.pbtxt").write_text(CONFIG)
        self.config = inspect_repository(folder, served_elsewhere=["gate"])[0].models["gate"].config
        self.go = asyncio.Semaphore(0)
        self.begun = self.under_way = self.most = 0

    async def infer(self, request):
        self.begun += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.go.acquire()
        self.under_way -= 1
        yield InferResponse(final=True)


def gate_request(model, number=1):
    message = messages.ModelInferRequest(model_name=model, id=str(number))
    message.inputs.add(name="in", datatype="INT32", shape=[1]).contents.int_contents.append(number)
    return message.SerializeToString()


@asynccontextmanager
async def gate_behind_grpc(folder):
    gate = Gate(folder)
    registry = ModelRegistry()
    registry.add("gate", 1, gate)
    server = create_grpc_server(registry, ServerState([]))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield gate, channel
    finally:
        await server.stop(None)


async def test_a_stream_has_at_most_1024_requests_under_way(tmp_path):
    async with gate_behind_grpc(tmp_path) as (gate, channel), asyncio.timeout(30):
        call = channel.stream_stream(STREAM)()
        for number in range(1100):
            await call.write(gate_request("gate", number))
        await call.done_writing()
        await until(lambda: gate.begun >= 1024)
        for _ in range(20):  # once these are answered, all earlier messages have arrived
            assert (
                await channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")
                == b"\x08\x01"
            )
        assert gate.begun == 1024
        for _ in range(10):
            gate.go.release()
        await until(lambda: gate.begun >= 1034)
        for _ in range(1090):
            gate.go.release()
        answers = [messages.ModelStreamInferResponse.FromString(answer) async for answer in call]
        assert sorted(int(answer.infer_response.id) for answer in answers) == list(range(1100))
        assert {answer.error_message for answer in answers} == {""}
        assert (gate.begun, gate.most) == (1100, 1024)


def lines(capfd):
    """Return the lines of the log, without those of the client's library."""
    captured = capfd.readouterr()
    return [
        line
        for line in (captured.out + captured.err).splitlines()
        if "chttp2_transport.cc" not in line
    ]


class DisconnectingCall:
    """A call whose client sends requests and disconnects before it is answered."""

    metadata = ()

    def __init__(self, *sent):
        self.sent = list(sent)
        self.tried = 0

    def peer(self):
        return "unknown"

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.sent:
            await asyncio.sleep(0)  # the tasks that answer run first
            raise StopAsyncIteration
        return self.sent.pop(0)

    async def write(self, data):
        self.tried += 1
        raise ClientGone


@pytest.mark.parametrize("count", [1, 3])
async def test_a_client_that_disconnects_while_an_error_is_sent_logs_nothing(capfd, count):
    call = DisconnectingCall(*[gate_request("unknown")] * count)
    inference = Inference(ModelRegistry(), ServerState([]), create_context())
    await inference.model_stream_infer(call)
    assert call.tried > 0
    assert lines(capfd) == []


async def test_clients_that_disconnect_during_errors_log_nothing(tmp_path, capfd):
    async with gate_behind_grpc(tmp_path) as (_, channel), asyncio.timeout(30):
        for number in range(30):
            call = channel.stream_stream(STREAM)()
            for _ in range(20):
                await call.write(gate_request("unknown"))
            for _ in range(number % 3):
                assert b"unknown model" in await call.read()
            call.cancel()
        assert (
            await channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")
            == b"\x08\x01"
        )
    assert lines(capfd) == []


@asynccontextmanager
async def run_handler_after_disconnect(after, transport="core"):
    """Run a handler that calls `after` when its client has disconnected, and record the result."""
    seen = SimpleNamespace(begun=asyncio.Event(), ended=asyncio.Event(), result=None)

    async def handle(call):
        try:
            await anext(call)
            seen.begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                seen.result = await after(call)
            finally:
                seen.ended.set()

    server = create_server(
        {"/test.Service/Handle": Streaming(handle)}, [("grpc.so_reuseport", 0)], transport
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
        call = channel.stream_stream("/test.Service/Handle")()
        await call.write(b"first")
        await call.write(b"second")
        await seen.begun.wait()
        yield seen, server, call
    await server.stop(None)


async def leave(how, server, call):
    if how == "client":
        call.cancel()
    else:
        await server.stop(None)


@pytest.mark.parametrize("how", ["client", "server"])
async def test_a_call_of_a_disconnected_client_yields_no_messages(how, monkeypatch):
    async def read_on(call):
        monkeypatch.setattr(CoreStreamCall, "_start", lambda *operation: started.append(operation))
        async with asyncio.timeout(5):
            return [message async for message in call]

    started = []
    async with run_handler_after_disconnect(read_on) as (seen, server, call):
        await leave(how, server, call)
        await seen.ended.wait()
        monkeypatch.undo()
        assert (seen.result, started) == ([], [])


@pytest.mark.parametrize(
    ("how", "transport"), [("client", "core"), ("server", "core"), ("client", "aio")]
)
async def test_writing_to_a_call_of_a_disconnected_client_logs_nothing(how, transport, capfd):
    async def write_on(call):
        await call.write(b"an error")

    async with run_handler_after_disconnect(write_on, transport) as (seen, server, call):
        await leave(how, server, call)
        await seen.ended.wait()
        await until(lambda: not server.running)
    assert lines(capfd) == []

"""gRPC calls that one process of a server forwards to another, over the sockets between them."""

import asyncio
import json
import socket

import grpc
import pytest

from slipstream.server.frontends.forwarded_calls import ForwardedCalls
from slipstream.server.frontends.grpc_forwarding import END, MESSAGE, GrpcForwarder, read_messages
from slipstream.server.frontends.upstream import ConnectionReceiver, Upstream
from slipstream.server.grpc.transport import INTERNAL, Status, Streaming, Unary


class ClientCall:
    """A call of a client as a secondary process sees it."""

    def __init__(self, metadata=(), messages=()):
        self.metadata = list(metadata)
        self.written = []
        self._messages = iter(messages)

    def peer(self):
        return "ipv4:127.0.0.1:9"

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            return next(self._messages)
        except StopIteration:
            raise StopAsyncIteration from None

    async def write(self, message):
        self.written.append(message)


async def show_call(message, call):
    return json.dumps([message.decode(), call.peer(), dict(call.metadata)]).encode()


async def refuse(message, call):
    raise Status(grpc.StatusCode.NOT_FOUND, "no such model")


async def fail(message, call):
    raise ValueError("a mistake")


async def double(call):
    async for message in call:
        await call.write(message * 2)


async def answer_first(call):
    """Answer before the client has sent everything."""
    await call.write(await anext(call))


HANDLERS = {
    "/show": Unary(show_call),
    "/refuse": Unary(refuse),
    "/fail": Unary(fail),
    "/double": Streaming(double),
    "/first": Streaming(answer_first),
}


class Link:
    """Both ends in one process."""

    def __init__(self):
        own, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        calls = ForwardedCalls(HANDLERS)
        self.kinds = []
        self.receiver = ConnectionReceiver(own, self._serve)
        self._calls = calls
        self.forwarder = GrpcForwarder(Upstream(self.other), 3)

    def _serve(self, kind, connection):
        self.kinds.append(kind)
        self._calls.serve(connection)

    def close(self):
        self.receiver.close()
        self.other.close()


@pytest.fixture
async def link():
    found = Link()
    yield found
    found.close()


async def test_a_call_keeps_its_message_its_metadata_and_its_peer(link):
    metadata = [
        ("tenant", "a"),
        ("test-key", "b"),
        ("te", "trailers"),
        ("user-agent", "grpc-python"),
        ("grpc-timeout", "1S"),
    ]
    answer = await link.forwarder.forward("/show", b"hello", ClientCall(metadata))
    assert json.loads(answer) == [
        "hello",
        "3/ipv4:127.0.0.1:9",
        {"tenant": "a", "test-key": "b", "user-agent": "grpc-python"},
    ]


@pytest.mark.parametrize(
    ("path", "code", "details"),
    [
        ("/refuse", grpc.StatusCode.NOT_FOUND, "no such model"),
        ("/fail", grpc.StatusCode.INTERNAL, INTERNAL),
        ("/none", grpc.StatusCode.UNIMPLEMENTED, ""),
    ],
)
async def test_the_status_of_a_call_comes_back(link, path, code, details):
    with pytest.raises(Status) as raised:
        await link.forwarder.forward(path, b"", ClientCall())
    assert raised.value.code is code
    assert raised.value.details == details


async def test_many_calls_at_once_are_all_answered(link):
    calls = [link.forwarder.forward("/show", b"x" * 1000, ClientCall()) for _ in range(300)]
    answers = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert {json.loads(answer)[0] for answer in answers} == {"x" * 1000}


async def test_a_stream_is_forwarded_both_ways(link):
    call = ClientCall(messages=[b"a", b"b" * 100_000, b"c"])
    await asyncio.wait_for(link.forwarder.streaming("/double").run(call), 60)
    assert call.written == [b"aa", b"b" * 200_000, b"cc"]


async def test_a_stream_may_end_before_all_of_it_is_read(link):
    for _ in range(50):
        call = ClientCall(messages=[b"first", *[b"x" * 10_000] * 100])
        await asyncio.wait_for(link.forwarder.streaming("/first").run(call), 60)
        assert call.written == [b"first"]


async def test_a_call_is_answered_before_all_of_it_is_read(link):
    async with link.forwarder.open("/show", ClientCall()) as stream:
        stream.write(MESSAGE, b"hello")
        await asyncio.sleep(0.1)  # the response is sent
        stream.write(END, b"")
        await asyncio.sleep(0.1)
        (answer,) = [message async for message in read_messages(stream)]
    assert json.loads(answer)[0] == "hello"


async def test_a_connection_that_could_not_be_received_does_not_end_the_others(link):
    link.other.send(b"g")  # without a descriptor, as where the receiver has too many open files
    assert await link.forwarder.forward("/show", b"", ClientCall())
    assert link.kinds == [b"g"]


async def test_a_call_without_a_primary_process_is_unavailable(link):
    link.receiver.close()
    with pytest.raises(Status) as raised:
        await link.forwarder.forward("/show", b"", ClientCall())
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE

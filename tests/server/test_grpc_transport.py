"""The two gRPC transports below the service, called by gRPC's own clients."""

import asyncio
import sys
import types
from collections.abc import Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_load import INFER, GrpcLoad, grpc_rate

import slipstream.server.grpc
from slipstream.server.grpc.aio_transport import AioServer
from slipstream.server.grpc.core_transport import CoreServer
from slipstream.server.grpc.options import GrpcOptions
from slipstream.server.grpc.transport import (
    INTERNAL,
    Status,
    Streaming,
    Unary,
    core_problem,
    create_server,
)

ARGUMENTS = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1 << 20)]


@pytest.fixture(params=["core", "aio"])
def transport(request):
    return request.param


@asynccontextmanager
async def serving(transport, **handlers):
    by_path = {f"/test.Service/{name}": handler for name, handler in handlers.items()}
    server = create_server(by_path, ARGUMENTS, transport)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield server, channel
    finally:
        await server.stop(None)


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details()


async def twice(data, call):
    return data * 2


class Waiting:
    """A handler that waits for `go` and records how it ended."""

    def __init__(self):
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.ended = asyncio.Event()
        self.cancelled = False

    async def wait(self):
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.ended.set()

    async def unary(self, data, call):
        await self.wait()
        return b"answer"

    async def stream(self, call):
        await call.write(b"first")
        await self.wait()


async def test_concurrent_calls_get_their_own_answers(transport):
    async with serving(transport, Twice=Unary(twice)) as (server, channel):
        call = channel.unary_unary("/test.Service/Twice")
        answers = await asyncio.gather(*(call(b"%d" % number) for number in range(300)))
        assert answers == [b"%d" % number * 2 for number in range(300)]
        assert await call(b"") == b""
        assert not server.running


async def test_a_handler_sees_the_metadata_of_its_call(transport):
    seen = []

    async def look(data, call):
        seen.extend(call.metadata)
        return b""

    async with serving(transport, Look=Unary(look)) as (_, channel):
        await channel.unary_unary("/test.Service/Look")(
            b"", metadata=[("x-name", "v"), ("x-data-bin", b"\xff\x00")]
        )
    assert [tuple(pair) for pair in seen if pair[0].startswith("x-")] == [
        ("x-name", "v"),
        ("x-data-bin", b"\xff\x00"),
    ]


async def test_a_call_ends_with_the_status_its_handler_raises(transport):
    async def refuse(data, call):
        raise Status(grpc.StatusCode.NOT_FOUND, "nö: 100%")

    async with serving(transport, Refuse=Unary(refuse)) as (_, channel):
        found = await failure(channel.unary_unary("/test.Service/Refuse")(b""))
        assert found == (grpc.StatusCode.NOT_FOUND, "nö: 100%")
        assert await failure(channel.unary_unary("/test.Service/Other")(b"")) == (
            grpc.StatusCode.UNIMPLEMENTED,
            "",
        )


async def test_an_exception_of_a_handler_is_only_in_the_log(transport, capfd):
    async def raise_an_error(data, call):
        raise KeyError("a secret")

    async def cancel_itself(data, call):
        raise asyncio.CancelledError

    async with serving(transport, Break=Unary(raise_an_error), Cancel=Unary(cancel_itself)) as (
        server,
        channel,
    ):
        found = await failure(channel.unary_unary("/test.Service/Break")(b""))
        assert found == (grpc.StatusCode.INTERNAL, INTERNAL)
        code, _ = await failure(channel.unary_unary("/test.Service/Cancel")(b""))
        assert code is grpc.StatusCode.CANCELLED
        assert not server.running
    assert "KeyError: 'a secret'" in capfd.readouterr().err


async def test_a_unary_call_takes_exactly_one_message_of_bounded_length(transport):
    async with serving(transport, Twice=Unary(twice)) as (_, channel):
        code, _ = await failure(channel.stream_unary("/test.Service/Twice")(iter([])))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        code, _ = await failure(channel.unary_unary("/test.Service/Twice")(bytes((1 << 20) + 1)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await channel.unary_unary("/test.Service/Twice")(b"a") == b"aa"


@pytest.mark.parametrize("kind", ["unary", "stream"])
@pytest.mark.parametrize("how", ["leaves", "deadline"])
async def test_a_disconnected_client_cancels_the_handler(transport, kind, how):
    waiting = Waiting()
    handler = Unary(waiting.unary) if kind == "unary" else Streaming(waiting.stream)
    async with serving(transport, Wait=handler) as (server, channel), asyncio.timeout(20):
        method = channel.unary_unary if kind == "unary" else channel.unary_stream
        call = method("/test.Service/Wait")(b"", timeout=0.2 if how == "deadline" else None)
        await waiting.begun.wait()
        if how == "leaves":
            call.cancel()
        await waiting.ended.wait()
        expected = (
            grpc.StatusCode.CANCELLED if how == "leaves" else grpc.StatusCode.DEADLINE_EXCEEDED
        )
        assert (waiting.cancelled, await call.code()) == (True, expected)
        await asyncio.sleep(0)
        assert not server.running


async def test_a_stream_passes_messages_both_ways_in_order(transport):
    async def echo(call):
        count = 0
        async for message in call:
            count += 1
            await call.write(message)
        raise Status(grpc.StatusCode.DATA_LOSS, f"after {count}")

    async with serving(transport, Echo=Streaming(echo)) as (_, channel):
        call = channel.stream_stream("/test.Service/Echo")(b"%d" % number for number in range(500))
        answers = []

        async def collect():
            async for answer in call:
                answers.append(answer)

        assert await failure(collect()) == (grpc.StatusCode.DATA_LOSS, "after 500")
        assert answers == [b"%d" % number for number in range(500)]


async def until_unchanged(read: Callable[[], int]) -> None:
    """Wait until a count stays the same for half a second."""
    unchanged = 0
    before = read()
    while unchanged < 10:
        await asyncio.sleep(0.05)
        unchanged = unchanged + 1 if read() == before else 0
        before = read()


async def test_a_slow_reader_blocks_the_writer(transport):
    written = 0
    ended = asyncio.Event()

    async def flood(call):
        nonlocal written
        try:
            while True:
                await call.write(bytes(64 << 10))
                written += 1
        finally:
            ended.set()

    async with serving(transport, Flood=Streaming(flood)) as (_, channel), asyncio.timeout(20):
        call = channel.unary_stream("/test.Service/Flood")(b"")
        assert len(await call.read()) == 64 << 10
        await until_unchanged(lambda: written)  # the buffers in between are full
        assert written < 1000
        call.cancel()
        await ended.wait()


class CountingProxy:
    """Forwards connections to a port and counts the bytes of the responses."""

    def __init__(self, port):
        self.port = port
        self.received = 0

    async def connect(self, reader, writer):
        beyond = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.gather(self.copy(reader, beyond[1]), self.copy(beyond[0], writer, count=True))

    async def copy(self, reader, writer, count=False):
        while data := await reader.read(1 << 16):
            self.received += len(data) * count
            writer.write(data)
        writer.close()


@pytest.mark.parametrize(
    ("compression", "short"), [("none", False), ("deflate", True), ("gzip", True)]
)
async def test_responses_are_compressed_as_the_options_say(transport, compression, short):
    async def large(data, call):
        return bytes(1 << 20)

    arguments = GrpcOptions(response_compression=compression).channel_arguments()
    server = create_server({"/test.Service/Large": Unary(large)}, arguments, transport)
    counting = CountingProxy(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    async with await asyncio.start_server(counting.connect, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await channel.unary_unary("/test.Service/Large")(b"") == bytes(1 << 20)
    await server.stop(None)
    assert (counting.received < 10_000) == short


async def test_calls_that_end_within_the_grace_period_are_completed(transport):
    waiting = Waiting()
    async with (
        serving(transport, Wait=Unary(waiting.unary), Twice=Unary(twice)) as (server, channel),
        asyncio.timeout(20),
    ):
        call = channel.unary_unary("/test.Service/Wait")(b"")
        await waiting.begun.wait()
        stopping = asyncio.create_task(server.stop(10))
        code, _ = await failure(channel.unary_unary("/test.Service/Twice")(b""))
        # gRPC cancels a call that was in transit when the server stopped, and refuses later ones.
        assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert not stopping.done()
        waiting.go.set()
        assert await call == b"answer"
        await stopping
        await server.stop(None)  # a second stop does nothing


@pytest.mark.parametrize("grace", [None, 0.1])
async def test_calls_are_cancelled_after_the_grace_period(transport, grace):
    waiting = Waiting()
    streaming = Waiting()
    handlers = {"Wait": Unary(waiting.unary), "Stream": Streaming(streaming.stream)}
    async with serving(transport, **handlers) as (server, channel), asyncio.timeout(20):
        calls = (
            channel.unary_unary("/test.Service/Wait")(b""),
            channel.unary_stream("/test.Service/Stream")(b""),
        )
        assert await calls[1].read() == b"first"
        await waiting.begun.wait()
        await streaming.begun.wait()
        await server.stop(grace)
        assert waiting.cancelled
        assert streaming.cancelled
        assert [await call.code() for call in calls] == [grpc.StatusCode.UNAVAILABLE] * 2


async def test_a_port_in_use_is_an_error_and_an_unstarted_server_can_be_stopped(transport):
    async with serving(transport) as _:
        first = create_server({}, ARGUMENTS, transport)
        second = create_server({}, ARGUMENTS, transport)
        port = first.add_insecure_port("127.0.0.1:0")
        with pytest.raises(RuntimeError, match=f"cannot listen at 127.0.0.1:{port}"):
            second.add_insecure_port(f"127.0.0.1:{port}")
        await first.stop(None)
        await second.stop(None)


async def test_the_client_of_the_benchmark_counts_answers_and_reports_errors():
    async def refuse(data, call):
        raise Status(grpc.StatusCode.NOT_FOUND, "no")

    load = GrpcLoad(INFER, b"message", 1)
    for handler in (Unary(twice), Unary(refuse)):
        server = create_server({INFER: handler}, ARGUMENTS)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        if handler.answer is twice:
            assert (await grpc_rate(port, load, 16, 0.1)).units > 0
        else:
            with pytest.raises(RuntimeError, match="ModelInfer answered"):
                await grpc_rate(port, load, 1, 0.1)
        await server.stop(None)


async def test_the_core_transport_is_used_with_a_tested_grpcio():
    assert core_problem(grpc.__version__) == ""
    assert isinstance(create_server({}, ARGUMENTS), CoreServer)
    assert isinstance(create_server({}, ARGUMENTS, "aio"), AioServer)


@pytest.mark.parametrize("version", ["1.66.2", "1.90.0", "2.0.0", "unknown"])
async def test_an_untested_grpcio_is_served_by_aio(version, monkeypatch, caplog):
    monkeypatch.setattr(grpc, "__version__", version)
    assert isinstance(create_server({}, ARGUMENTS), AioServer)
    assert f"grpcio {version} is not among the tested releases 1.67 to 1.89" in caplog.text


async def test_a_grpcio_without_the_private_names_is_served_by_aio(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "grpc._cython.cygrpc", types.ModuleType("cygrpc"))
    monkeypatch.delitem(sys.modules, CoreServer.__module__)
    monkeypatch.delattr(slipstream.server.grpc, "core_transport")
    assert isinstance(create_server({}, ARGUMENTS), AioServer)
    assert "lacks a name: cannot import name 'CompletionQueue'" in caplog.text

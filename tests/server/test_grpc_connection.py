"""gRPC connections: their maximum age, and bytes that are no message."""

import asyncio

import grpc
import pytest
from grpc_stack import running
from tiny_engine import build_tiny_engine

from slipstream.server.grpc.options import GrpcOptions


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory):
    return build_tiny_engine(tmp_path_factory.mktemp("tiny"))


async def test_a_connection_is_replaced_when_it_is_old(engine_folder, tmp_path):
    """The client makes a new connection and loses no call."""
    options = GrpcOptions(max_connection_age_ms=100, max_connection_age_grace_ms=1000)
    async with running(engine_folder, tmp_path, options=options) as stack:
        states = []
        async with grpc.aio.insecure_channel(stack.address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            for _ in range(8):
                assert await call(b"") == b"\x08\x01"
                await asyncio.sleep(0.05)
                states.append(channel.get_state())
    assert grpc.ChannelConnectivity.IDLE in states


async def test_unreadable_messages_get_tritons_error(engine_folder, tmp_path):
    service = "/inference.GRPCInferenceService"
    async with (
        running(engine_folder, tmp_path) as stack,
        grpc.aio.insecure_channel(stack.address) as channel,
    ):
        for method in ("ModelInfer", "ModelMetadata"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary(f"{service}/{method}")(b"\xff\xff\xff")
            assert (raised.value.code(), raised.value.details()) == (
                grpc.StatusCode.INTERNAL,
                "Unable to parse request",
            )
        call = channel.stream_stream(f"{service}/ModelStreamInfer")(iter([b"\xff\xff\xff"]))
        assert [answer async for answer in call] == []
        assert await call.code() is grpc.StatusCode.OK

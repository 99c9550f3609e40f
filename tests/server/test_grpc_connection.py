"""gRPC connections: maximum age, unreadable messages and the fallback transport."""

import asyncio
import signal

import grpc
import pytest
from grpc_stack import running
from tiny_engine import build_tiny_engine
from tiny_server import TinyServer, make_repository

from slipstream.server.grpc.options import GrpcOptions
from slipstream.server.grpc.protocol import messages


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory):
    return build_tiny_engine(tmp_path_factory.mktemp("tiny"))


async def test_connection_over_the_maximum_age_is_replaced(engine_folder, tmp_path):
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


def test_a_server_process_on_the_fallback_transport(tmp_path):
    """Serves text over a stream and stops while a call is open."""
    server = TinyServer(make_repository(tmp_path), tmp_path / "tmp", "--grpc-transport=aio")
    try:
        server.wait_started()
        address = f"127.0.0.1:{server.ports['GRPCInferenceService']}"
        with grpc.insecure_channel(address) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            assert live(b"", timeout=20) == b"\x08\x01"
            given = messages.ModelInferRequest(model_name="ensemble")
            for name, datatype, raw in (
                ("text_input", "BYTES", b"\x01\x00\x00\x005"),
                ("max_tokens", "INT32", b"\x03\x00\x00\x00"),
                ("stream", "BOOL", b"\x01"),
            ):
                given.inputs.add(name=name, datatype=datatype, shape=[1, 1])
                given.raw_input_contents.append(raw)
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            call = stream(iter([given.SerializeToString()]), timeout=20)
            answers = [messages.ModelStreamInferResponse.FromString(answer) for answer in call]
            assert [answer.error_message for answer in answers] == [""] * len(answers)
            texts = [answer.infer_response.raw_output_contents[0][4:] for answer in answers]
            assert b"".join(texts).split() == [b"6", b"7", b"8"]
            watching = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=20)
            assert next(watching) == b"\x08\x01"
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_exit() == 0
    finally:
        server.close()

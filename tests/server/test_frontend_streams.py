"""Streams of a server of several processes that go to two of them, and ports before the start."""

import re
import socket
import time
from collections.abc import Iterator

import grpc
import httpx
import numpy as np
import pytest
from front_ends import (
    FLAGS,
    GENERATE,
    UPPER,
    body,
    grpc_clients,
    grpc_input,
    http_clients,
    open_stream,
    token_inputs,
    write_models,
)
from tiny_server import TRITONSERVER, TinyServer, wait_for
from tritonclient.grpc import service_pb2

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture(scope="module")
def ordered(tmp_path_factory) -> Iterator[TinyServer]:
    """A server whose token model answers once, so that its responses keep their order."""
    folder = tmp_path_factory.mktemp("ordered")
    repository = write_models(folder)
    config = repository / "tensorrt_llm" / "config.pbtxt"
    text, changes = re.subn("decoupled: true", "decoupled: false", config.read_text(), flags=re.I)
    assert changes == 1
    config.write_text(text)
    server = TinyServer(repository, folder / "tmp", *FLAGS, program=TRITONSERVER).wait_started()
    yield server
    server.close()


def clients_of(server: TinyServer) -> list:
    return list(grpc_clients(server.process.pid, server.ports["GRPCInferenceService"]).values())


def test_forwarded_responses_follow_those_of_earlier_requests(ordered):
    text = [grpc_input("text", np.array([b"a"], object))]
    for client in clients_of(ordered):
        with open_stream(client) as results:
            slow = token_inputs([5], 20, milliseconds=20)
            client.async_stream_infer("tensorrt_llm", slow, request_id="slow")
            client.async_stream_infer("upper", text, request_id="fast")
            found = [results.get(timeout=30) for _ in range(2)]
        assert [error for _, error in found] == [None, None]
        assert [result.get_response().id for result, _ in found] == ["slow", "fast"]
        client.close()


def test_an_unreadable_message_ends_a_forwarded_stream(ordered):
    request = service_pb2.ModelInferRequest(model_name="upper", id="7")
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"a")
    with_garbage = [request.SerializeToString(), b"\xff\xff\xff", request.SerializeToString()]
    for client in clients_of(ordered):
        client.close()
    port = ordered.ports["GRPCInferenceService"]
    for _ in range(8):  # connections: some go to each process
        # a subchannel of its own for each channel
        own = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", own) as channel:
            call = channel.stream_stream(
                STREAM,
                request_serializer=lambda message: message,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )

            def messages():
                yield from with_garbage
                time.sleep(30)  # the client does not end the stream

            answers = list(call(messages(), timeout=20))
        assert [answer.infer_response.id for answer in answers] == ["7"]


def test_no_process_listens_before_all_models_are_loaded(tmp_path):
    repository = write_models(tmp_path)
    gate = tmp_path / "gate"
    waiting = f"""
    def initialize(self, args):
        import pathlib, time
        while not pathlib.Path({str(gate)!r}).exists():
            time.sleep(0.01)
"""
    model = UPPER.replace("    def execute", waiting + "\n    def execute")
    (repository / "upper" / "1" / "model.py").write_text(model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [*FLAGS, f"--http-port={port}", "--http-address=127.0.0.1"]
    server = TinyServer(repository, tmp_path / "tmp", *flags, program=TRITONSERVER)
    try:
        # The engine has loaded, and the other model has not.
        wait_for(lambda: any("tensorrt_llm" in line and "loaded" in line for line in server.lines))
        for _ in range(20):
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://127.0.0.1:{port}/v2/health/live")
            time.sleep(0.01)
        gate.touch()
        server.wait_started()
        for client in http_clients(server.process.pid, port).values():
            assert client.post(GENERATE, json=body()).status_code == 200
            client.close()
    finally:
        gate.touch()
        server.close()

"""Recorded gRPC calls to a real Triton get the same codes, texts, messages, order and flags."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory as Block
from typing import Any

import grpc
import pytest
from grpc_support import (
    CASES,
    Client,
    RunningGrpc,
    answers,
    case_named,
    comparable,
    document,
    message,
    outgoing,
    recorded_registry,
    send,
)
from http_support import wait_until
from tiny_text import EchoEngine, text_registry, write_engine_folder, write_recorded_repository

from slipstream.repository.models import read_repository
from slipstream.server.kserve.access import Access, parse_restrictions
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.kserve.tensor_bytes import pack
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.services import create_context

# Deliberate differences and their reasons. The tests below still send most of these calls.
DIFFERENT = {
    "grpc-infer-model-raise": "the recorded text is a Python traceback; the models here are not Python models",
    "grpcstream-oops-raise": "as above",
    "grpcstream-oops-raise-emptyfinal": "as above",
    "grpc-reflection": "Triton has no reflection; here it is served for tools like grpcurl",
    "trtllm-bls-grpc-maxtokens0": "the recorded text is a Python traceback; here it is one line with the same cause",
}
OWN_TESTS = (
    "grpc-control",
    "grpc-repo-index",
    "grpc-shm",
    "grpc-restrict",
    "grpc-stats",
    "grpc-trace-model",
    "grpc-infer-big",
)


def cases(proto: str, server: str) -> list[dict[str, Any]]:
    return [
        case
        for case in CASES
        if case["proto"] == proto
        and case["server"] == server
        and case["case"] not in DIFFERENT
        and not case["case"].startswith(OWN_TESTS)
    ]


@pytest.fixture(scope="module")
def registry() -> ModelRegistry:
    return recorded_registry()[0]


@pytest.fixture(scope="module")
def shared() -> ServerContext:
    return create_context(memory=SharedMemory(allowed=True), server_name="oracle-mimic")


@pytest.fixture(scope="module")
def client(registry: ModelRegistry, shared: ServerContext) -> Iterator[Client]:
    with RunningGrpc(registry, ServerState([]), shared) as server, Client(server.port) as made:
        yield made


@pytest.fixture(scope="module", params=["core", "aio"])
def either_client(
    request: pytest.FixtureRequest, registry: ModelRegistry, shared: ServerContext
) -> Iterator[Client]:
    """A client of a server on each transport."""
    with (
        RunningGrpc(registry, ServerState([]), shared, request.param) as server,
        Client(server.port) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def language_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("trtllm")
    engine = write_engine_folder(folder / "engine")
    write_recorded_repository(folder / "repo", engine)
    echo = EchoEngine()
    registry = text_registry(read_repository(folder / "repo"), echo)
    with RunningGrpc(registry, ServerState([echo])) as server, Client(server.port) as made:
        yield made


@pytest.mark.parametrize("case", cases("grpc", "mimic"), ids=lambda case: case["case"])
def test_recorded_call_is_answered_alike(either_client: Client, case: dict[str, Any]) -> None:
    expected = case["response"]
    if expected["code"] == "OK":
        assert comparable(case["case"], send(either_client, case)) == comparable(
            case["case"], expected["response"] or {}
        )
        return
    with pytest.raises(grpc.RpcError) as raised:
        send(either_client, case)
    assert raised.value.code().name == expected["code"]
    # for an unknown method gRPC has a text of its own, and Triton has none
    if not case["case"].startswith("grpc-unknown"):
        assert raised.value.details() == expected["details"]
    assert list(raised.value.trailing_metadata()) == []


def recorded_answers(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in response.items() if not key.startswith("_")}
        for response in case["response"]["responses"]
    ]


@pytest.mark.parametrize(
    "case",
    [case for case in cases("grpc-stream", "mimic") if case["response"]["code"] == "OK"],
    ids=lambda case: case["case"],
)
def test_recorded_stream_is_answered_alike(either_client: Client, case: dict[str, Any]) -> None:
    found = answers(either_client, case)
    expected = recorded_answers(case)
    # requests run concurrently here; the responses of each keep their order
    if case["case"] == "grpcstream-two-requests":
        found.sort(key=lambda answer: answer["infer_response"]["id"])
    assert found == expected


@pytest.mark.parametrize("case", cases("grpc-stream", "trtllm"), ids=lambda case: case["case"])
def test_recorded_language_model_stream_is_answered_alike(
    language_client: Client, case: dict[str, Any]
) -> None:
    found = answers(language_client, case)
    expected = recorded_answers(case)
    assert [_shape(answer) for answer in found] == [_shape(answer) for answer in expected]


def _shape(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer without its text, which depends on the engine, and with sorted outputs."""
    response = answer["infer_response"]
    outputs = {
        output["name"]: (output["datatype"], output["shape"])
        for output in response.get("outputs", [])
    }
    return {**answer, "infer_response": {**response, "outputs": outputs, "raw_output_contents": []}}


@pytest.mark.parametrize("case", cases("grpc", "trtllm"), ids=lambda case: case["case"])
def test_recorded_language_model_call_is_answered_alike(
    language_client: Client, case: dict[str, Any]
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        send(language_client, case)
    assert raised.value.code().name == case["response"]["code"]
    assert raised.value.details() == case["response"]["details"]


def cancelled(registry: ModelRegistry, name: str) -> list[str]:
    return registry.find(name).model.inner.cancelled  # type: ignore[attr-defined, no-any-return]


def test_cancelled_stream_stops_the_model(client: Client, registry: ModelRegistry) -> None:
    case = case_named("grpcstream-cancel")
    call = client.stream(outgoing(case["request"]["messages"]), timeout=20)
    found = [document(next(call)) for _ in range(case["request"]["cancel_after"])]
    call.cancel()
    assert found == recorded_answers(case)
    assert call.code().name == case["response"]["code"]
    wait_until(lambda: "cancel-grpc" in cancelled(registry, "slow"))


def test_deadline_of_a_stream_stops_the_model(client: Client, registry: ModelRegistry) -> None:
    case = case_named("grpcstream-deadline")
    call = client.stream(outgoing(case["request"]["messages"]), timeout=case["request"]["timeout"])
    found: list[Any] = []
    with pytest.raises(grpc.RpcError) as raised:
        found.extend(call)  # keeps the responses before the end
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < len(found) < 40
    wait_until(lambda: "deadline-grpc" in cancelled(registry, "slow"))


def test_deadline_of_a_call_stops_the_model(client: Client, registry: ModelRegistry) -> None:
    case = case_named("grpc-infer-deadline")
    with pytest.raises(grpc.RpcError) as raised:
        send(client, case)
    assert raised.value.code().name == case["response"]["code"]
    wait_until(lambda: "deadline-1" in cancelled(registry, "slow_nd"))


def test_a_message_of_five_megabytes_is_answered(client: Client) -> None:
    case = case_named("grpc-infer-big-4mb")
    text = b"x" * 5_242_880
    raw = struct.pack("<I", len(text)) + text
    request = message("ModelInfer", {**case["request"]["message"], "raw_input_contents": []})
    request.raw_input_contents.append(raw)
    answer = client.unary("ModelInfer", request, timeout=30)
    assert answer.raw_output_contents[0] == raw
    answer.ClearField("raw_output_contents")
    expected = dict(case["response"]["response"])
    del expected["raw_output_contents"]
    assert document(answer) == expected


@pytest.mark.parametrize("name", ["grpc-restrict-nokey", "grpc-restrict-key"])
def test_restricted_protocols_need_the_header(registry: ModelRegistry, name: str) -> None:
    access = Access(grpc_restrictions=parse_restrictions(["inference:api-key=secret"]))
    case = case_named(name)
    with (
        RunningGrpc(registry, ServerState([]), create_context(access=access)) as server,
        Client(server.port) as client,
    ):
        if case["response"]["code"] == "OK":
            assert send(client, case) == case["response"]["response"]
        else:
            with pytest.raises(grpc.RpcError) as raised:
                send(client, case)
            assert raised.value.code().name == case["response"]["code"]
            assert raised.value.details() == case["response"]["details"]
            stream = client.stream(iter([]), timeout=20)
            with pytest.raises(grpc.RpcError):
                next(stream)
            assert stream.code() == grpc.StatusCode.UNAVAILABLE
        assert client.unary("ServerLive", message("ServerLive", {}), timeout=20).live


def test_trace_settings_of_a_model_are_answered_alike(
    client: Client, shared: ServerContext
) -> None:
    case = case_named("grpc-trace-model")
    shared.trace.update({"trace_rate": "500"}, "llm")
    try:
        assert send(client, case) == case["response"]["response"]
    finally:
        shared.trace.forget("llm")


def test_shared_memory_calls_are_answered_alike(client: Client) -> None:
    blocks = [Block(create=True, size=128) for _ in range(2)]
    try:
        for name, block in zip(("out", "in"), blocks, strict=True):
            request = {"name": name, "key": f"/{block.name}", "byte_size": 128}
            client.unary(
                "SystemSharedMemoryRegister", message("SystemSharedMemoryRegister", request)
            )
        expected = case_named("grpc-shm-status")["response"]["response"]["regions"]
        found = send(client, case_named("grpc-shm-status"))["regions"]
        assert {name: {**region, "key": ""} for name, region in found.items()} == {
            name: {**region, "key": ""} for name, region in expected.items()
        }
        assert _through_shared_memory(client, blocks[1], blocks[0]) == b"\x05\x00\x00\x00hello"
        client.unary("SystemSharedMemoryUnregister", message("SystemSharedMemoryUnregister", {}))
        assert send(client, case_named("grpc-shm-status")) == {}
    finally:
        for block in blocks:
            block.close()
            block.unlink()
    assert send(client, case_named("grpc-shm-cuda-status")) == {}
    with pytest.raises(grpc.RpcError) as raised:
        send(client, case_named("grpc-shm-register-missing"))
    assert (raised.value.code().name, raised.value.details()) == (
        "INTERNAL",
        case_named("grpc-shm-register-missing")["response"]["details"],
    )


def _through_shared_memory(client: Client, given: Block, answer: Block) -> bytes:
    given.buf[:9] = b"\x05\x00\x00\x00hello"
    place = {
        "shared_memory_region": {"string_param": "in"},
        "shared_memory_byte_size": {"int64_param": "9"},
    }
    output = {
        "shared_memory_region": {"string_param": "out"},
        "shared_memory_byte_size": {"int64_param": "64"},
    }
    request = {
        "model_name": "echo",
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": ["1"], "parameters": place}
        ],
        "outputs": [{"name": "text_output", "parameters": output}],
    }
    found = document(client.unary("ModelInfer", message("ModelInfer", request)))
    assert "raw_output_contents" not in found
    assert found["outputs"][0]["parameters"]["shared_memory_byte_size"] == {"int64_param": "9"}
    return bytes(answer.buf[:9])


VALUES = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [1, 65535],
    "UINT32": [2, 2**32 - 1],
    "UINT64": [3, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-(2**15), 5],
    "INT32": [-(2**31), 6],
    "INT64": [-(2**63), 7],
    "FP16": [0.5, -2.0],
    "FP32": [0.25, 1e10],
    "FP64": [0.1, -1e300],
}
TYPED = {
    "FP16": None,
    "BOOL": "bool",
    "UINT64": "uint64",
    "INT64": "int64",
    "FP32": "fp32",
    "FP64": "fp64",
}


@pytest.mark.parametrize("datatype", [*VALUES, "BYTES"])
def test_every_datatype_is_echoed_raw_and_typed(client: Client, datatype: str) -> None:
    values = VALUES.get(datatype, [b"", "\u00e9\u4f60".encode()])
    raw = pack(Tensor.from_values("", datatype, (2,), values))
    name = f"{'string' if datatype == 'BYTES' else datatype.lower()}"
    given = {"name": f"i_{name}", "datatype": datatype, "shape": ["2"]}
    request = message("ModelInfer", {"model_name": "types", "inputs": [given]})
    request.raw_input_contents.append(raw)
    answer = client.unary("ModelInfer", request, timeout=20)
    assert (answer.outputs[0].name, answer.outputs[0].datatype) == (f"o_{name}", datatype)
    assert list(answer.raw_output_contents) == [raw]
    field = TYPED.get(
        datatype, "bytes" if datatype == "BYTES" else "uint" if datatype[0] == "U" else "int"
    )
    if field is not None:  # FP16 has no typed contents
        typed = message("ModelInfer", {"model_name": "types", "inputs": [given]})
        getattr(typed.inputs[0].contents, f"{field}_contents").extend(values)
        assert list(client.unary("ModelInfer", typed, timeout=20).raw_output_contents) == [raw]


def test_typed_contents_out_of_range_are_refused(client: Client) -> None:
    given = {
        "name": "i_int8",
        "datatype": "INT8",
        "shape": ["1"],
        "contents": {"int_contents": [128]},
    }
    with pytest.raises(grpc.RpcError) as raised:
        client.unary(
            "ModelInfer",
            message("ModelInfer", {"model_name": "types", "inputs": [given]}),
            timeout=20,
        )
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "i_int8" in raised.value.details()

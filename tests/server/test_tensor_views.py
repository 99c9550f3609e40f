"""Raw tensors are checked before they are decoded, and viewed, not copied, on their way to a model."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from python_model_harness import MIMIC, ask, models_of, open_models

from slipstream.server.grpc.infer_messages import read_call
from slipstream.server.grpc.protocol.messages import ModelInferRequest
from slipstream.server.http.infer import write_infer_response
from slipstream.server.http.infer_request import read_infer_call
from slipstream.server.kserve import input_checks
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.kserve.tensors import DTYPES, Tensor, read_values
from slipstream.server.python_models.backend_tensors import Tensor as ModelTensor
from slipstream.server.python_models.convert import (
    request_frame,
    response_from_frame,
    tensor_from_frame,
)
from slipstream.server.python_models.frames import (
    FROM_WORKER,
    LARGE_BYTES,
    ORDERS,
    Execute,
    Executed,
    FrameError,
    FrameReader,
    Response,
    ResponseFrame,
    TensorFrame,
    encode,
)

CONFIG = models_of(MIMIC)["types"].config
COUNT = LARGE_BYTES  # of FP32 numbers: a large tensor
NUMBERS = np.arange(COUNT, dtype=np.float32)


def memory_of(data: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint8)


def http_call(inputs: list[dict[str, Any]], raw: bytes) -> tuple[Any, bytes]:
    header = json.dumps({"inputs": inputs}).encode()
    body = header + raw
    return read_infer_call(body, len(header), CONFIG, "1", SharedMemory()), body


def grpc_message(name: str, datatype: str, shape: list[int], raw: bytes) -> Any:
    message = ModelInferRequest(model_name="types")
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(raw)
    return message


WRONG = [
    ("nothing", "FP32", [7], "unexpected inference input 'nothing' for model 'types'"),
    ("nothing", "BYTES", [7], "unexpected inference input 'nothing' for model 'types'"),
    ("i_fp32", "BYTES", [7], "data-type is 'BYTES', but model 'types' expects 'FP32'"),
    ("i_fp32", "FP32", [7, 7], "unexpected shape for input 'i_fp32' for model 'types'"),
]


@pytest.mark.parametrize(("name", "datatype", "shape", "text"), WRONG)
def test_a_wrong_input_is_refused_before_its_bytes_are_decoded(
    monkeypatch: pytest.MonkeyPatch, name: str, datatype: str, shape: list[int], text: str
) -> None:
    raw = b"\xff" * (1 << 20)  # fits none of the shapes and is not a valid string

    def decoded(*given: Any) -> None:
        raise AssertionError("the bytes were decoded")

    monkeypatch.setattr(input_checks, "unpack", decoded)
    given = {"name": name, "datatype": datatype, "shape": shape}
    with pytest.raises(InferenceError, match=text.replace("[", r"\[")):
        http_call([given | {"parameters": {"binary_data_size": len(raw)}}], raw)
    with pytest.raises(InferenceError, match=text.replace("[", r"\[")):
        read_call(grpc_message(name, datatype, shape, raw), CONFIG, "1", SharedMemory())


def test_bytes_that_do_not_fill_a_shape_are_refused() -> None:
    text = "input byte size mismatch for input 'i_fp32' for model 'types'. Expected 28, got 12"
    with pytest.raises(InferenceError, match=text):
        read_call(grpc_message("i_fp32", "FP32", [7], bytes(12)), CONFIG, "1", SharedMemory())


def test_raw_http_inputs_are_views_of_the_body() -> None:
    given = {
        "name": "i_fp32",
        "datatype": "FP32",
        "shape": [COUNT],
        "parameters": {"binary_data_size": NUMBERS.nbytes},
    }
    call, body = http_call([given], NUMBERS.tobytes())
    array = call.request.inputs["i_fp32"].array()
    assert np.array_equal(array, NUMBERS)
    assert np.shares_memory(array, memory_of(body))


def test_binary_http_outputs_are_views_of_the_tensor() -> None:
    call, _ = http_call([], b"")
    call.binary_output = True
    response = InferResponse([Tensor("o_fp32", "FP32", (COUNT,), NUMBERS)])
    written = write_infer_response(call, response, CONFIG, SharedMemory())
    assert [bytes(piece) for piece in written.tensors] == [NUMBERS.tobytes()]
    assert np.shares_memory(memory_of(written.tensors[0]), NUMBERS)


def test_raw_grpc_inputs_are_views_of_the_message() -> None:
    raw = NUMBERS.tobytes()

    # protobuf makes a new object of the contents at each access; this message has one object
    message = SimpleNamespace(
        id="",
        parameters={},
        outputs=(),
        inputs=grpc_message("i_fp32", "FP32", [COUNT], b"").inputs,
        raw_input_contents=(raw,),
    )
    call = read_call(message, CONFIG, "1", SharedMemory())
    assert np.shares_memory(call.request.inputs["i_fp32"].array(), memory_of(raw))


def receive(reader: FrameReader, pieces: list[Any]) -> list[Any]:
    messages = []
    data = b"".join(pieces)
    while data:
        room = reader.room()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        messages += reader.received(count)
        data = data[count:]
    return messages


def test_a_large_tensor_reaches_a_model_process_without_a_copy() -> None:
    tensor = Tensor("i_fp32", "FP32", (2, COUNT // 2), NUMBERS)
    small = Tensor.from_values("i_int32", "INT32", (3,), [1, 2, 3])
    request = InferRequest("types", "1", {"i_fp32": tensor, "i_int32": small})
    pieces = encode(Execute([request_frame(1, request)]))
    assert sum(np.shares_memory(memory_of(piece), NUMBERS) for piece in pieces if piece) == 1
    assert sum(map(len, pieces)) < NUMBERS.nbytes + 1000

    reader = FrameReader(ORDERS)
    (order,) = receive(reader, pieces)
    given = [ModelTensor.from_frame(frame) for frame in order.requests[0].inputs]
    large = given[0].as_numpy()
    assert np.array_equal(large, NUMBERS.reshape(2, -1))
    assert np.shares_memory(large, memory_of(order.requests[0].inputs[0].data.view))
    assert large.flags.aligned
    large[0, 0] = 7  # models write to their inputs
    assert given[1].as_numpy().tolist() == [1, 2, 3]


def test_a_large_tensor_is_returned_by_a_model_process_without_a_copy() -> None:
    output = ModelTensor("o_fp32", NUMBERS.reshape(2, -1))
    answer = Executed([Response(1, ResponseFrame([output.frame()]), True)])
    pieces = encode(answer)
    assert sum(np.shares_memory(memory_of(piece), NUMBERS) for piece in pieces if piece) == 1

    (received,) = receive(FrameReader(FROM_WORKER), pieces)
    frame = received.responses[0].response
    tensor = response_from_frame(frame, final=True).outputs[0]
    assert (tensor.shape, tensor.datatype) == ((2, COUNT // 2), "FP32")
    assert np.array_equal(tensor.array(), NUMBERS)
    assert np.shares_memory(tensor.array(), memory_of(frame.outputs[0].data.view))


def test_a_large_frame_is_received_into_one_buffer() -> None:
    tensor = Tensor("x", "FP32", (COUNT,), NUMBERS)
    data = b"".join(encode(Execute([request_frame(1, InferRequest("m", "1", {"x": tensor}))])))
    reader = FrameReader(ORDERS)
    rooms = []
    while data:
        room = reader.room()
        rooms.append(memory_of(room))
        count = min(len(room), len(data), 10_000)
        room[:count] = data[:count]
        data = data[count:]
        messages = reader.received(count)
    assert len(messages) == 1
    array = ModelTensor.from_frame(messages[0].requests[0].inputs[0]).as_numpy()
    assert all(np.shares_memory(room, array) for room in rooms[2:])


def test_small_and_large_frames_alternate() -> None:
    def order(number: int, count: int) -> Execute:
        tensor = Tensor("x", "FP32", (count,), NUMBERS[:count] + number)
        return Execute([request_frame(number, InferRequest("m", "1", {"x": tensor}))])

    counts = [3, COUNT, 5, 7, COUNT - 1, 60_000, COUNT]
    pieces = [
        piece for number, count in enumerate(counts) for piece in encode(order(number, count))
    ]
    received = receive(FrameReader(ORDERS), pieces)
    arrays = [ModelTensor.from_frame(one.requests[0].inputs[0]).as_numpy() for one in received]
    assert [len(array) for array in arrays] == counts
    for number, array in enumerate(arrays):
        assert np.array_equal(array, NUMBERS[: len(array)] + number)


def test_a_frame_whose_large_tensor_is_missing_is_refused() -> None:
    tensor = Tensor("x", "FP32", (COUNT,), NUMBERS)
    frame = b"".join(encode(Execute([request_frame(1, InferRequest("m", "1", {"x": tensor}))])))
    cut = len(frame) - 100
    damaged = cut.to_bytes(4, "little") + frame[4:cut]
    with pytest.raises(FrameError, match="tensor 'x' does not fit it"):
        receive(FrameReader(ORDERS), [damaged])
    with pytest.raises(FrameError, match="tensor 'x' has no numbers"):
        TensorFrame("x", "FP32", (COUNT,), COUNT * 4).numbers()


def test_a_model_process_that_sends_too_few_numbers_is_refused() -> None:
    with pytest.raises(InferenceError, match="does not fit the shape of tensor 'x'"):
        tensor_from_frame(TensorFrame("x", "FP32", (3,), bytes(8)))
    with pytest.raises(InferenceError, match="does not fit the shape of tensor 'x'"):
        tensor_from_frame(TensorFrame("x", "FP32", (1,), [b"text"]))


async def test_64_mib_pass_through_a_python_model() -> None:
    numbers = np.arange(16 << 20, dtype=np.float32)
    async with open_models(MIMIC, "types") as models:
        inputs = {"i_fp32": Tensor("i_fp32", "FP32", numbers.shape, numbers)}
        (response,) = await ask(models["types"], InferRequest("types", "1", inputs))
    assert response.error is None
    assert np.array_equal(response.outputs[0].array(), numbers)


JSON_VALUES = [
    ("INT8", [127, 128, -129, 300], [127, -128, 127, 44]),
    ("UINT8", [255, 256, 2**64 - 1], [255, 0, 255]),
    ("INT64", [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
    ("UINT64", [0, 2**64 - 1], [0, 2**64 - 1]),
    ("FP32", [0.1, 1, 1e300, -(10**400)], [0.10000000149011612, 1.0, np.inf, -np.inf]),
    ("FP64", [0.1, 2**53 + 1, 10**400], [0.1, 2.0**53, np.inf]),
    ("BOOL", [True, False], [True, False]),
    ("INT32", [[1, [2]], 3], [1, 2, 3]),
    ("FP32", [], []),
]


@pytest.mark.parametrize(("datatype", "given", "expected"), JSON_VALUES)
def test_json_numbers_become_an_array_of_the_datatype(
    datatype: str, given: list[Any], expected: list[Any]
) -> None:
    values = read_values("x", datatype, given)
    assert isinstance(values, np.ndarray)
    assert values.dtype == DTYPES[datatype]
    assert values.tolist() == expected


@pytest.mark.parametrize(
    ("datatype", "given", "text"),
    [
        ("INT8", [1, 2.0], "non-signed-integer as signed-integer"),
        ("INT8", [True], "non-signed-integer as signed-integer"),
        ("INT64", [2**63], "non-signed-integer as signed-integer"),
        ("UINT64", [-1], "non-unsigned-integer as unsigned-integer"),
        ("UINT64", [2**64], "non-unsigned-integer as unsigned-integer"),
        ("FP32", ["1"], "non-number as double"),
        ("FP64", [True], "non-number as double"),
        ("BOOL", [1], "non-boolean as boolean"),
    ],
)
def test_json_values_of_another_type_are_refused(
    datatype: str, given: list[Any], text: str
) -> None:
    with pytest.raises(InferenceError, match=f"attempt to access JSON {text}"):
        read_values("x", datatype, given)

"""Random and damaged gRPC requests get a response or an error of Triton's form."""

import random
import struct

import pytest
from google.protobuf.message import DecodeError

from slipstream.repository.config import read_model_config
from slipstream.repository.problems import Problems
from slipstream.server.grpc.infer_messages import read_call, write_response
from slipstream.server.grpc.protocol import messages
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferResponse
from slipstream.server.kserve.shared_memory import SharedMemory

CONFIG = """
name: "m" max_batch_size: 4 backend: "python"
input [ { name: "a" data_type: TYPE_INT32 dims: [ -1 ] },
        { name: "b" data_type: TYPE_STRING dims: [ 2 ] optional: true },
        { name: "c" data_type: TYPE_FP16 dims: [ -1, 2 ] optional: true } ]
output [ { name: "o" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
DATATYPES = ["INT32", "BYTES", "FP16", "BOOL", "UINT64", "BF16", "", "NOPE"]
SIZES = [0, 1, 2, 3, -1, 2**31, 2**62, -(2**63)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "m"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(CONFIG)
    problems = Problems()
    found = read_model_config(folder, problems)
    assert not problems.errors
    return found


def raw(chance):
    kind = chance.randrange(4)
    if kind == 0:
        return chance.randbytes(chance.randrange(24))
    if kind == 1:
        return struct.pack("<I", chance.choice([0, 1, 5, 2**32 - 1])) + chance.randbytes(
            chance.randrange(8)
        )
    if kind == 2:
        return struct.pack("<2i", 1, 2)
    return b""


def random_request(chance):
    message = messages.ModelInferRequest(model_name="m", id=chance.choice(["", "x"]))
    if chance.random() < 0.5:  # starts with a valid part, so that the rest is read
        message.inputs.add(name="a", datatype="INT32", shape=[1, 2])
        message.raw_input_contents.append(struct.pack("<2i", 1, 2))
    for _ in range(chance.choice([0, 0, 1, 2, 3])):
        given = message.inputs.add(name=chance.choice("abcz"), datatype=chance.choice(DATATYPES))
        given.shape.extend(chance.choices(SIZES, k=chance.randrange(4)))
        if chance.random() < 0.3:
            given.contents.int_contents.extend(
                chance.choices([0, 7, -(2**31)], k=chance.randrange(4))
            )
        if chance.random() < 0.2:
            given.contents.bytes_contents.append(chance.randbytes(3))
        if chance.random() < 0.1:
            given.parameters["shared_memory_region"].string_param = "r"
        if chance.random() < 0.1:
            given.parameters["shared_memory_byte_size"].int64_param = chance.choice(SIZES)
        if chance.random() < 0.6:
            message.raw_input_contents.append(raw(chance))
    for name in ("priority", "sequence_id", "triton_x", "free", "timeout"):
        if chance.random() < 0.1:
            field, value = chance.choice(
                [("int64_param", -5), ("string_param", "s"), ("bool_param", True)]
            )
            setattr(message.parameters[name], field, value)
    if chance.random() < 0.3:
        output = message.outputs.add(name=chance.choice(["o", "p"]))
        output.parameters["classification"].int64_param = chance.choice(SIZES)
    return message


def damaged(chance, data):
    data = bytearray(data)
    for _ in range(chance.randrange(4)):
        if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[: len(data) - chance.randrange(2)])


def run(config, cases, seed):
    chance = random.Random(seed)
    memory = SharedMemory()
    counts = {"taken": 0, "refused": 0, "unreadable": 0}
    for number in range(cases):
        message = random_request(chance)
        if number % 3 == 0:
            try:
                message = messages.ModelInferRequest.FromString(
                    damaged(chance, message.SerializeToString())
                )
            except DecodeError:  # gRPC itself refuses these
                counts["unreadable"] += 1
                continue
        try:
            call = read_call(message, config, "1", memory)
            answer = InferResponse(list(call.request.inputs.values()))
            write_response(call, "m", "1", answer, config, memory).SerializeToString()
            counts["taken"] += 1
        except InferenceError:
            counts["refused"] += 1
    return counts


def test_a_few_thousand_damaged_requests(config):
    counts = run(config, 3000, seed=1)
    assert counts["taken"] > 0
    assert counts["refused"] > 1000


@pytest.mark.slow
def test_two_hundred_thousand_damaged_requests(config):
    counts = run(config, 200_000, seed=2)
    assert sum(counts.values()) == 200_000

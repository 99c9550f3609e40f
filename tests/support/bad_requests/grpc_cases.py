"""Wrong gRPC calls by class. `grpc_cases()` returns all of them, always the same.

A call is its method and the bytes of its messages, so that a message may be one that no library
writes.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bad_requests.http_cases import ADDSUB_BYTES, DATATYPES, NUMBERS, STRING_BYTES
from slipstream.server.grpc.protocol.messages import SERVICE, method_messages

SEED = 18
STREAM = "ModelStreamInfer"


@dataclass(frozen=True)
class GrpcCase:
    name: str  # class and number: `contents-12`
    method: str
    messages: tuple[bytes, ...]  # more than one for a stream only

    @property
    def group(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def path(self) -> str:
        return self.method if self.method.startswith("/") else f"/{SERVICE}/{self.method}"


Call = tuple[str, tuple[bytes, ...]]


def message(method: str, **fields: Any) -> Any:
    return method_messages(method)[0](**fields)


def call(method: str, **fields: Any) -> Call:
    return method, (message(method, **fields).SerializeToString(deterministic=True),)


def infer(given: Any) -> Call:
    return "ModelInfer", (given.SerializeToString(deterministic=True),)


def addsub() -> Any:
    given = message("ModelInfer", model_name="addsub", id="a")
    for name in ("INPUT0", "INPUT1"):
        given.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        given.raw_input_contents.append(ADDSUB_BYTES[:64])
    return given


def addsub_contents() -> Any:
    given = message("ModelInfer", model_name="addsub", id="a")
    for name in ("INPUT0", "INPUT1"):
        tensor = given.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        tensor.contents.int_contents.extend(NUMBERS)
    return given


def text(model: str = "echo", raw: bytes = b"\x01\x00\x00\x00a", shape: Any = (1,)) -> Any:
    given = message("ModelInfer", model_name=model)
    given.inputs.add(name="text_input", datatype="BYTES", shape=shape)
    given.raw_input_contents.append(raw)
    return given


# The field of InferTensorContents, and values that it takes.
CONTENTS: dict[str, list[Any]] = {
    "bool_contents": [True, False],
    "int_contents": [1, -1, 300, 70000],
    "int64_contents": [1, -(2**40)],
    "uint_contents": [1, 300, 70000],
    "uint64_contents": [1, 2**63],
    "fp32_contents": [1.5, 0.0],
    "fp64_contents": [1.5, 1e300],
    "bytes_contents": [b"a", b"bc"],
}
CHOICES: dict[str, list[Any]] = {
    "bool_param": [True, False],
    "int64_param": [0, 1, -1, 2**63 - 1],
    "uint64_param": [0, 1, 2**64 - 1],
    "double_param": [0.0, 1.5],
    "string_param": ["", "x", "1"],
}


def parameter_values() -> Iterator[dict[str, Any]]:
    """Yield each kind of parameter as its fields; none for a parameter without a value."""
    yield {}
    for choice, values in CHOICES.items():
        for value in values:
            yield {choice: value}


def set_parameter(parameters: Any, name: str, fields: dict[str, Any]) -> None:
    parameters[name].SetInParent()
    for choice, value in fields.items():
        setattr(parameters[name], choice, value)


RESERVED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")


def request_parameters(chooser: random.Random) -> Iterator[Call]:
    names = (*RESERVED, "mine", "triton_x", "triton_enable_empty_final_response", "")
    for model in ("echo", "seq"):
        for name in names:
            for fields in parameter_values():
                given = text(model, shape=(1, 1) if model == "seq" else (1,))
                if model == "seq":
                    given.parameters["sequence_id"].int64_param = 7
                    given.parameters["sequence_start"].bool_param = True
                    given.parameters["sequence_end"].bool_param = True
                set_parameter(given.parameters, name, fields)
                yield infer(given)


def tensor_parameters(chooser: random.Random) -> Iterator[Call]:
    region = {"shared_memory_region": {"string_param": "r"}}
    size = {"shared_memory_byte_size": {"int64_param": 8}}
    names = (*region, *size, "shared_memory_offset", "classification", "binary_data", "x")
    for name in names:
        for fields in parameter_values():
            for rest in ({}, {**region, **size}):
                given = text()
                target = given.inputs[0]
                _set_all(target.parameters, {**rest, name: fields})
                yield infer(given)
                given = text()
                target = given.outputs.add(name="text_output")
                _set_all(target.parameters, {**rest, name: fields})
                yield infer(given)


def _set_all(parameters: Any, given: dict[str, dict[str, Any]]) -> None:
    for name, fields in given.items():
        set_parameter(parameters, name, fields)


def contents(chooser: random.Random) -> Iterator[Call]:
    """Typed contents of each kind, for each datatype, with too few and too many values."""
    for datatype in DATATYPES:
        name = "i_string" if datatype == "BYTES" else f"i_{datatype.lower()}"
        for field, values in CONTENTS.items():
            for count in (0, 1, 2):
                given = message("ModelInfer", model_name="types")
                tensor = given.inputs.add(name=name, datatype=datatype, shape=[1])
                tensor.contents.SetInParent()
                getattr(tensor.contents, field).extend(values[:count])
                yield infer(given)
    for count in (0, 1, 15, 17):
        for raw in ((), (b"",), (ADDSUB_BYTES[:64],), (ADDSUB_BYTES[:64],) * 2):
            given = addsub_contents()
            for tensor in given.inputs:
                del tensor.contents.int_contents[:]
                tensor.contents.int_contents.extend([1] * count)
            given.raw_input_contents.extend(raw)
            yield infer(given)
    given = addsub_contents()
    given.inputs[0].contents.bytes_contents.append(b"a")
    yield infer(given)
    given = addsub()
    given.inputs[0].contents.int_contents.extend(NUMBERS)
    yield infer(given)


def raw_contents(chooser: random.Random) -> Iterator[Call]:
    """Raw contents with the wrong size or number, and strings whose lengths lie."""
    for count in (0, 1, 3, 4):
        for size in (0, 1, 63, 64, 65, 128):
            given = addsub()
            del given.raw_input_contents[:]
            given.raw_input_contents.extend([b"x" * size] * count)
            yield infer(given)
    for raw in STRING_BYTES:
        for shape in ([], [0], [1], [2], [1, 1], [-1]):
            yield infer(text(raw=raw, shape=shape))
            yield infer(text("ens", raw=raw, shape=shape))
    for datatype in DATATYPES:
        for size in (0, 1, 2, 3, 4, 8, 16):
            given = message("ModelInfer", model_name="types")
            name = "i_string" if datatype == "BYTES" else f"i_{datatype.lower()}"
            given.inputs.add(name=name, datatype=datatype, shape=[1])
            given.raw_input_contents.append(b"\x00" * size)
            yield infer(given)


def shapes(chooser: random.Random) -> Iterator[Call]:
    wrong: tuple[list[int], ...] = (
        *([], [0], [1], [16], [1, 15], [1, 17], [2, 8], [16, 1], [1, 1, 16], [0, 16], [9, 16]),
        *([-1, 16], [1, -1], [-1, -16], [2**31, 16], [1, 16, 1], [2**62, 4], [2**62, 0]),
        *([2**32, 2**32], [-(2**63), 1], [1, 2**63 - 1]),
    )
    for shape in wrong:
        for both in (False, True):
            given = addsub()
            del given.inputs[0].shape[:]
            given.inputs[0].shape.extend(shape)
            if both:
                del given.inputs[1].shape[:]
                given.inputs[1].shape.extend(shape)
            yield infer(given)
        yield infer(text(shape=shape))
        given = addsub_contents()
        del given.inputs[0].shape[:]
        given.inputs[0].shape.extend(shape)
        # The real server allocates whatever a shape asks for.
        if all(dim < 2**20 for dim in shape):
            yield infer(given)


def names(chooser: random.Random) -> Iterator[Call]:
    """Wrong names, versions and datatypes; missing, additional and repeated tensors."""
    versions = ("", "0", "1", "2", "-1", "abc", "1.5", " 1", "1 ", "01", "9" * 30, "0x1", "+1")
    described = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
    for model in ("", "addsub", "multiver", "nope", "llm", "oops", "ens", "a b"):
        for version in versions:
            given = addsub()
            given.model_name = model
            given.model_version = version
            yield infer(given)
            yield STREAM, (given.SerializeToString(deterministic=True),)
            for method in described:
                if method != "ModelStatistics" or model in ("nope", "a b"):
                    yield call(method, name=model, version=version)
    for name in ("", "INPUT1", "INPUT2", "input0", "x" * 300):
        given = addsub()
        given.inputs[0].name = name
        yield infer(given)
        given = addsub()
        given.outputs.add(name=name)
        yield infer(given)
        given = addsub_contents()
        given.inputs[0].name = name
        yield infer(given)
    for datatype in DATATYPES:
        given = addsub()
        given.inputs[0].datatype = datatype
        yield infer(given)
        given = addsub_contents()
        given.inputs[0].datatype = datatype
        yield infer(given)
    for count in (0, 1, 3, 4):
        given = addsub()
        del given.inputs[:]
        for number in range(count):
            given.inputs.add(name=f"INPUT{number}", datatype="INT32", shape=[1, 16])
        yield infer(given)
        given = addsub()
        for _ in range(count):
            given.outputs.add(name="OUTPUT0")
        yield infer(given)


def wire(chooser: random.Random) -> Iterator[Call]:
    """Messages cut short, with a byte changed, or that are no messages."""
    seeds = [addsub(), addsub_contents(), text(), text("seq", shape=(1, 1))]
    for given in seeds:
        whole = given.SerializeToString(deterministic=True)
        for end in sorted({1, len(whole) - 1, *chooser.sample(range(len(whole)), 20)}):
            yield "ModelInfer", (whole[:end],)
        for _ in range(60):
            at = chooser.randrange(len(whole))
            byte = bytes([chooser.randrange(256)])
            changed = whole[:at] + byte + whole[at + chooser.randrange(2) :]
            yield "ModelInfer", (changed,)
            if chooser.random() < 0.3:
                yield STREAM, (changed,)
    junk = (b"\x00", b"\xff", b"\x08", b"\x0a\x05abc", b"\x0a\x02\xff\xfe", b"\xf8\x07\x01")
    for method in METHODS:
        for data in (b"", *junk):
            yield method, (data,)


METHODS = (
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig"),
    *("ModelInfer", STREAM, "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
    *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
    *("TraceSetting", "LogSettings"),
)


def methods(chooser: random.Random) -> Iterator[Call]:
    """Methods and services that do not exist."""
    for path in ("Nope", "modelinfer", "ModelInferX", "", f"/{SERVICE}", "/x/ModelInfer", "/"):
        for data in (b"", b"\xff", addsub().SerializeToString(deterministic=True)):
            yield path if path.startswith("/") else f"/{SERVICE}/{path}", (data,)


def streams(chooser: random.Random) -> Iterator[Call]:
    """Wrong requests in a stream, before and after good ones."""
    good = text()
    good.id = "good"
    wrong = _wrong_requests()
    for given in wrong:
        given.id = "wrong"
        data = given.SerializeToString(deterministic=True)
        kept = good.SerializeToString(deterministic=True)
        yield STREAM, (data,)
        yield STREAM, (kept, data)
        yield STREAM, (data, kept, data)
    for command in ("error_first", "error_mid", "error_last", "zero", "two", "code:NOT_FOUND"):
        for model in ("oops", "ens"):
            raw = struct.pack("<I", len(command)) + command.encode()
            given = text(model, raw)
            yield STREAM, (given.SerializeToString(deterministic=True),)
            given.parameters["triton_enable_empty_final_response"].bool_param = True
            yield STREAM, (given.SerializeToString(deterministic=True),)
    yield STREAM, ()


def _wrong_requests() -> list[Any]:
    unknown = text("nope")
    version = text()
    version.model_version = "x"
    reserved = text()
    reserved.parameters["triton_x"].int64_param = 1
    shape = text(shape=[2])
    missing = text()
    del missing.raw_input_contents[:]
    sequence = text("seq", shape=(1, 1))
    started = text("seq", shape=(1, 1))
    started.parameters["sequence_id"].int64_param = 99
    output = text()
    output.outputs.add(name="nope")
    string = text(raw=b"\x09\x00\x00\x00a")
    return [unknown, version, reserved, shape, missing, sequence, started, output, string]


def settings(chooser: random.Random) -> Iterator[Call]:
    trace = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file")
    values: tuple[list[str], ...] = (
        *([], [""], ["x"], ["OFF"], ["TIMESTAMPS"], ["OFF", "x"], ["TENSORS", "TIMESTAMPS"]),
        *(["0"], ["-1"], ["-2"], ["1.5"], ["99999999999"], ["1", "2"], [" 1"], ["1x"]),
    )
    for model in ("", "echo", "nope"):
        for name in (*trace, "trace_mode", "unknown"):
            for value in values:
                given = message("TraceSetting", model_name=model)
                given.settings[name].value.extend(value)
                yield "TraceSetting", (given.SerializeToString(deterministic=True),)
                if model != "nope":
                    yield _restored_traces(model)
    log = ("log_file", "log_info", "log_warning", "log_error", "log_format", "unknown")
    fields = [{}, {"bool_param": True}, {"bool_param": False}, {"uint32_param": 1}]
    fields += [{"string_param": value} for value in ("", "x", "default", "ISO8601", "true")]
    for name in (*log, "log_verbose_level"):
        for chosen in fields:
            if name == "log_verbose_level" and chosen == {"uint32_param": 1}:
                continue  # fills the log
            given = message("LogSettings")
            set_parameter(given.settings, name, chosen)
            yield "LogSettings", (given.SerializeToString(deterministic=True),)
            yield _restored_log()


def _restored_traces(model: str) -> Call:
    given = message("TraceSetting", model_name=model)
    for name in ("trace_level", "trace_rate", "trace_count", "log_frequency"):
        given.settings[name].SetInParent()
    return "TraceSetting", (given.SerializeToString(deterministic=True),)


def _restored_log() -> Call:
    given = message("LogSettings")
    for name in ("log_info", "log_warning", "log_error"):
        given.settings[name].bool_param = True
    given.settings["log_format"].string_param = "default"
    return "LogSettings", (given.SerializeToString(deterministic=True),)


def shared_memory(chooser: random.Random) -> Iterator[Call]:
    for name in ("", "r"):
        for key in ("", "absent", "/absent", "../absent", "/", "a/b"):
            for offset, size in ((0, 0), (0, 8), (2**63, 8), (0, 2**64 - 1)):
                fields = {"name": name, "key": key, "offset": offset, "byte_size": size}
                yield call("SystemSharedMemoryRegister", **fields)
        for handle in (b"", b"x", b"x" * 64):
            for device, size in ((0, 0), (0, 8), (-1, 8), (99, 2**64 - 1)):
                fields = {"raw_handle": handle, "device_id": device, "byte_size": size}
                yield call("CudaSharedMemoryRegister", name=name, **fields)
        for kind in ("System", "Cuda"):
            yield call(f"{kind}SharedMemoryStatus", name=name)
            yield call(f"{kind}SharedMemoryUnregister", name=name)


def repository(chooser: random.Random) -> Iterator[Call]:
    """Parameters of load and unload that are no parameters. None of them loads a model."""
    for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
        for where in ("", "x"):
            yield call(method, model_name="nope", repository_name=where)
            yield call(method, model_name="", repository_name=where)
    yield call("RepositoryIndex", repository_name="x")
    choices: list[dict[str, Any]] = [{}, {"bool_param": True}, {"int64_param": 1}]
    choices += [{"string_param": value} for value in ("", "x", "{", "[]", '{"name": "x"}')]
    choices += [{"bytes_param": value} for value in (b"", b"x")]
    for fields in choices:
        for name in ("config", "file:1/model.py", "file:", "other"):
            given = message("RepositoryModelLoad", model_name="spare")
            set_parameter(given.parameters, name, fields)
            yield "RepositoryModelLoad", (given.SerializeToString(deterministic=True),)
        for name in ("unload_dependents", "other"):
            given = message("RepositoryModelUnload", model_name="nope")
            set_parameter(given.parameters, name, fields)
            yield "RepositoryModelUnload", (given.SerializeToString(deterministic=True),)


GROUPS = (
    *(request_parameters, tensor_parameters, contents, raw_contents, shapes, names, wire),
    *(methods, streams, settings, shared_memory, repository),
)


def grpc_cases() -> list[GrpcCase]:
    """Return all calls: about 2,500, in a fixed order."""
    cases = []
    for group in GROUPS:
        chooser = random.Random(f"{SEED}{group.__name__}")
        seen: set[Call] = set()
        for found in group(chooser):
            if found in seen and group is not settings:
                continue
            seen.add(found)
            cases.append(GrpcCase(f"{group.__name__}-{len(cases)}", *found))
    return cases

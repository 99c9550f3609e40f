"""Answers to wrong requests that differ from Triton's on purpose.

The first entry that fits a request counts. Each entry must be needed.
"""

from __future__ import annotations

from bad_requests.recordings import CRASH, Difference

_DEEP = "JSON nested deeper than 400 levels is refused"
_TRACE = "trace settings may be numbers, the level a string"
_EMPTY = "an empty header counts as absent"
_CASE = "encodings are compared without case"
_DAMAGED = "a damaged compressed body is refused"
_LARGE = "dimensions of 2⁶³ and more are refused"
_EXACT = "sizes are compared exactly"
_BATCH = "a batch of 0 is refused before the model"
_NAMED = "names the last input"
_PARAMETERS = "gRPC parameters may have any type of the protocol"
_VALUES = "values that the datatype cannot hold are refused"
_CLASSES = "classes of a BYTES output are refused"
_CUDA = "CUDA shared memory is not supported"
_NUL = "an error has the whole name"
_FILES = "files outside of the model's folder are named"

_UNSIGNED = "500 Unable to parse 'shape': attempt to access JSON non-unsigned-integer"
_MISMATCH = "input byte size mismatch for input 'INPUT"
_NO_ID = "[request id: <id_unknown>]"

HTTP_DIFFERENCES = (
    Difference("nesting", "", "500 failed to parse the request JSON buffer: More than 400", _DEEP),
    Difference("settings", "500 attempt to access JSON non-", '200 {"trace_level"', _TRACE),
    Difference("settings", "500 attempt to access JSON non-", "400 Unable to parse '", _TRACE),
    Difference("encodings", "400 Unsupported content-encoding", "", _EMPTY),
    Difference("encodings", "501 Unsupported compression type", "500 failed to parse", _EMPTY),
    Difference("encodings", "501 Unsupported compression type", "", _CASE),
    Difference("encodings", "200 ", "400 the request's body is not ", _DAMAGED),
    Difference("encodings", f"400 {_NO_ID} Raw", "400 the request's body is not ", _DAMAGED),
    Difference("lying_lengths", f"400 {_NO_ID} Raw", "400 unexpected size for input", _EMPTY),
    Difference("lying_lengths", '200 {"model_name":"raw1"', "500 failed to parse", _EMPTY),
    Difference("infer_values", "", _UNSIGNED, _LARGE),
    Difference("shapes", "", _UNSIGNED, _LARGE),
    Difference("infer_values", "500 batch size 16", f"400 {_NO_ID} {_MISMATCH}", _BATCH),
    Difference("infer_values", f"400 {_NO_ID} {_MISMATCH}", f"400 {_NO_ID} inference", _EXACT),
    Difference("shapes", "400 [request id: a]", "500 Unable to parse 'data': Shape", _EXACT),
    Difference(
        "shapes", "400 [request id: a] unexpected shape", "400 [request id: a] inference", _EXACT
    ),
    Difference(
        "generate_values",
        "400 [request id: g] input 'random_seed' batch size does not match",
        "400 [request id: g] input byte size mismatch for input 'random_seed'",
        _NAMED,
    ),
)

_WRONG_TYPE = "INVALID_ARGUMENT invalid value type for"
_A = "INVALID_ARGUMENT [request id: a]"

GRPC_DIFFERENCES = (
    Difference("request_parameters", _WRONG_TYPE, "OK model_name", _PARAMETERS),
    Difference(
        "request_parameters", _WRONG_TYPE, "INVALID_ARGUMENT inference request to", _PARAMETERS
    ),
    Difference("tensor_parameters", CRASH, "INVALID_ARGUMENT class result not", _CLASSES),
    Difference(
        "contents", "INVALID_ARGUMENT [request", "INVALID_ARGUMENT input tensor 'i_uint8'", _VALUES
    ),
    Difference("shapes", "INTERNAL batch size 16", f"{_A} {_MISMATCH}", _BATCH),
    Difference("shapes", f"{_A} unexpected shape", f"{_A} inference request batch-size", _EXACT),
    Difference("shapes", f"{_A} {_MISMATCH}", f"{_A} inference request batch-size", _EXACT),
    Difference("shapes", f"{_A} unexpected shape", f"{_A} input 'INPUT0' batch size", _EXACT),
    Difference("wire", "NOT_FOUND Request for", "NOT_FOUND Request for", _NUL),
    Difference("shared_memory", "INVALID_ARGUMENT failed to register", "UNIMPLEMENTED cuda", _CUDA),
    Difference(
        "repository", "INTERNAL failed to load", "INVALID_ARGUMENT the file 'file:'", _FILES
    ),
)

"""Wrong HTTP requests by class. `http_cases()` returns all of them, always the same."""

from __future__ import annotations

import gzip
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bad_requests.json_mutants import WRONG_VALUES, mutants, nested, write

SEED = 18
MODELS_PATH = "/v2/models"


@dataclass(frozen=True)
class HttpCase:
    name: str  # class and number: `truncated-12`
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes | None

    @property
    def group(self) -> str:
        return self.name.rpartition("-")[0]


Headers = tuple[tuple[str, str], ...]
Request = tuple[str, str, Headers, bytes | None]


def post(path: str, body: bytes, *headers: tuple[str, str]) -> Request:
    return "POST", path, headers, body


def infer(model: str, document: Any, *headers: tuple[str, str]) -> Request:
    return post(f"{MODELS_PATH}/{model}/infer", write(document), *headers)


def binary_infer(model: str, document: Any, raw: bytes, length: object = None) -> Request:
    """Return a request with raw tensors. `length`: the header's length, where it lies."""
    text = write(document)
    given = len(text) if length is None else length
    return post(
        f"{MODELS_PATH}/{model}/infer", text + raw, ("Inference-Header-Content-Length", str(given))
    )


NUMBERS = list(range(16))


def addsub() -> dict[str, Any]:
    return {
        "id": "a",
        "parameters": {"priority": 0, "timeout": 0, "binary_data_output": False, "mine": "x"},
        "inputs": [
            {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": NUMBERS},
            {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "data": NUMBERS},
        ],
        "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": False, "classification": 2}}],
    }


def addsub_binary() -> dict[str, Any]:
    tensor = {"shape": [1, 16], "datatype": "INT32", "parameters": {"binary_data_size": 64}}
    return {"inputs": [{"name": "INPUT0", **tensor}, {"name": "INPUT1", **tensor}]}


ADDSUB_BYTES = struct.pack("<32i", *NUMBERS, *NUMBERS)


def echo(**members: Any) -> dict[str, Any]:
    tensor = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
    return {"inputs": [{**tensor, **members}]}


def echo_binary(size: int, shape: list[int]) -> dict[str, Any]:
    tensor = {"name": "text_input", "shape": shape, "datatype": "BYTES"}
    return {"inputs": [{**tensor, "parameters": {"binary_data_size": size}}]}


def sequence(**parameters: Any) -> dict[str, Any]:
    tensor = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
    return {"parameters": parameters, "inputs": [tensor]}


def shared(**parameters: Any) -> dict[str, Any]:
    tensor = {"name": "text_input", "shape": [2], "datatype": "BYTES"}
    return {"inputs": [{**tensor, "parameters": parameters}]}


GENERATE = {"text_input": "a b", "max_tokens": 2, "id": "g", "parameters": {"temperature": 1}}


def infer_values(chooser: random.Random) -> Iterator[Request]:
    for model, whole in (("addsub", addsub()), ("echo", echo())):
        for document in mutants(whole):
            if not _is_huge(document):
                yield infer(model, document)
    for document in mutants(addsub_binary()):
        yield binary_infer("addsub", document, ADDSUB_BYTES)


def _is_huge(document: Any) -> bool:
    """Return whether a shape has gigabytes: the real server allocates them for JSON data."""
    return f"[{2**31}" in str(document) or f" {2**31}]" in str(document)


def infer_documents(chooser: random.Random) -> Iterator[Request]:
    """A document that is not an object, for each kind of value."""
    for value in WRONG_VALUES:
        yield infer("addsub", value)
        yield infer("raw1", value)
        yield post(f"{MODELS_PATH}/llm/generate", write(value))
        yield post(f"{MODELS_PATH}/llm_nd/generate_stream", write(value))


def generate_values(chooser: random.Random) -> Iterator[Request]:
    for document in mutants(GENERATE):
        yield post(f"{MODELS_PATH}/llm_nd/generate", write(document))
    for value in WRONG_VALUES:
        for name in ("top_k", "temperature", "random_seed", "stream", "stop_words", "unknown"):
            document = {**GENERATE, name: value}
            yield post(f"{MODELS_PATH}/llm_nd/generate_stream", write(document))
    for text in ("error_first", "zero", "two", "code:NOT_FOUND", "code:INVALID_ARG"):
        for model in ("oops", "ens", "oops_nd"):
            body = write({"text_input": text})
            yield post(f"{MODELS_PATH}/{model}/generate", body)
            yield post(f"{MODELS_PATH}/{model}/generate_stream", body)


def truncated(chooser: random.Random) -> Iterator[Request]:
    """Bodies that end early, from nothing to all but one byte."""
    for path, body in _bodies():
        for end in sorted({0, 1, 2, len(body) - 1, *chooser.sample(range(len(body)), 8)}):
            yield post(path, body[:end])
    whole = write(addsub_binary())
    for end in range(0, len(ADDSUB_BYTES), 9):
        yield binary_infer("addsub", addsub_binary(), ADDSUB_BYTES[:end])
        yield post(f"{MODELS_PATH}/addsub/infer", whole[:end])


def _bodies() -> list[tuple[str, bytes]]:
    return [
        (f"{MODELS_PATH}/addsub/infer", write(addsub())),
        (f"{MODELS_PATH}/echo/infer", write(echo())),
        (f"{MODELS_PATH}/llm_nd/generate", write(GENERATE)),
        (f"{MODELS_PATH}/llm/generate_stream", write(GENERATE)),
        ("/v2/trace/setting", write({"trace_rate": "1000", "trace_level": ["OFF"]})),
        (f"{MODELS_PATH}/echo/trace/setting", write({"log_frequency": "0"})),
        ("/v2/logging", write({"log_info": True, "log_format": "default"})),
        ("/v2/systemsharedmemory/region/r/register", write(SYSTEM_REGION)),
        ("/v2/cudasharedmemory/region/r/register", write(CUDA_REGION)),
        ("/v2/repository/index", write({"ready": True})),
        ("/v2/repository/models/spare/load", write({"parameters": {"other": "x"}})),
        ("/v2/repository/models/nope/unload", write({"parameters": {"unload_dependents": True}})),
    ]


SYSTEM_REGION = {"key": "/absent", "offset": 0, "byte_size": 64}
CUDA_REGION = {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64}


def broken_text(chooser: random.Random) -> Iterator[Request]:
    """JSON with one byte removed, replaced or inserted."""
    pieces = b'{}[]":,\\\x00\x01\x1f\xff\x80 -+.eE01truefalsenullNaN/\xed\xa0\x80'
    bodies = _bodies()
    for _ in range(400):
        path, body = chooser.choice(bodies[:8])
        at = chooser.randrange(len(body))
        piece = bytes([chooser.choice(pieces)])
        kept = chooser.randrange(2)
        inserted = chooser.choice((b"", piece, piece))
        yield post(path, body[:at] + inserted + body[at + kept :])
    for text in (b"\xef\xbb\xbf{}", b"{} x", b"nul", b"[1,]", b'{"a":1,}', b'{"a" 1}', b"{a:1}"):
        yield post(f"{MODELS_PATH}/addsub/infer", text)
        yield post(f"{MODELS_PATH}/llm/generate", text)
    for number in ("1e400", "-1e400", "01", "1.", ".5", "-", "+1", "1e", "0x1", "NaN", "Infinity"):
        text = b'{"text_input": "a", "max_tokens": ' + number.encode() + b"}"
        yield post(f"{MODELS_PATH}/llm_nd/generate", text)
    for text in (r"\ud800", r"\udc00", r"\ud800\u0041", r"\u12", r"\x", r"\u0000", "\t", "\u007f"):
        body = b'{"text_input": "' + text.encode() + b'", "max_tokens": 1}'
        yield post(f"{MODELS_PATH}/llm_nd/generate", body)


def lying_lengths(chooser: random.Random) -> Iterator[Request]:
    """Header lengths, binary sizes and lengths of strings that do not fit the data."""
    text = len(write(addsub_binary()))
    for length in (-1, 0, 1, text - 1, text + 1, text + 128, text + 129, 2**31, 2**63, 2**64):
        yield binary_infer("addsub", addsub_binary(), ADDSUB_BYTES, length)
        yield binary_infer("raw1", {}, b"abc", length)
    for word in ("abc", "", " 12", "1.5", "0x10", "1e2", "12abc", "-", "+5", "--1"):
        yield binary_infer("addsub", addsub_binary(), ADDSUB_BYTES, word)
        yield binary_infer("raw1", {}, b"abc", word)
    for size in (-1, 0, 1, 63, 65, 128, 2**31, 2**62, 2**63 - 1, 2**63, 2**64):
        document = addsub_binary()
        document["inputs"][0]["parameters"]["binary_data_size"] = size
        yield binary_infer("addsub", document, ADDSUB_BYTES)
        document["inputs"][1]["parameters"]["binary_data_size"] = size
        yield binary_infer("addsub", document, ADDSUB_BYTES)
    for raw in STRING_BYTES:
        for shape in ([1], [2], [0], [1, 1], []):
            yield binary_infer("echo", echo_binary(len(raw), shape), raw)
    for extra in (b"x", b"x" * 64):
        yield binary_infer("addsub", addsub_binary(), ADDSUB_BYTES + extra)
        yield infer("addsub", addsub_binary())


STRING_BYTES = [
    b"",
    b"\x01",
    b"\x01\x00\x00",
    b"\x00\x00\x00\x00",
    b"\x01\x00\x00\x00",
    b"\x01\x00\x00\x00a",
    b"\x01\x00\x00\x00ab",
    b"\x02\x00\x00\x00a",
    b"\xff\xff\xff\xffa",
    b"\x00\x00\x00\x80",
    b"\x01\x00\x00\x00a\x01\x00\x00\x00b",
    b"\x01\x00\x00\x00a\x01\x00\x00",
    b"\x01\x00\x00\x00a\x02\x00\x00\x00b",
    b"\x01\x00\x00\x00a\x01\x00\x00\x00b\x00",
]

DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BF16", "BYTES", "STRING", "INVALID", "fp32", ""),
)


def datatypes(chooser: random.Random) -> Iterator[Request]:
    """Each input of `types` with each datatype and with values of each kind."""
    names = [name for name in DATATYPES if name in _INPUT_OF_TYPE]
    for name in names:
        for value in (True, 1, -1, 300, 1.5, "a", None, [], [[1], [2]], {}, 2**64):
            if name in ("FP32", "FP64") and value == 2**64:
                continue  # rapidjson does not write the nearest digits of some large numbers
            tensor = {"name": _INPUT_OF_TYPE[name], "shape": [1], "datatype": name}
            yield infer("types", {"inputs": [{**tensor, "data": [value]}]})
    for datatype in DATATYPES:
        tensor = {"name": "i_int32", "shape": [1], "datatype": datatype}
        yield infer("types", {"inputs": [{**tensor, "data": [1]}]})
        sized = {**tensor, "parameters": {"binary_data_size": 4}}
        yield binary_infer("types", {"inputs": [sized]}, b"\x01\x00\x00\x00")


_INPUT_OF_TYPE = {
    **{name: f"i_{name.lower()}" for name in DATATYPES[:12]},
    "BYTES": "i_string",
}


def shapes(chooser: random.Random) -> Iterator[Request]:
    wrong: tuple[list[Any], ...] = (
        *([], [0], [1], [16], [1, 15], [1, 17], [2, 8], [16, 1], [1, 1, 16], [0, 16], [9, 16]),
        *([-1, 16], [1, -1], [-1, -16], [2**31, 16], [2**32, 2**32], [2**63, 1], [1, 16, 1]),
        *([1.0, 16], ["1", 16], [None, 16], [[1], 16], [True, 16], [2**62, 0]),
    )
    for shape in wrong:
        document = addsub()
        document["inputs"][0]["shape"] = shape
        if not _is_huge(shape):
            yield infer("addsub", document)
            document["inputs"][1]["shape"] = shape
            yield infer("addsub", document)
        binary = addsub_binary()
        binary["inputs"][0]["shape"] = shape
        yield binary_infer("addsub", binary, ADDSUB_BYTES)
        yield infer("echo", echo(shape=shape))
    for count in (0, 1, 15, 17, 32):
        document = addsub()
        document["inputs"][0]["data"] = [0] * count
        yield infer("addsub", document)
        yield infer("echo", echo(shape=[count]))


def encodings(chooser: random.Random) -> Iterator[Request]:
    body = write(addsub())
    forms: dict[str, Callable[[bytes], bytes]] = {
        "plain": bytes,
        "gzip": lambda data: gzip.compress(data, mtime=0),
        "deflate": zlib.compress,
        "cut": lambda data: gzip.compress(data, mtime=0)[:-9],
        "longer": lambda data: gzip.compress(data, mtime=0) + b"more",
    }
    names = ("gzip", "deflate", "br", "identity", "GZIP", "x-gzip", "garbage", "", "gzip, deflate")
    paths = (
        f"{MODELS_PATH}/addsub/infer",
        f"{MODELS_PATH}/llm_nd/generate",
        f"{MODELS_PATH}/llm/generate_stream",
        "/v2/logging",
        "/v2/repository/index",
    )
    for path in paths:
        for name in names:
            for form in forms.values():
                yield post(path, form(body), ("Content-Encoding", name))
    for name in (*names, "*", "gzip;q=0", "br;q=1, gzip;q=0.5"):
        yield post(paths[0], b"{}", ("Accept-Encoding", name))
        yield post(paths[1], b"{}", ("Accept-Encoding", name))


def nesting(chooser: random.Random) -> Iterator[Request]:
    for depth in (1, 2, 3, 16, 64, 126, 127, 128, 129, 130, 200, 500):
        for kind in "[{":
            inner = nested(depth, kind)
            yield post(f"{MODELS_PATH}/addsub/infer", inner)
            whole = write(addsub())
            yield post(f"{MODELS_PATH}/addsub/infer", b'{"unknown":' + inner + b"," + whole[1:])
            data = whole.replace(write(NUMBERS), inner, 1)
            yield post(f"{MODELS_PATH}/addsub/infer", data)
            for key in (b"unknown", b"text_input", b"parameters", b"max_tokens"):
                body = b'{"max_tokens":1,"' + key + b'":' + inner + b',"text_input":"a"}'
                yield post(f"{MODELS_PATH}/llm_nd/generate", body)
            for path in ("/v2/logging", "/v2/trace/setting", "/v2/repository/index"):
                yield post(path, b'{"unknown":' + inner + b"}")


def routes(chooser: random.Random) -> Iterator[Request]:
    methods = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
    for path in _ROUTES:
        for method in methods:
            body = b"{}" if method in ("POST", "PUT", "PATCH") else None
            yield method, path, (), body


_ROUTES = (
    *("/v2/health/live", "/v2/health/ready", "/v2/health/x", "/v2/models", "/v2/models/"),
    *("/v2/", "/v3", "/v2/models/nope", "/v2/models/addsub/nope", "/v2/models/addsub/infer/x"),
    *("/v2/models/addsub/versions", "/v2/models/addsub/versions/", "/v2/models/addsub/versions/x"),
    *("/v2/models/addsub/versions/0", "/v2/models/addsub/versions/-1"),
    "/v2/models/addsub/versions/2/infer",
    *("/v2/models/multiver/versions/2", "/v2/models/multiver/versions/2/ready"),
    *("/v2/models/multiver/versions/2/generate", "/v2/models/multiver/versions/2/config"),
    *("/v2/models/multiver/versions/2/stats", "/v2/models/multiver/versions/99999999999999999999"),
    "/v2/models/multiver/versions/99999999999999999999/infer",
    "/v2/models/multiver/versions/9223372036854775808/generate",
    *("/v2/models/nope/infer", "/v2/models/nope/generate", "/v2/models/nope/generate_stream"),
    *("/v2/models/nope/ready", "/v2/models/nope/config", "/v2/models/nope/stats"),
    *("/v2/models/nope/trace/setting", "/v2/models/nope/versions/1/stats"),
    *("/v2/models//infer", "/v2/models/a%20b/infer", "/v2/models/addsub/infer?x=1"),
    *("/v2/models/llm/infer", "/v2/models/oops/infer", "/v2/models/ens/infer"),
    *("/v2/repository", "/v2/repository/", "/v2/repository/x/index", "/v2/repository/index/x"),
    *("/v2/repository/x/models/spare/load", "/v2/repository/models/nope/load"),
    *("/v2/repository/models/nope/unload", "/v2/repository/models/nope/reload"),
    *("/v2/repository/models//load", "/v2/trace", "/v2/trace/settings", "/v2/logging/x"),
    *("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/nope/status"),
    *("/v2/systemsharedmemory/register", "/v2/systemsharedmemory/region//register"),
    *("/v2/systemsharedmemory/region/nope/unregister", "/v2/systemsharedmemory/unregister"),
    *("/v2/cudasharedmemory/status", "/v2/cudasharedmemory/region/nope/status"),
    *("/v2/cudasharedmemory/register", "/v2/cudasharedmemory/region/nope/unregister"),
    *("/v2/othersharedmemory/status", "/v2/systemsharedmemory/region/nope"),
)


def settings(chooser: random.Random) -> Iterator[Request]:
    """Trace and log settings, each followed by a request that restores them."""
    trace = {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
    }
    values = (*WRONG_VALUES, ["OFF"], ["TIMESTAMPS"], ["TENSORS", "x"], "-2", "99999999999", "1.5")
    for path in ("/v2/trace/setting", f"{MODELS_PATH}/echo/trace/setting"):
        for name in (*trace, "trace_file", "trace_mode", "unknown"):
            for value in values:
                yield post(path, write({name: value}))
                yield post(path, write(dict.fromkeys(trace)))
    for value in WRONG_VALUES:
        yield post(f"{MODELS_PATH}/nope/trace/setting", write(value))
        yield post("/v2/trace/setting", write(value))
        yield post("/v2/logging", write(value))
    for name in ("log_info", "log_warning", "log_error", "log_file", "log_format", "unknown"):
        for value in (*WRONG_VALUES, "ISO8601", "iso8601"):
            yield post("/v2/logging", write({name: value}))
            yield post("/v2/logging", write(LOG_DEFAULTS))
    for value in (*[value for value in WRONG_VALUES if value not in (1, 2**31)], 2**32):
        yield post("/v2/logging", write({"log_verbose_level": value}))
        yield post("/v2/logging", write(LOG_DEFAULTS))


LOG_DEFAULTS = {
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


def shared_memory(chooser: random.Random) -> Iterator[Request]:
    for kind, document in (("system", SYSTEM_REGION), ("cuda", CUDA_REGION)):
        for changed in mutants(document):
            yield post(f"/v2/{kind}sharedmemory/region/r/register", write(changed))
        for value in WRONG_VALUES:
            yield post(f"/v2/{kind}sharedmemory/region/r/register", write(value))
        for body in (b"", b"{}", b"x"):
            yield post(f"/v2/{kind}sharedmemory/region/r/unregister", body)
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 10}
    for changed in mutants({**region, "shared_memory_offset": 0}):
        yield infer("echo", shared(**changed))
        outputs = [{"name": "text_output", "parameters": changed}]
        yield infer("echo", {**echo(), "outputs": outputs})


def sequences(chooser: random.Random) -> Iterator[Request]:
    for name in ("sequence_id", "sequence_start", "sequence_end"):
        for value in WRONG_VALUES:
            rest = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
            yield infer("seq", sequence(**{**rest, name: value}))
    yield infer("seq", sequence())
    yield infer("seq", sequence(sequence_id=8))
    yield infer("seq", sequence(sequence_id=8, sequence_end=True))
    yield infer("seq", sequence(sequence_id="s"))
    yield infer("addsub", {**addsub(), "parameters": {"sequence_id": 5}})
    for name in ("priority", "timeout", "triton_x", "triton_enable_empty_final_response"):
        for value in WRONG_VALUES:
            yield infer("echo", {**echo(), "parameters": {name: value}})


def repository(chooser: random.Random) -> Iterator[Request]:
    """Parameters of load and unload that are no parameters. None of them loads a model."""
    load = "/v2/repository/models/spare/load"
    for value in WRONG_VALUES:
        yield post("/v2/repository/models/nope/load", write(value))
        yield post("/v2/repository/models/nope/unload", write(value))
        yield post("/v2/repository/models/nope/unload", write({"parameters": value}))
        unload = {"parameters": {"unload_dependents": value}}
        yield post("/v2/repository/models/nope/unload", write(unload))
        yield post("/v2/repository/index", write({"ready": value}))
        yield post("/v2/repository/index", write(value))
        if value is not None:
            yield post(load, write({"parameters": {"config": value}}))
            yield post(load, write({"parameters": {"file:1/model.py": value}}))
        if not isinstance(value, dict) and value is not None:
            yield post(load, write({"parameters": value}))
            yield post(load, write({"parameters": {"other": value}}))
    for config in ('{"backend": 1}', '{"name": "x"}', "[]", "{", '{"max_batch_size": "x"}'):
        yield post(load, write({"parameters": {"config": config}}))
    yield post(load, write({"parameters": {"file:1/model.py": "AAAA"}}))


GROUPS = (
    *(infer_values, infer_documents, generate_values, truncated, broken_text, lying_lengths),
    *(datatypes, shapes, encodings, nesting, routes, settings, shared_memory, sequences),
    repository,
)


def http_cases() -> list[HttpCase]:
    """Return all requests: about 4,000, in a fixed order."""
    cases = []
    for group in GROUPS:
        chooser = random.Random(f"{SEED}{group.__name__}")
        seen: set[Request] = set()
        for request in group(chooser):
            # requests that restore settings are sent again and again
            if request in seen and group is not settings:
                continue
            seen.add(request)
            cases.append(HttpCase(f"{group.__name__}-{len(cases)}", *request))
    return cases

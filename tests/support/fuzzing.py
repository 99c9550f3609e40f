"""Sends damaged requests to a server and checks that it keeps answering.

A concurrent stream must not be disturbed, and the server's memory must not grow.
"""

from __future__ import annotations

import json
import random
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from http_support import Answer, Connection, request_bytes

from slipstream.repository.config import read_model_config
from slipstream.repository.problems import Problems
from slipstream.server.grpc.protocol import messages
from slipstream.server.grpc.transport import INTERNAL

REPOSITORIES = Path(__file__).parents[1] / "conformance" / "repos"
HEADER = "Inference-Header-Content-Length"
MODELS = ("ensemble", "tensorrt_llm", "tensorrt_llm_bls", "preprocessing", "postprocessing", "echo")
METHODS = (
    "ModelInfer",
    "ModelInfer",
    "ModelInfer",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "TraceSetting",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "SystemSharedMemoryRegister",
    "ServerReady",
)
NEVER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)

PIECES = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"null",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b'"shape"',
    b" ",
    b'"data"',
    b'"parameters"',
    b'"binary_data_size"',
    b'"BYTES"',
    b'"FP16"',
    b"\xff",
    b"\x00",
    b"true",
    b"7",
]


def damaged(body: bytes, chance: random.Random) -> bytes:
    text = bytearray(body)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        place = chance.randint(0, len(text))
        if chance.random() < 0.5:
            text[place:place] = chance.choice(PIECES)
        else:
            del text[place : place + chance.randint(1, 12)]
    return bytes(text)


ROUTES = (
    "generate",
    "generate_stream",
    "infer",
    "config",
    "ready",
    "stats",
    "trace/setting",
    "versions/1/infer",
    "",
)
VALUES = (
    0,
    1,
    -1,
    7,
    2**31,
    2**63,
    -(2**63),
    1.5,
    1e308,
    True,
    None,
    "",
    "5",
    "x" * 300,
    "\ud800",
    [],
    [1, [2]],
    {},
)
TEXT = {
    "text_input": "5 6",
    "max_tokens": 4,
    "stream": False,
    "temperature": 1.0,
    "top_k": 1,
    "stop_words": "9",
}
IDS = struct.pack("<3i", 5, 6, 7)


def text_body(chance: random.Random) -> bytes:
    """Return a generate body with one field changed or renamed, at times with damaged JSON."""
    document: dict[str, Any] = dict(TEXT)
    name = chance.choice(
        [*document, "beam_width", "random_seed", "end_id", "id", "parameters", "top_p", "bad_words"]
    )
    document[name] = chance.choice(VALUES)
    body = json.dumps(document).encode()
    return damaged(body, chance) if chance.random() < 0.5 else body


def tensor_body(chance: random.Random) -> tuple[bytes, int]:
    """Return an infer request with binary tensors and damage in its header, data or lengths."""
    raw = [IDS, struct.pack("<i", 3), struct.pack("<i", 4)]
    names = ("input_ids", "input_lengths", "request_output_len")
    inputs: list[dict[str, Any]] = [
        {
            "name": name,
            "datatype": "INT32",
            "shape": [1, len(data) // 4],
            "parameters": {"binary_data_size": len(data)},
        }
        for name, data in zip(names, raw, strict=True)
    ]
    given = chance.choice(inputs)
    member = chance.choice(["name", "datatype", "shape", "data"])
    given[member] = chance.choice([*VALUES, [1, 3], [-1], [2**40], "BYTES"])
    header = json.dumps({"id": "f", "inputs": inputs}).encode()
    if chance.random() < 0.3:
        header = damaged(header, chance)
    tail = b"".join(raw)[: chance.choice([20, 20, 20, 19, 4, 0])] + chance.choice(
        [b"", b"", b"\xff"]
    )
    return header + tail, chance.choice([len(header)] * 6 + [0, -1, len(header) + 1, 2**63])


def http_request(chance: random.Random) -> bytes:
    model = chance.choice([*MODELS, "nope"])
    route = chance.choice(ROUTES)
    path = f"/v2/models/{model}/{route}".rstrip("/")
    usual = "GET" if route in ("config", "ready", "stats", "") else "POST"
    method = usual if chance.random() < 0.95 else chance.choice(["GET", "POST", "PUT", "DELETE"])
    if "infer" in route:
        body, size = tensor_body(chance)
        return request_bytes(
            method, path, [[HEADER, str(size)]] if chance.random() < 0.9 else [], body
        )
    written = request_bytes(method, path, [], text_body(chance))
    if chance.random() < 0.02:  # the request line and the headers too
        head, mark, rest = written.partition(b"\r\n\r\n")
        written = damaged(head, chance) + mark + rest
    return written


def grpc_message(chance: random.Random) -> bytes:
    message = messages.ModelInferRequest(model_name=chance.choice(MODELS), id="g")
    for name, datatype, raw in (
        ("text_input", "BYTES", b"\x03\0\0\x005 6"),
        ("max_tokens", "INT32", b"\x04\0\0\0"),
        ("stream", "BOOL", b"\0"),
    ):
        datatype = (
            datatype if chance.random() < 0.9 else chance.choice(["FP16", "", "BYTES", "NOPE"])
        )
        shape = [1, 1] if chance.random() < 0.9 else [chance.choice([0, -1, 2, 2**62])]
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(
            raw if chance.random() < 0.9 else chance.randbytes(chance.randrange(9))
        )
    written = bytearray(message.SerializeToString())
    for _ in range(chance.choice([0, 0, 1, 3])):
        written[chance.randrange(len(written))] = chance.randrange(256)
    return bytes(written)


def config_text(good: str, chance: random.Random) -> str:
    pieces = (
        "{",
        "}",
        "[",
        "]",
        ":",
        '"',
        "-1",
        "9" * 20,
        "${x}",
        "#",
        "\\",
        "input",
        "TYPE_INT32",
        "\0",
    )
    text = good
    for _ in range(chance.choice([1, 1, 2, 4])):
        place = chance.randint(0, len(text))
        cut = chance.randint(0, 12)
        text = (
            text[:place]
            + (chance.choice(pieces) if chance.random() < 0.6 else "")
            + text[place + cut :]
        )
    return text


class Canary(threading.Thread):
    """Requests the same stream repeatedly and keeps the first one that differs."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._stop_asked = threading.Event()
        self.streams = 0
        self.damage: str = ""

    def run(self) -> None:
        body = json.dumps({"text_input": "100", "max_tokens": 40, "stream": True}).encode()
        expected = " ".join(str(number) for number in range(101, 141))
        while not self._stop_asked.is_set() and not self.damage:
            try:
                with Connection(self._port) as connection:
                    connection.send(
                        request_bytes("POST", "/v2/models/ensemble/generate_stream", [], body)
                    )
                    answer = connection.answer()
            except OSError as error:
                self.damage = repr(error)
                return
            if answer is None or (found := " ".join(self._words(answer))) != expected:
                self.damage = "nothing" if answer is None else f"{answer.status} {found}"
            self.streams += 1

    def _words(self, answer: Answer) -> list[str]:
        events = [
            json.loads(line[6:]) for line in answer.body.split(b"\n") if line.startswith(b"data: ")
        ]
        return "".join(event.get("text_output", "") for event in events).split()

    def finish(self) -> None:
        self._stop_asked.set()
        self.join(30)
        assert not self.damage, f"the canary's stream changed: {self.damage}"


class Attacker:
    """One random source, a connection of each protocol, and counts of the answers."""

    def __init__(self, seed: int, http_port: int, grpc_port: int, folder: Path) -> None:
        self.answers: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._http_port = http_port
        self._connection = Connection(http_port)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
        self._configs: list[tuple[Path, str]] = []
        for path in sorted(REPOSITORIES.glob("*/*/config.pbtxt")):
            (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
            self._configs.append((folder / path.parent.name, path.read_text()))

    def close(self) -> None:
        self._connection.socket.close()
        self._channel.close()

    def attack(self, cases: int) -> None:
        attacks = (self.over_http, self.over_http, self.over_grpc, self.by_config)
        for number in range(cases):
            attacks[number % len(attacks)]()

    def over_http(self) -> None:
        self._connection.send(http_request(self._chance))
        try:
            answer = self._connection.answer()
        except (AssertionError, OSError):
            answer = None
        if answer is not None:
            assert b"the server's log has the details" not in answer.body, answer.body
            self.answers[f"HTTP {answer.status}"] += 1
        if answer is None or answer.closed or answer.header("connection") == "close":
            self.answers["HTTP closed"] += answer is None
            self._connection.socket.close()
            self._connection = Connection(self._http_port)

    def over_grpc(self) -> None:
        method = self._chance.choice(METHODS)
        message = grpc_message(self._chance)
        path = f"/{messages.SERVICE}/{method}"
        failure: grpc.RpcError | None = None
        try:
            if self._chance.random() < 0.3:
                list(
                    self._channel.stream_stream(f"/{messages.SERVICE}/ModelStreamInfer")(
                        iter([message]), timeout=30
                    )
                )
            else:
                self._channel.unary_unary(path)(message, timeout=30)
        except grpc.RpcError as error:
            failure = error
        if failure is not None:
            assert failure.details() != INTERNAL
            assert failure.code() not in NEVER, failure
        self.answers["gRPC OK" if failure is None else f"gRPC {failure.code().name}"] += 1

    def by_config(self) -> None:
        folder, good = self._chance.choice(self._configs)
        (folder / "config.pbtxt").write_text(config_text(good, self._chance))
        problems = Problems()
        read_model_config(folder, problems)
        self.answers["config refused" if problems.errors else "config read"] += 1


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096

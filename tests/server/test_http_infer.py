"""Infer on text models: split and joined batches, priorities, queue limits, limits of bodies."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from http_support import Answer, RunningServer, post
from tiny_text import EchoedRequest, EchoEngine, text_registry, write_engine_folder

from slipstream.engine.request import GenerateRequest
from slipstream.repository.models import read_repository
from slipstream.repository.templates import fill, template
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models import batches
from slipstream.server.models.batches import join, split
from slipstream.server.models.generating import EngineBackedModel
from slipstream.server.models.queue_size import default_queue_size
from slipstream.server.services import create_app, create_context

MAX_BYTES = 1 << 16


class Recorder(EchoEngine):
    """An engine that repeats prompts and records the priority and deadline of each."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduling: list[tuple[int, float | None]] = []
        self.outstanding = 0
        self.finish_reason = ""

    def submit(self, request: GenerateRequest) -> EchoedRequest:
        self.scheduling.append((request.priority, request.deadline))
        in_flight = super().submit(request)
        if self.finish_reason:
            in_flight.cancel(self.finish_reason)
        return in_flight


class Server:
    def __init__(self, port: int, engine: Recorder) -> None:
        self.port = port
        self.engine = engine

    def infer(
        self, model: str, texts: list[str], tokens: list[int], more: dict[str, Any] | None = None
    ) -> Answer:
        inputs = [
            {"name": "text_input", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts},
            {"name": "max_tokens", "datatype": "INT32", "shape": [len(tokens), 1], "data": tokens},
        ]
        body = {"inputs": inputs, **(more or {})}
        return post(self.port, f"/v2/models/{model}/infer", json.dumps(body).encode())

    def outputs(self, *given: Any) -> dict[str, Any]:
        answer = self.infer(*given)
        assert answer.status == 200, answer.body
        return {output["name"]: output for output in json.loads(answer.body)["outputs"]}


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(*edits: tuple[str, str]) -> Server:
            folder = write_engine_folder(tmp_path / "engine")
            values = {
                "engine_dir": str(folder),
                "tokenizer_dir": str(folder),
                "decoupled_mode": "false",
                "exclude_input_in_output": "true",
                "bls_model_name": "llama",
            }
            for name in ("llama", "ensemble", "preprocessing", "postprocessing", "tensorrt_llm"):
                text = fill(template("tensorrt_llm_bls" if name == "llama" else name), values)
                for old, new in edits if name == "tensorrt_llm" else ():
                    assert old in text
                    text = text.replace(old, new)
                (tmp_path / "repo" / name / "1").mkdir(parents=True)
                (tmp_path / "repo" / name / "config.pbtxt").write_text(text)
            engine = Recorder()
            registry = text_registry(read_repository(tmp_path / "repo"), engine)
            shared = create_context(http_max_input_bytes=MAX_BYTES)
            app = create_app(registry, ServerState([engine]), shared)
            return Server(stack.enter_context(RunningServer(app)).port, engine)

        yield begin


@pytest.mark.parametrize("model", ["ensemble", "llama"])
def test_a_batch_gives_each_prompt_its_own_text(start: Start, model: str) -> None:
    outputs = start().outputs(model, ["abc", "xy", "héé"], [4, 3, 5])
    assert outputs["text_output"] == {
        "name": "text_output",
        "datatype": "BYTES",
        "shape": [3],
        "data": ["abca", "xyx", "héé"],
    }


def test_one_invalid_prompt_fails_the_batch_with_the_reason(start: Start) -> None:
    server = start()
    answer = server.infer("llama", ["abc", "xy"], [4, 0])
    assert answer.status == 400
    assert json.loads(answer.body) == {"error": "max_tokens must be > 0, got 0"}
    assert answer.header("content-type") == "text/plain"


def test_ids_of_different_lengths_are_padded_to_one_shape(start: Start) -> None:
    inputs = [
        {"name": "input_ids", "datatype": "INT32", "shape": [2, 2], "data": [[65, 66], [70, 71]]},
        {"name": "input_lengths", "datatype": "INT32", "shape": [2, 1], "data": [2, 1]},
        {"name": "request_output_len", "datatype": "INT32", "shape": [2, 1], "data": [3, 1]},
    ]
    answer = post(
        start().port, "/v2/models/tensorrt_llm/infer", json.dumps({"inputs": inputs}).encode()
    )
    outputs = {output["name"]: output for output in json.loads(answer.body)["outputs"]}
    assert outputs["output_ids"]["shape"] == [2, 1, 3]
    assert outputs["output_ids"]["data"] == [65, 66, 65, 70, -1, -1]
    assert outputs["sequence_length"]["data"] == [3, 1]


@pytest.mark.parametrize(
    ("ids", "lengths", "status"),
    [
        ("INT32", "INT32", 200),
        ("INT32", "UINT32", 200),
        ("UINT32", "INT32", 400),
        ("INT32", "INT64", 400),
    ],
)
def test_lengths_may_be_unsigned_as_sent_by_clients_of_2023(
    start: Start, ids: str, lengths: str, status: int
) -> None:
    inputs = [
        {"name": "input_ids", "datatype": ids, "shape": [1, 2], "data": [65, 66]},
        {"name": "input_lengths", "datatype": lengths, "shape": [1, 1], "data": [2]},
        {"name": "request_output_len", "datatype": lengths, "shape": [1, 1], "data": [3]},
    ]
    answer = post(
        start().port, "/v2/models/tensorrt_llm/infer", json.dumps({"inputs": inputs}).encode()
    )
    assert answer.status == status
    assert ("data-type is" in answer.body.decode()) is (status == 400)


def test_all_four_input_formats_give_the_same_text(start: Start) -> None:
    server = start()
    body = json.dumps({"text_input": "abc", "max_tokens": 5}).encode()
    once = json.loads(post(server.port, "/v2/models/ensemble/generate", body).body)["text_output"]
    event = post(server.port, "/v2/models/ensemble/generate_stream", body).body.removeprefix(
        b"data: "
    )
    assert once == json.loads(event)["text_output"] == "abcab"
    assert server.outputs("ensemble", ["abc"], [5])["text_output"]["data"] == ["abcab"]


def test_priority_and_timeout_reach_the_engine(start: Start) -> None:
    server = start()
    before = time.monotonic()
    server.outputs("ensemble", ["a"], [1], {"parameters": {"priority": 3, "timeout": 5_000_000}})
    server.outputs("ensemble", ["a"], [1])
    (first, deadline), second = server.engine.scheduling
    assert first == -3  # clients: 1 is the most urgent; engine: the highest is
    assert deadline is not None
    assert before + 5 <= deadline <= time.monotonic() + 5
    assert second == (-2, None)


@pytest.mark.parametrize(("default", "as_none"), [("", 2), ("default_priority_level: 1", 1)])
def test_the_first_priority_precedes_requests_without_one(
    start: Start, default: str, as_none: int
) -> None:
    """The configuration can give requests without a priority the first level, too."""
    server = start(("dynamic_batching {", f"dynamic_batching {{ {default}"))
    for level in range(4):  # 0: no priority
        server.outputs("ensemble", ["a"], [1], {"parameters": {"priority": level}})
    none, first, second, third = [priority for priority, _ in server.engine.scheduling]
    assert first > second > third
    assert none == {1: first, 2: second}[as_none]


def test_a_priority_beyond_the_models_levels_is_the_default(start: Start) -> None:
    server = start(
        ("dynamic_batching {", "dynamic_batching { priority_levels: 4 default_priority_level: 3")
    )
    for level in (0, 1, 2, 4, 5, 2**40):
        server.outputs("ensemble", ["a"], [1], {"parameters": {"priority": level}})
    assert [priority for priority, _ in server.engine.scheduling] == [-3, -1, -2, -4, -3, -3]


def test_a_request_that_timed_out_in_the_queue_is_refused(start: Start) -> None:
    server = start()
    server.engine.finish_reason = "timeout"
    answer = server.infer("llama", ["a"], [1], {"parameters": {"timeout": 1}})
    assert (answer.status, json.loads(answer.body)) == (503, {"error": "Request timeout expired"})


def policy(rules: str) -> tuple[str, str]:
    return "dynamic_batching {", f"dynamic_batching {{ default_queue_policy {{ {rules} }}"


def test_a_full_queue_refuses_requests_with_tritons_text(start: Start) -> None:
    server = start(policy("max_queue_size: 2"))
    rows = server.engine.info.max_rows if server.engine.info else 0
    server.engine.outstanding = rows + 1
    assert server.infer("llama", ["a"], [1]).status == 200  # the second place in the queue
    server.engine.outstanding = rows + 2
    answer = server.infer("llama", ["a"], [1], {"id": "late"})
    assert answer.status == 503
    assert json.loads(answer.body) == {"error": "[request id: late] Exceeds maximum queue size"}
    server.engine.outstanding = 0
    assert server.infer("llama", ["a"], [1]).status == 200
    server.engine.outstanding = rows
    several = {"parameters": {"num_return_sequences": 3}}
    assert server.infer("llama", ["a"], [1], several).status == 503  # each of the two would wait


def test_a_queue_without_a_configured_size_is_bounded(start: Start) -> None:
    server = start()
    info = server.engine.info
    assert info is not None
    most = default_queue_size(info.max_rows, info.max_sequence_tokens)
    assert most >= info.max_rows
    server.engine.outstanding = info.max_rows + most - 1
    assert server.infer("llama", ["a"], [1]).status == 200
    server.engine.outstanding = info.max_rows + most
    answer = server.infer("llama", ["a"], [1], {"id": "late"})
    assert (answer.status, answer.header("retry-after")) == (503, "1")
    assert json.loads(answer.body) == {"error": "[request id: late] Exceeds maximum queue size"}


@pytest.mark.parametrize(
    ("rows", "tokens", "gigabytes", "most"),
    [
        (64, 2048, 64, 4096),  # a burst fits
        (1024, 8192, 1024, 65536),  # 64 times the rows
        (256, 131072, 8, 101),  # an eighth of the memory
        (256, 131072, 1, 256),  # never less than the rows
    ],
)
def test_the_queue_is_bounded_by_rows_and_memory(
    rows: int, tokens: int, gigabytes: int, most: int
) -> None:
    assert default_queue_size(rows, tokens, gigabytes << 30) == max(rows, most)


@pytest.mark.parametrize("level", [2**33, 2**63 - 1])
def test_a_priority_of_any_size_reaches_the_engine(start: Start, level: int) -> None:
    server = start()
    assert server.infer("llama", ["a"], [1], {"parameters": {"priority": level}}).status == 200
    assert server.engine.scheduling[0][0] == -(2**32 - 1)


@pytest.mark.parametrize(
    ("rules", "given", "expected"),
    [
        ("default_timeout_microseconds: 2000000", 0, 2),
        ("default_timeout_microseconds: 2000000", 9_000_000, 2),  # the client may not override it
        ("default_timeout_microseconds: 2000000 allow_timeout_override: true", 9_000_000, 9),
        ("timeout_action: DELAY default_timeout_microseconds: 2000000", 0, None),
    ],
)
def test_the_timeout_of_the_queue_policy_sets_the_deadline(
    start: Start, rules: str, given: int, expected: float | None
) -> None:
    server = start(policy(rules))
    before = time.monotonic()
    server.outputs("llama", ["a"], [1], {"parameters": {"timeout": given}})
    ((_, deadline),) = server.engine.scheduling
    if expected is None:
        assert deadline is None
    else:
        assert deadline is not None
        assert before + expected <= deadline <= time.monotonic() + expected


def test_a_body_that_decompresses_beyond_the_limit_is_refused(start: Start) -> None:
    bomb = gzip.compress(b" " * (MAX_BYTES + 1))
    answer = post(start().port, "/v2/models/llama/infer", bomb, [["Content-Encoding", "gzip"]])
    assert answer.status == 400
    assert f"more than {MAX_BYTES} bytes" in json.loads(answer.body)["error"]


def test_an_unknown_encoding_and_a_body_that_is_too_large_are_refused(start: Start) -> None:
    server = start()
    answer = post(server.port, "/v2/models/llama/infer", b"{}", [["Content-Encoding", "br"]])
    assert (answer.status, json.loads(answer.body)) == (
        501,
        {"error": "Unsupported compression type"},
    )
    answer = post(server.port, "/v2/models/llama/infer", b" " * (MAX_BYTES + 1))
    assert answer.status == 400
    assert json.loads(answer.body)["error"].startswith(
        f"request JSON size of {MAX_BYTES + 1} bytes exceeds"
    )


HOSTILE = {
    "a shape that overflows": {"shape": [2**62, 2**62], "data": [1]},
    "too many dimensions": {"shape": [1] * 1000, "data": [1]},
    "a size beyond the body": {"shape": [1], "parameters": {"binary_data_size": 10**12}},
    "a size that is not a number": {"shape": [1], "parameters": {"binary_data_size": "x"}},
    "a region that is not registered": {
        "shape": [1],
        "parameters": {"shared_memory_region": "x", "shared_memory_byte_size": 4},
    },
    "two sources": {"shape": [1], "data": [1], "parameters": {"binary_data_size": 4}},
}


@pytest.mark.parametrize("given", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_inputs_are_refused(start: Start, given: dict[str, Any]) -> None:
    body = {"inputs": [{"name": "max_tokens", "datatype": "INT32", **given}]}
    answer = post(start().port, "/v2/models/llama/infer", json.dumps(body).encode())
    assert answer.status in (400, 404, 500)
    assert json.loads(answer.body)["error"] != "internal error, the server's log has the details"


def test_joining_a_split_batch_restores_it() -> None:
    tensor = Tensor.from_values("x", "INT32", (3, 2), [1, 2, 3, 4, 5, 6])
    parts = split(InferRequest("m", "1", {"x": tensor}), 3)
    assert [part.inputs["x"].values() for part in parts] == [[1, 2], [3, 4], [5, 6]]
    joined = join([InferResponse([part.inputs["x"]]) for part in parts])
    assert joined.outputs[0].values() == tensor.values()
    assert joined.outputs[0].shape == tensor.shape


def test_joining_logits_pads_shorter_prompts() -> None:
    lengths = (3, 5, 1)
    width = 40_000
    parts = [
        Tensor(
            "context_logits", "FP32", (1, count, width), np.arange(count * width, dtype=np.float32)
        )
        for count in lengths
    ]
    joined = join([InferResponse([part]) for part in parts]).outputs[0]
    assert joined.shape == (3, 5, width)
    assert joined.array().dtype == np.float32
    expected = np.zeros((3, 5, width), np.float32)
    for row, part in zip(expected, parts, strict=True):
        row[: part.shape[1]] = part.array().reshape(part.shape[1:])
    assert np.array_equal(joined.array().reshape(joined.shape), expected)


async def test_a_large_batch_of_logits_is_joined_outside_the_event_loop(monkeypatch) -> None:
    seen = set()

    def record_thread(*given):
        seen.add(threading.current_thread())
        return join(*given)

    monkeypatch.setattr(batches, "join", record_thread)
    model = LogitsModel()
    for tokens, in_thread in ((2, False), (9, True)):
        seen.clear()
        inputs = {
            "input_ids": Tensor.from_values("input_ids", "INT32", (2, 1), [tokens, tokens + 1])
        }
        (answer,) = [answer async for answer in model.infer(InferRequest("logits", "1", inputs))]
        assert answer.outputs[0].shape == (2, tokens + 1, 30_000)
        assert seen != {threading.main_thread()} if in_thread else seen == {threading.main_thread()}


class LogitsModel(EngineBackedModel):
    """Answers with a number of positions that is the value of its only token."""

    def __init__(self):
        super().__init__(SimpleNamespace(max_batch_size=8), None)

    def check_queue(self, request, count):
        return None

    async def answer(self, request, check_queue=True):
        count = request.inputs["input_ids"].first
        yield InferResponse(
            [
                Tensor(
                    "context_logits",
                    "FP32",
                    (1, count, 30_000),
                    np.zeros(30_000 * count, np.float32),
                )
            ]
        )


def test_joining_pads_inner_dimensions_too() -> None:
    small = Tensor.from_values("x", "FP32", (1, 1, 2), [1.0, 2.0])
    large = Tensor.from_values("x", "FP32", (1, 2, 3), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    joined = join([InferResponse([small]), InferResponse([large])]).outputs[0]
    assert joined.shape == (2, 2, 3)
    assert joined.values() == [1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]

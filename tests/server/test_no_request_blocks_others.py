"""A large or slow request delays neither the streams of others nor the health of the server.

The bounds are wide: a loaded machine delays everything. The defects that these tests would find
stopped the server for 2 to 10 seconds, beside nothing else.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from canary import Canary, Gaps
from large_vocabulary import TEXT, VOCABULARY, save_large_model
from optional_tensors import write_declared
from real_server import RealServer, build_engine

MODEL = "chat"
SCORED_TOKENS = 1300
JSON = {"content-type": "application/json"}
MIN_BOUND = 2.0  # seconds
TIMES_IDLE = 10.0


class Answer(NamedTuple):
    status: int
    size: int
    start: bytes


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("others")
    save_large_model(folder / "hf")
    engine = build_engine(folder / "hf", folder / "engine")
    repository = write_declared(
        folder / "repo", engine, decoupled_mode="false", max_tokens_in_paged_kv_cache="8192"
    )
    running = RealServer(repository, folder / "server").wait()
    yield running
    running.close()


@pytest.fixture(scope="module")
def canary(server: RealServer) -> Iterator[Canary]:
    watching = Canary(server.ports["HTTPService"], MODEL)
    yield watching
    watching.close()


@pytest.fixture(scope="module")
def idle(canary: Canary) -> Gaps:
    """The gaps beside no other request."""
    time.sleep(1)
    start = time.monotonic()
    time.sleep(2)
    return canary.gaps(start, time.monotonic())


def post(server: RealServer, path: str, body: Any, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["HTTPService"], timeout=120)
    connection.request("POST", path, data, JSON | headers)
    response = connection.getresponse()
    start = response.read(2000)
    size = len(start)
    while piece := response.read(1 << 20):
        size += len(piece)
    connection.close()
    return Answer(response.status, size, start)


def post_json(server: RealServer, path: str, body: Any) -> Any:
    url = f"http://127.0.0.1:{server.ports['HTTPService']}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), JSON)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def check_gaps(canary: Canary, idle: Gaps, start: float) -> None:
    """Compare the gaps since `start` with those of an idle server."""
    gaps = canary.gaps(start, time.monotonic())
    bounds = Gaps(*(max(MIN_BOUND, TIMES_IDLE * gap) for gap in idle))
    assert gaps.stream <= bounds.stream, (gaps, idle)
    assert gaps.health <= bounds.health, (gaps, idle)


def chat(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages, "max_tokens": 2, **fields}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


GENERATE = f"/v2/models/{MODEL}/generate"
CHAT = "/v1/chat/completions"
WORDS = (TEXT * 80_000)[:2_000_000]
TOO_LARGE: dict[str, tuple[str, Any, str]] = {
    "prompt": (
        GENERATE,
        {"text_input": WORDS, "max_tokens": 2},
        "Prompt length (over 2048, text_input has 2000000 bytes) exceeds maximum input length",
    ),
    "prompt without spaces": (
        GENERATE,
        {"text_input": "abcdefghij" * 190_000, "max_tokens": 2},
        "Prompt length (over 2048, text_input has 1900000 bytes) exceeds maximum input length",
    ),
    "message": (
        CHAT,
        chat([user(WORDS[:1_800_000])]),
        "messages has over 2047 tokens, and this model takes at most 2047",
    ),
    "messages": (
        CHAT,
        chat([user("a")] * 100_000),
        "messages has over 2047 tokens, and this model takes at most 2047",
    ),
    "responses": (
        "/v1/responses",
        {"model": MODEL, "input": [user("a")] * 100_000},
        "input must hold at most 32768 items, got 100000",
    ),
    "anthropic": (
        "/v1/messages",
        chat([user("a b")] * 100_000),
        "messages has ",
    ),
    "nested arrays": (
        GENERATE,
        {"text_input": "a", "max_tokens": 2, "x": [[index] for index in range(400_000)]},
        "parameter 'x' has invalid type",
    ),
    "detokenize": (
        "/detokenize",
        {"model": MODEL, "tokens": [5] * 1_500_000},
        "The body has an array of over 1048576 elements",
    ),
    "parameters": (
        GENERATE,
        {"text_input": "a", "max_tokens": 2} | {f"x{index}": 1 for index in range(100_000)},
        "a request has at most 4096 inputs and parameters, got 100002",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_refused_while_others_go_on(server, canary, idle, name):
    path, body, problem = TOO_LARGE[name]
    data = json.dumps(body).encode()
    start = time.monotonic()
    answer = post(server, path, data)
    check_gaps(canary, idle, start)
    assert answer.status == 400
    assert problem in answer.start.decode()


def test_a_long_body_is_read_while_others_go_on(server, canary, idle):
    data = json.dumps({"text_input": "x\n" * 20_000_000, "max_tokens": 2}).encode()
    assert len(data) > 60_000_000
    start = time.monotonic()
    answer = post(server, GENERATE, data)
    check_gaps(canary, idle, start)
    assert answer.status == 400
    assert b"(over 2048, text_input has 40000000 bytes)" in answer.start


def test_a_long_text_is_tokenized_while_others_go_on(server, canary, idle):
    repeated = 18_000
    tokens = post_json(server, "/tokenize", {"model": MODEL, "prompt": TEXT})["tokens"]
    body = {"model": MODEL, "prompt": TEXT * repeated, "return_token_strs": True}
    start = time.monotonic()
    found = post_json(server, "/tokenize", body)
    check_gaps(canary, idle, start)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    # the space at the end of the text is part of the next word
    assert found["tokens"][: len(tokens) - 1] == tokens[:-1]
    assert "".join(found["token_strs"]).replace("Ġ", " ") == TEXT * repeated


def tensor(name: str, shape: list[int], data: bytes, datatype: str = "INT32") -> bytes:
    head = json.dumps({"name": name, "shape": shape, "datatype": datatype})
    return head[:-1].encode() + b',"data":[' + data + b"]}"


def test_eight_million_integers_as_json_are_read_while_others_go_on(server, canary, idle):
    count = 8_000_000
    ids = tensor("TOKENS_BATCH", [1, 1, count], b",".join([b"11"] * count))
    length = tensor("SEQUENCE_LENGTH", [1, 1], b"%d" % count)
    body = b'{"inputs":[' + ids + b"," + length + b"]}"
    start = time.monotonic()
    answer = post(server, "/v2/models/postprocessing/infer", body)
    check_gaps(canary, idle, start)
    assert answer.status == 400
    assert json.loads(answer.start)["error"] == (
        "TOKENS_BATCH has rows of 8000000 tokens, and this model takes at most 2048"
    )


def test_millions_of_integers_over_grpc_are_read_while_others_go_on(server, canary, idle):
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    count = 4_000_000
    raw = service_pb2.ModelInferRequest(model_name="postprocessing")
    raw.inputs.add(name="TOKENS_BATCH", datatype="INT32", shape=[1, 1, count])
    raw.inputs.add(name="SEQUENCE_LENGTH", datatype="INT32", shape=[1, 1])
    typed = service_pb2.ModelInferRequest()
    typed.CopyFrom(raw)
    raw.raw_input_contents.append(np.full(count, 11, np.int32).tobytes())
    raw.raw_input_contents.append(np.array([count], np.int32).tobytes())
    typed.inputs[0].contents.int_contents.extend([11] * count)
    typed.inputs[1].contents.int_contents.append(count)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for request in (raw, typed):
            start = time.monotonic()
            with pytest.raises(grpc.RpcError, match="rows of 4000000 tokens"):
                stub.ModelInfer(request, timeout=60)
            check_gaps(canary, idle, start)


@pytest.mark.parametrize("streamed", [False, True])
def test_logits_are_sent_over_grpc_while_others_go_on(server, canary, idle, streamed):
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request = service_pb2.ModelInferRequest(model_name=MODEL)
    for name, datatype in (("text_input", "BYTES"), ("max_tokens", "INT32")):
        request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
    request.inputs.add(name="return_context_logits", datatype="BOOL", shape=[1, 1])
    request.inputs[0].contents.bytes_contents.append(b"\x01" * SCORED_TOKENS)
    request.inputs[1].contents.int_contents.append(1)
    request.inputs[2].contents.bool_contents.append(True)
    request.outputs.add(name="context_logits")
    unlimited = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc, unlimited) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        start = time.monotonic()
        if streamed:
            (last,) = stub.ModelStreamInfer(iter([request]), timeout=120)
            answer = last.infer_response
        else:
            answer = stub.ModelInfer(request, timeout=120)
        check_gaps(canary, idle, start)
    assert list(answer.outputs[0].shape) == [1, SCORED_TOKENS, VOCABULARY]
    logits = np.frombuffer(answer.raw_output_contents[0], np.float32)
    assert logits.size == SCORED_TOKENS * VOCABULARY
    assert np.isfinite(logits).all()
    assert logits.std() > 0


def infer_logits(tokens: int, binary: bool) -> dict[str, Any]:
    """Return a request for the logits of a prompt. A token of the prompt is one letter."""
    inputs = {
        "text_input": ("BYTES", "\x01" * tokens),  # in no token of two bytes
        "max_tokens": ("INT32", 1),
        "return_context_logits": ("BOOL", True),
    }
    return {
        "inputs": [
            {"name": name, "shape": [1, 1], "datatype": datatype, "data": [value]}
            for name, (datatype, value) in inputs.items()
        ],
        "outputs": [{"name": "context_logits", "parameters": {"binary_data": binary}}],
    }


@pytest.mark.parametrize(
    ("tokens", "binary"),
    [(SCORED_TOKENS, True), (150, False), pytest.param(800, False, marks=pytest.mark.slow)],
)
def test_logits_are_sent_while_others_go_on_in_bounded_memory(server, canary, idle, tokens, binary):
    tensor_bytes = tokens * VOCABULARY * 4
    before = forget_peak(server)
    start = time.monotonic()
    answer = post(server, f"/v2/models/{MODEL}/infer", infer_logits(tokens, binary))
    check_gaps(canary, idle, start)
    assert answer.status == 200, answer.start
    assert f'"shape":[1,{tokens},{VOCABULARY}]'.encode() in answer.start
    assert answer.size > tensor_bytes
    # the logits, those that the engine has sent ahead, and what the allocator keeps
    assert peak_bytes(server) - before < 4 * tensor_bytes + (48 << 20)


def test_generate_sends_logits_in_chunks(server, canary, idle):
    body = {"text_input": "\x01" * 100, "max_tokens": 1, "return_context_logits": True}
    before = forget_peak(server)
    start = time.monotonic()
    answer = post(server, GENERATE, body)
    check_gaps(canary, idle, start)
    assert answer.status == 200
    assert answer.size > 8 * 100 * VOCABULARY
    assert peak_bytes(server) - before < (4 * 4 * 100 * VOCABULARY) + (48 << 20)


def forget_peak(server: RealServer) -> int:
    """Make the kernel forget the most memory of the server's process; return what it has now."""
    Path(f"/proc/{server.process_id}/clear_refs").write_text("5")
    return _status_bytes(server, "VmRSS")


def peak_bytes(server: RealServer) -> int:
    return _status_bytes(server, "VmHWM")


def _status_bytes(server: RealServer, name: str) -> int:
    status = Path(f"/proc/{server.process_id}/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_slow_grammars_delay_neither_words_nor_short_grammars(server, canary, idle):
    properties = {f"property{index}": {"type": "string"} for index in range(4000)}

    def guided(number: int) -> tuple[Answer, float]:
        schema = {"type": "object", "properties": properties, "description": str(number)}
        kind = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        answer = post(server, CHAT, chat([user("a")], response_format=kind))
        return answer, time.monotonic()

    def words(number: int) -> tuple[Answer, float]:
        fields: dict[str, Any] = {"bad_words": ["some"]}
        if number % 2:
            fields = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[ab]+"}
        body = {"text_input": "a", "max_tokens": 2, **fields}
        return post(server, GENERATE, body), time.monotonic()

    words(0)  # the first request of each kind reads the vocabulary
    words(1)
    start = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        slow = [pool.submit(guided, number) for number in range(3)]
        time.sleep(0.2)
        quick = [pool.submit(words, number) for number in range(4)]
        quick_answers = [one.result() for one in quick]
        slow_answers = [one.result() for one in slow]
    check_gaps(canary, idle, start)
    assert {answer.status for answer, _ in quick_answers} == {200}
    # the library refuses grammars that are too ambiguous; a busy machine reaches the time limit first
    refusals = (b"response_format cannot be followed further", b"response_format takes over")
    for answer, _ in slow_answers:
        assert answer.status == 400
        assert any(refusal in answer.start for refusal in refusals)
    assert max(end for _, end in quick_answers) < max(end for _, end in slow_answers)

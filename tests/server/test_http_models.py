"""The language models over HTTP, on a real tokenizer and an engine that repeats its prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from http_support import Answer, Connection, RunningServer, get, post, request_bytes, wait_until
from tiny_text import BEGIN, END, MAX_TOKENS, EchoEngine, text_registry, write_engine_folder

from slipstream.repository.models import read_repository
from slipstream.repository.templates import fill, template
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.text_model import text_between
from slipstream.server.services import create_app

TEXT_MODELS = ["ensemble", "llama"]


class Server:
    def __init__(self, port: int, engine: EchoEngine, state: ServerState) -> None:
        self.port = port
        self.engine = engine
        self.state = state

    def post(self, model: str, endpoint: str = "generate", **fields: Any) -> Answer:
        return post(self.port, f"/v2/models/{model}/{endpoint}", json.dumps(fields).encode())

    def generate(self, model: str, **fields: Any) -> dict[str, Any]:
        answer = self.post(model, **fields)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)  # type: ignore[no-any-return]

    def stream(self, model: str, **fields: Any) -> list[dict[str, Any]]:
        answer = self.post(model, "generate_stream", **fields)
        assert answer.status == 200, answer.body
        return [json.loads(chunk.removeprefix(b"data: ")) for chunk in answer.chunks]


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server on the templates, filled with the given variables and edited with `edits`."""
    with ExitStack() as stack:

        def begin(
            delay: float = 0.0, edits: tuple[tuple[str, str, str], ...] = (), **values: str
        ) -> Server:
            folder = write_engine_folder(tmp_path / "engine")
            defaults = {
                "engine_dir": str(folder),
                "tokenizer_dir": str(folder),
                "decoupled_mode": "true",
                "exclude_input_in_output": "true",
                "bls_model_name": "llama",
            }
            for name in ("llama", "ensemble", "preprocessing", "postprocessing", "tensorrt_llm"):
                model = tmp_path / "repo" / name
                (model / "1").mkdir(parents=True)
                text = fill(
                    template("tensorrt_llm_bls" if name == "llama" else name),
                    {**defaults, **values},
                )
                for model_name, old, new in edits:
                    if model_name == name:
                        assert old in text
                        text = text.replace(old, new)
                (model / "config.pbtxt").write_text(text)
            engine = EchoEngine(delay)
            state = ServerState([engine])
            app = create_app(text_registry(read_repository(tmp_path / "repo"), engine), state)
            return Server(stack.enter_context(RunningServer(app)).port, engine, state)

        yield begin


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_streamed_pieces_joined_are_the_whole_text(start: Start, model: str) -> None:
    server = start()
    prompt = "héllo 你好 😀 "
    size = len(prompt.encode())
    whole = server.generate(model, text_input=prompt, max_tokens=2 * size)["text_output"]
    assert whole == prompt * 2
    pieces = server.stream(model, text_input=prompt, max_tokens=2 * size, stream=True)
    assert len(pieces) == 2 * size  # one event per token
    assert "".join(piece["text_output"] for piece in pieces) == whole
    assert all("\ufffd" not in piece["text_output"] for piece in pieces)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_prompt_precedes_the_text_unless_it_is_excluded(start: Start, model: str) -> None:
    server = start(exclude_input_in_output="false")
    assert server.generate(model, text_input="abc", max_tokens=2)["text_output"] == "abcab"
    pieces = server.stream(model, text_input="abc", max_tokens=2, stream=True)
    # a stream never contains the prompt
    assert [piece["text_output"] for piece in pieces] == ["a", "b"]
    once = server.stream(model, text_input="abc", max_tokens=2, stream=False)
    assert [piece["text_output"] for piece in once] == ["abcab"]


def test_request_may_override_whether_the_prompt_is_included(start: Start) -> None:
    server = start()
    assert server.generate("llama", text_input="abc", max_tokens=2)["text_output"] == "ab"
    included = server.generate(
        "llama", text_input="abc", max_tokens=2, exclude_input_in_output=False
    )
    assert included["text_output"] == "abcab"


def test_continuation_of_a_sentencepiece_prompt_keeps_its_space() -> None:
    class Pieces:
        """A tokenizer that drops the first space of a decoded text."""

        def encode(self, text: str, add_special_tokens: bool) -> list[str]:
            return ["▁" + word for word in text.split()]

        def decode(self, ids: list[str]) -> str:
            return "".join(ids).replace("▁", " ").removeprefix(" ")

    assert text_between(Pieces(), "What is", ["▁it"]) == " "  # type: ignore[arg-type, list-item]
    assert text_between(Pieces(), "What is", ["n't"]) == ""  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_model_that_is_not_decoupled_answers_once(start: Start, model: str) -> None:
    server = start(decoupled_mode="false")
    assert (
        server.generate(model, text_input="abc", max_tokens=4, stream=True)["text_output"] == "abca"
    )
    pieces = server.stream(model, text_input="abc", max_tokens=4, stream=True)
    assert [piece["text_output"] for piece in pieces] == ["abca"]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_log_probs_are_sent_on_request(start: Start, model: str) -> None:
    server = start(normalize_log_probs="false")
    answer = server.generate(model, text_input="abc", max_tokens=3, return_log_probs=True)
    assert (answer["cum_log_probs"], answer["output_log_probs"]) == (-1.5, [-0.5, -0.5, -0.5])
    pieces = server.stream(
        model, text_input="abc", max_tokens=3, return_log_probs=True, stream=True
    )
    assert [piece["cum_log_probs"] for piece in pieces] == [-0.5, -1.0, -1.5]
    assert [piece["output_log_probs"] for piece in pieces] == [-0.5, -0.5, -0.5]


def test_log_probs_are_divided_by_the_length_by_default(start: Start) -> None:
    answer = start().generate("ensemble", text_input="abc", max_tokens=3, return_log_probs=True)
    assert answer["cum_log_probs"] == -0.5


def test_bls_that_accumulates_sends_the_text_so_far(start: Start) -> None:
    pieces = start(accumulate_tokens="true").stream(
        "llama", text_input="abc", max_tokens=3, stream=True
    )
    assert [piece["text_output"] for piece in pieces] == ["a", "ab", "abc"]


def test_repositories_since_0_14_get_no_placeholders(start: Start) -> None:
    """From 0.14 on, outputs that were not requested are absent."""
    names = ("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS")
    edits = tuple(("postprocessing", f'"OUT_{name}"', f'"_{name}"') for name in names)
    server = start(edits=edits)
    for model in ("ensemble", "llama"):
        answer = server.generate(model, text_input="abc", max_tokens=2)
        assert not {
            "cum_log_probs",
            "context_logits",
            "generation_logits",
            "output_log_probs",
        } & set(answer)
    asked = server.generate("llama", text_input="abc", max_tokens=2, return_log_probs=True)
    assert asked["output_log_probs"] == [-0.5, -0.5]


def test_words_and_end_ids_reach_the_engine(start: Start) -> None:
    server = start()
    answer = server.generate(
        "ensemble", text_input="one two", max_tokens=20, stop_words=[" tw", ""], bad_words="x"
    )
    assert answer["text_output"] == "one"
    _, sampling = server.engine.submitted[-1]
    assert sampling.end_ids == (END,)
    assert sampling.bad_words
    server.generate(
        "ensemble", text_input="one", max_tokens=1, stop_words="", bad_words=[], end_id=5
    )
    assert server.engine.submitted[-1][1].end_ids == (5,)
    assert server.engine.submitted[-1][1].bad_words == ()
    server.generate("ensemble", text_input="one", max_tokens=1, end_id=-1)
    assert server.engine.submitted[-1][1].end_ids == ()


def test_end_token_is_not_in_the_output(start: Start) -> None:
    """The engine repeats `b`, which is the end token of the request."""
    server = start()
    ids = server.generate("preprocessing", QUERY="ab", REQUEST_OUTPUT_LEN=1)["INPUT_ID"]
    server.engine.stops_at_end_ids = True
    answer = server.generate(
        "tensorrt_llm", input_ids=ids, input_lengths=2, request_output_len=9, end_id=ids[1]
    )
    assert (answer["output_ids"], answer["sequence_length"]) == (ids[0], 1)


def test_prompt_over_the_engines_input_length_is_refused(start: Start, tmp_path: Path) -> None:
    server = start()
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    config["build_config"]["max_input_len"] = 4
    (tmp_path / "engine" / "config.json").write_text(json.dumps(config))
    engine = EchoEngine()
    app = create_app(
        text_registry(read_repository(tmp_path / "repo"), engine), ServerState([engine])
    )
    with RunningServer(app) as running:
        tight = Server(running.port, engine, server.state)
        assert tight.generate("ensemble", text_input="abcd", max_tokens=1)["text_output"] == "a"
        refused = tight.post("ensemble", text_input="abcde", max_tokens=1)
        text = "in ensemble 'ensemble', Prompt length (5) exceeds maximum input length (4)."
        assert (refused.status, json.loads(refused.body)) == (400, {"error": text})
        refused = tight.post(
            "tensorrt_llm", input_ids=[1] * 5, input_lengths=5, request_output_len=1
        )
        assert json.loads(refused.body) == {
            "error": "Prompt length (5) exceeds maximum input length (4)."
        }
        huge = tight.post("llama", text_input="x" * 2000, max_tokens=1)
        assert (
            "text_input has 2000 bytes) exceeds maximum input length (4)."
            in json.loads(huge.body)["error"]
        )


def test_output_is_clipped_to_the_context(start: Start) -> None:
    server = start()
    answer = server.generate("ensemble", text_input="abcd", max_tokens=10**6)
    assert len(answer["text_output"]) == MAX_TOKENS - 4


def test_empty_prompt_is_the_models_beginning_token(start: Start) -> None:
    server = start()
    assert server.generate("ensemble", text_input="", max_tokens=2)["model_name"] == "ensemble"
    assert server.engine.submitted[-1][0] == [BEGIN]


def test_missing_field_hidden_by_an_optional_one_is_named(start: Start) -> None:
    answer = start().post("llama", text_input="abc", temperature=0.5)
    assert (answer.status, answer.framing) == (400, "chunked")
    assert json.loads(answer.body) == {"error": "max_tokens is required"}


async def test_batch_of_two_for_a_decoupled_model_is_refused(start: Start, tmp_path: Path) -> None:
    """Only gRPC can send such a batch."""
    start()
    registry = text_registry(read_repository(tmp_path / "repo"), EchoEngine())
    for name in ("ensemble", "llama"):
        inputs = {
            "text_input": Tensor.from_values("text_input", "BYTES", (2, 1), [b"a", b"b"]),
            "max_tokens": Tensor.from_values("max_tokens", "INT32", (2, 1), [1, 1]),
        }
        model = registry.find(name).model
        answers = [answer async for answer in model.infer(InferRequest(name, "1", inputs))]
        assert len(answers) == 1
        assert answers[0].error is not None
        assert answers[0].error.message.endswith("expects requests with batch size of 1.")


def test_unknown_field_is_a_parameter_and_changes_nothing(start: Start) -> None:
    assert (
        start().generate("llama", text_input="abc", max_tokens=2, flavour="mint")["text_output"]
        == "ab"
    )


def test_unavailable_engine_is_503_with_retry_after(start: Start) -> None:
    server = start()
    server.engine.unavailable = "the engine is not running: it is still loading"
    for endpoint in ("generate", "generate_stream"):
        answer = server.post("ensemble", endpoint, text_input="a", max_tokens=1)
        assert (answer.status, answer.header("retry-after"), answer.framing) == (
            503,
            "1",
            "content-length",
        )
        assert json.loads(answer.body) == {"error": server.engine.unavailable}
    server.engine.unavailable = ""
    assert server.generate("ensemble", text_input="a", max_tokens=1)["text_output"] == "a"


def test_draining_server_refuses_new_requests_and_finishes_old_ones(start: Start) -> None:
    server = start(delay=0.002)
    body = json.dumps({"text_input": "abc", "max_tokens": 60, "stream": True}).encode()
    with Connection(server.port) as connection:
        connection.send(request_bytes("POST", "/v2/models/ensemble/generate_stream", [], body))
        assert connection.head() is not None
        assert connection.chunk()
        server.state.draining = True
        refused = server.post("ensemble", text_input="a", max_tokens=1)
        assert (refused.status, refused.header("retry-after")) == (503, "1")
        assert get(server.port, "/v2/health/ready").status == 400
        assert get(server.port, "/v2/health/live").status == 200
        rest = 0
        while connection.chunk():
            rest += 1
        assert rest == 59


def test_failed_engine_ends_every_answer_with_the_reason(start: Start) -> None:
    server = start(delay=0.01)
    body = json.dumps({"text_input": "abc", "max_tokens": 1000, "stream": True}).encode()
    with Connection(server.port) as connection:
        connection.send(request_bytes("POST", "/v2/models/llama/generate_stream", [], body))
        assert connection.head() is not None
        assert b"text_output" in connection.chunk()
        server.engine.failure = "the engine process ended"
        last = b""
        while chunk := connection.chunk():
            last = chunk
        assert last == b'data: {"error":"the engine process ended"}\n\n'
    answer = server.post("ensemble", text_input="abc", max_tokens=3)
    assert answer.status == 400
    assert json.loads(answer.body) == {"error": "in ensemble 'ensemble', the engine process ended"}


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize("model", [*TEXT_MODELS, "tensorrt_llm"])
def test_disconnected_client_cancels_its_request_in_the_engine(
    start: Start, model: str, endpoint: str
) -> None:
    server = start(delay=0.05)
    fields: dict[str, Any] = {
        "text_input": "abc",
        "max_tokens": 4000,
        "stream": endpoint == "generate_stream",
    }
    if model == "tensorrt_llm":
        fields = {
            "input_ids": [1, 2],
            "input_lengths": 2,
            "request_output_len": 4000,
            "streaming": fields["stream"],
        }
    with Connection(server.port) as connection:
        path = f"/v2/models/{model}/{endpoint}"
        connection.send(request_bytes("POST", path, [], json.dumps(fields).encode()))
        wait_until(lambda: len(server.engine.submitted) == 1)
        assert server.engine.cancels == []
    wait_until(lambda: server.engine.cancels == [(1, "cancelled")])


def test_engine_model_echoes_the_prompt_ids_unless_excluded(start: Start) -> None:
    server = start(exclude_input_in_output="false")
    answer = server.generate(
        "tensorrt_llm", input_ids=[10, 11, 12, 99], input_lengths=3, request_output_len=2
    )
    assert (answer["output_ids"], answer["sequence_length"]) == ([10, 11, 12, 10, 11], 5)
    pieces = server.stream(
        "tensorrt_llm", input_ids=[10, 11], input_lengths=2, request_output_len=2, streaming=True
    )
    assert [piece["output_ids"] for piece in pieces] == [10, 11]


def test_engine_model_accepts_ids_beyond_the_vocabulary_but_no_negative_ones(start: Start) -> None:
    server = start()
    server.generate(
        "tensorrt_llm", input_ids=[258 + 7, 2**31 - 1], input_lengths=2, request_output_len=1
    )
    assert server.engine.submitted[-1][0] == [7, (2**31 - 1) % 258]
    assert server.engine.submitted[-1][1].end_ids == ()  # the engine model has no default end id
    answer = server.post("tensorrt_llm", input_ids=[1, -3], input_lengths=2, request_output_len=1)
    assert answer.status == 400
    assert json.loads(answer.body) == {
        "error": "input_ids holds the id -3, which no vocabulary has"
    }


def test_preprocessing_and_postprocessing_are_served_as_models(start: Start) -> None:
    server = start()
    before = server.generate(
        "preprocessing",
        QUERY="ab",
        REQUEST_OUTPUT_LEN=3,
        STOP_WORDS_DICT=["b", "a"],
        END_ID=9,
        EMBEDDING_BIAS_WORDS=["a"],
        EMBEDDING_BIAS_WEIGHTS=[2.0],
    )
    a, b = before["INPUT_ID"]
    assert before["STOP_WORDS_IDS"] == [b, a, 1, 2]
    assert (before["REQUEST_INPUT_LEN"], before["OUT_END_ID"], before["OUT_PAD_ID"]) == (2, 9, END)
    assert before["EMBEDDING_BIAS"][a] == 2.0
    assert sum(before["EMBEDDING_BIAS"]) == 2.0
    after = server.generate("postprocessing", TOKENS_BATCH=[a, b, b], SEQUENCE_LENGTH=2)
    assert after["OUTPUT"] == "ab"
    assert after["OUT_CUM_LOG_PROBS"] == 0.0
    wrong = server.post("postprocessing", TOKENS_BATCH=[a, b, b], SEQUENCE_LENGTH=7)
    assert wrong.status == 400
    assert b"SEQUENCE_LENGTH must hold 1 numbers from 0 to 3" in wrong.body


def test_oldest_generation_of_tensor_names_serves_the_same_text(start: Start) -> None:
    renamed = [
        ("text_input", "INPUT_0"),
        ("max_tokens", "INPUT_1"),
        ("stop_words", "INPUT_3"),
        ("text_output", "OUTPUT_0"),
        ("stream", "streaming"),
        ("top_k", "runtime_top_k"),
    ]
    edits = tuple(("ensemble", f'"{old}"', f'"{new}"') for old, new in renamed)
    server = start(edits=edits)
    old = server.generate("ensemble", INPUT_0="one two", INPUT_1=20, INPUT_3="tw", runtime_top_k=1)
    new = server.generate("llama", text_input="one two", max_tokens=20, stop_words="tw", top_k=1)
    assert old["OUTPUT_0"] == new["text_output"] == "one "
    refused = server.post("ensemble", INPUT_0="one", INPUT_1=0)
    assert json.loads(refused.body) == {
        "error": "in ensemble 'ensemble', INPUT_1 must be > 0, got 0"
    }


def test_documentation_describes_routes_with_an_example_that_runs(start: Start) -> None:
    server = start()
    page = get(server.port, "/docs")
    assert page.status == 200
    assert (page.header("content-type") or "").startswith("text/html")
    assert b"openapi.json" in page.body
    # the page fetches nothing from other servers
    assert b"//" not in page.body.replace(b"<!doctype html>", b"").split(b"<script>")[0]
    document = json.loads(get(server.port, "/openapi.json").body)
    assert {
        "/v2/models/{model}/generate",
        "/v2/models/{model}/generate_stream",
        "/v2/health/ready",
    } <= set(document["paths"])
    types = {"generate": "application/json", "generate_stream": "text/event-stream; charset=utf-8"}
    for path, content_type in types.items():
        operation = document["paths"][f"/v2/models/{{model}}/{path}"]["post"]
        model = operation["parameters"][0]["example"]
        example = operation["requestBody"]["content"]["application/json"]["example"]
        answer = server.post(model, path, **example)
        assert (answer.status, answer.header("content-type")) == (200, content_type)


def test_documentation_has_settings_to_change_and_fields_of_several_values(start: Start) -> None:
    server = start()
    paths = json.loads(get(server.port, "/openapi.json").body)["paths"]
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/models/{model}/trace/setting"):
        assert set(paths[path]) == {"get", "post"}
        assert get(server.port, path.replace("{model}", "ensemble")).status == 200
    assert "/v2/systemsharedmemory/region/{region}/register" in paths
    request = paths["/v2/models/{model}/generate"]["post"]["requestBody"]["content"][
        "application/json"
    ]
    fields = request["schema"]["properties"]
    assert fields["stop_words"] == {"type": ["string", "array"], "items": {"type": "string"}}
    assert fields["temperature"] == {"type": "number"}


def test_unknown_route_next_to_the_documentation_gets_tritons_answer(start: Start) -> None:
    server = start()
    for path in ("/docs/", "/index.html", "/v1"):
        answer = get(server.port, path)
        assert (answer.status, answer.body) == (404, b'{"error":"Not Found"}')
        assert answer.header("content-type") == "text/plain"

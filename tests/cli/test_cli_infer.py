"""`slipstream infer` against servers that fail. tests/server/test_lifecycle.py has a good server."""

import http.server
import io
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import grpc
import pytest
from command_line import run_cli

from slipstream.cli.arguments import CommandError
from slipstream.cli.infer import choose_inputs, create_parser, sampling, sampling_inputs


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.mark.parametrize(("protocol", "named"), [("http", ""), ("grpc", "gRPC ")])
def test_without_a_server_the_error_says_what_to_run(protocol, named):
    port = free_port()
    arguments = [
        "infer",
        "-m",
        "x",
        "--prompt",
        "y",
        "-u",
        "127.0.0.1",
        "-p",
        str(port),
        "-i",
        protocol,
    ]
    result = run_cli(arguments)
    assert result.exit_code == 1
    assert f"no server answers {named}at 127.0.0.1:{port}; start one with" in result.output


class Busy(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(self.refuse)

    def refuse(self, requests, context):
        context.abort(grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")


def infer_from(handler):
    """Run `slipstream infer` against a gRPC server with this handler."""
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        arguments = [
            "infer",
            "-m",
            "x",
            "--prompt",
            "y",
            "-u",
            "127.0.0.1",
            "-p",
            str(port),
            "-i",
            "grpc",
        ]
        return run_cli(arguments)
    finally:
        server.stop(None).wait()


def test_a_full_queue_is_reported_with_the_servers_text():
    result = infer_from(Busy())
    assert (result.exit_code, result.output.strip()) == (1, "error: Exceeds maximum queue size")


CONFIG = {
    "max_batch_size": 4,
    "input": [
        {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]},
        {"name": "max_tokens", "data_type": "TYPE_INT32", "dims": [1]},
    ],
    "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}],
}


class Canned(http.server.BaseHTTPRequestHandler):
    status, body = 200, b""

    def do_GET(self):
        assert self.path == "/v2/models/x/config"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(CONFIG).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *arguments):
        pass


def serve_two(server):
    """Answer the questions for the configuration and for the text."""
    server.handle_request()
    server.handle_request()


@pytest.mark.parametrize("source", ["file", "variable"])
def test_the_key_is_sent_over_http(source, tmp_path, monkeypatch):
    seen = []

    class Noting(Canned):
        body = b'data: {"text_output": "yes"}\n\n'

        def do_POST(self):
            seen.append(self.headers["authorization"])
            super().do_POST()

    arguments = ["infer", "-m", "x", "--prompt", "y", "-u", "127.0.0.1"]
    if source == "file":
        (tmp_path / "key").write_text("secret\n")
        arguments += ["--api-key", str(tmp_path / "key")]
    else:
        monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret")
    with http.server.HTTPServer(("127.0.0.1", 0), Noting) as server:
        threading.Thread(target=serve_two, args=(server,), daemon=True).start()
        result = run_cli([*arguments, "-p", str(server.server_port)])
    assert (result.exit_code, result.output.strip(), seen) == (0, "yes", ["Bearer secret"])


def test_the_key_is_sent_over_grpc(monkeypatch):
    """The server refuses the call and repeats the key in its error."""
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret")

    class Refusing(grpc.GenericRpcHandler):
        def service(self, details):
            given = dict(details.invocation_metadata).get("authorization")

            def refuse(requests, context):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, f"saw {given}")

            return grpc.stream_stream_rpc_method_handler(refuse)

    result = infer_from(Refusing())
    assert result.exit_code == 1
    assert "saw Bearer secret" in result.output


@pytest.fixture
def answer():
    """Return a function that asks a server with a fixed status and body."""
    servers = []

    def ask(status, body):
        handler = type("Handler", (Canned,), {"status": status, "body": body})
        server = http.server.HTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        arguments = [
            "infer",
            "-m",
            "x",
            "--prompt",
            "y",
            "-u",
            "127.0.0.1",
            "-p",
            str(server.server_port),
        ]
        return run_cli(arguments)

    yield ask
    for server in servers:
        server.shutdown()
        server.server_close()


def test_pieces_of_text_are_printed_in_order(answer):
    result = answer(
        200, b'data: {"text_output":"one"}\n\ndata: {"text_output":" two \xc3\xa9"}\n\n'
    )
    assert (result.exit_code, result.output) == (0, "one two é\n")


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (404, b'{"error":"no such model"}', "no such model"),
        (400, b'data: {"error":"bad field"}\n\n', "bad field"),
        (502, b"<html>", "the server answered 502"),
        (200, b'data: {"text_output":"a"}\n\ndata: {"error":"engine gone"}\n\n', "engine gone"),
    ],
)
def test_errors_go_to_stderr_with_exit_code_1(answer, status, body, text):
    result = answer(status, body)
    assert result.exit_code == 1
    assert f"error: {text}" in result.stderr


TEXT = {"name": "text_input", "data_type": "TYPE_STRING", "dims": ["1"]}
NUMBERS = {"name": "INPUT0", "data_type": "TYPE_FP32", "dims": ["-1", "4"]}


def test_the_prompt_is_required_only_for_text_models():
    with pytest.raises(CommandError, match="takes a text in 'text_input'; give it as an argument"):
        choose_inputs("m", {"input": [TEXT]}, None, 5)
    with pytest.raises(CommandError, match="model 'm' has no input for a prompt"):
        choose_inputs("m", {"input": [NUMBERS]}, "hi", 5)
    assert choose_inputs("m", {"input": [NUMBERS]}, None, 5).keys() == {"INPUT0"}


@pytest.mark.parametrize(("batch_size", "shape"), [(0, (1,)), (8, (1, 1))])
def test_inputs_have_the_declared_shape(batch_size, shape):
    tokens = {"name": "max_tokens", "data_type": "TYPE_INT32", "dims": ["1"], "optional": True}
    config = {"max_batch_size": batch_size, "input": [TEXT, tokens]}
    inputs = choose_inputs("m", config, "hi", 5)
    assert {name: (array.shape, array.item()) for name, array in inputs.items()} == {
        "text_input": (shape, b"hi"),
        "max_tokens": (shape, 5),
    }


@pytest.mark.parametrize(
    ("kind", "dtype", "most"),
    [
        ("TYPE_FP16", "float16", 1),
        ("TYPE_FP32", "float32", 1),
        ("TYPE_INT8", "int8", 127),
        ("TYPE_UINT64", "uint64", 127),
        ("TYPE_BOOL", "bool", 1),
    ],
)
def test_random_inputs_have_the_declared_type(kind, dtype, most):
    config = {"max_batch_size": 2, "input": [{**NUMBERS, "data_type": kind, "dims": ["-1", "400"]}]}
    array = choose_inputs("m", config, None, 5)["INPUT0"]
    assert (array.dtype, array.shape) == (dtype, (1, 1, 400))
    assert 0 <= array.min() < array.max() <= most


def test_other_inputs_of_text_models_are_neutral_or_left_out():
    """As vLLM's and the first ensembles have them."""
    required = {"data_type": "TYPE_STRING", "dims": ["1"]}
    config = {
        "input": [
            {"name": "prompt", **required},
            {"name": "sampling_parameters", **required},
            {"name": "bad_words", **required},
            {"name": "stop_words", **required, "optional": True},
            {"name": "stream", "data_type": "TYPE_BOOL", "dims": ["1"], "optional": True},
        ]
    }
    inputs = choose_inputs("m", config, "hi", 5)
    assert {name: array.tolist() for name, array in inputs.items()} == {
        "prompt": [b"hi"],
        "sampling_parameters": [b"{}"],
        "bad_words": [b""],
        "stream": [True],
    }


def test_a_model_with_one_text_input_of_any_name_takes_the_prompt():
    config = {"input": [{**TEXT, "name": "QUERY"}, NUMBERS]}
    assert choose_inputs("m", config, "hi", 5)["QUERY"].tolist() == [b"hi"]


def test_a_type_that_numpy_lacks_is_refused_by_name():
    config = {"input": [{**NUMBERS, "data_type": "TYPE_BF16"}]}
    with pytest.raises(ValueError, match="the input INPUT0 has the type TYPE_BF16"):
        choose_inputs("m", config, None, 5)


def test_the_protocol_of_triton_is_grpc_as_in_its_own_program():
    arguments = ["infer", "-m", "x", "-u", "127.0.0.1", "-p", str(free_port())]
    assert "no server answers at" in run_cli(arguments).output
    assert "no server answers gRPC at" in run_cli(arguments, "triton").output


def test_the_url_may_hold_the_port():
    class Answering(Canned):
        body = b'data: {"text_output": "yes"}\n\n'

    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=serve_two, args=(server,), daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        result = run_cli(["infer", "-m", "x", "--prompt", "y", "-u", address])
    assert (result.exit_code, result.output) == (0, "yes\n")


CHAT_CONFIG = {
    **CONFIG,
    "input": [
        *CONFIG["input"],
        {"name": "messages", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    ],
}
YES = [{"role": "user", "content": "y"}]


class Model(http.server.BaseHTTPRequestHandler):
    """A server of the model `x`, which notes what it is sent."""

    seen: ClassVar[list[Any]] = []
    has_template = True

    def do_GET(self):
        listed = {"data": [{"id": "ensemble"}, {"id": "x"}]}
        self.answer(200, listed if self.path == "/v1/models" else CHAT_CONFIG)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(body)
        if "messages" in body and not self.has_template:
            self.answer(400, {"error": "this model has no chat template; put one into its folder"})
        else:
            self.answer(200, {"text_output": "yes"}, b"data: %s\n\n")

    def answer(self, status, document, form=b"%s"):
        body = form % json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def model():
    """The class of a running server, and the words that send a request to it."""
    kind = type("Noting", (Model,), {"seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield kind, ["infer", "-u", f"127.0.0.1:{server.server_port}"]
        server.shutdown()


@pytest.mark.parametrize(
    ("words", "messages", "text"),
    [
        (["y"], YES, None),
        (["--prompt", "y", "-m", "x"], YES, None),
        (["y", "--system", "s"], [{"role": "system", "content": "s"}, *YES], None),
        (["y", "--raw"], None, "y"),
    ],
)
def test_a_prompt_is_a_message_unless_it_is_raw(model, words, messages, text):
    kind, command = model
    result = run_cli([*command, *words])
    assert (result.exit_code, result.output) == (0, "yes\n")
    (sent,) = kind.seen
    assert (json.loads(sent.get("messages", "null")), sent.get("text_input")) == (messages, text)


def test_a_model_without_a_chat_template_continues_the_text(model):
    kind, command = model
    kind.has_template = False
    result = run_cli([*command, "y"])
    assert (result.exit_code, result.output) == (0, "yes\n")
    assert kind.seen[-1]["text_input"] == "y"
    refused = run_cli([*command, "y", "--system", "s"])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "no chat template" in refused.stderr


def test_the_prompt_comes_from_a_pipe(model, monkeypatch):
    kind, command = model
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert run_cli(command).output == "yes\n"
    assert json.loads(kind.seen[0]["messages"])[0]["content"] == "from a pipe"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "takes a text in 'text_input'" in run_cli(command).stderr


def test_triton_sends_the_prompt_as_it_is(model):
    kind, command = model
    run_cli([*command, "-m", "x", "-i", "http", "--prompt", "y"], program="triton")
    assert kind.seen[0]["text_input"] == "y"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["y", "--prompt", "z"], "PROMPT and --prompt exclude each other"),
        (["y", "--raw", "--system", "s"], "--system needs a chat template: leave --raw out"),
    ],
)
def test_contradicting_options_of_infer_are_refused(model, words, text):
    result = run_cli([*model[1], *words])
    assert (result.exit_code, model[0].seen) == (2, [])
    assert text in result.stderr


def test_sampling_flags_become_the_models_own_inputs():
    def fields(*flags):
        return sampling(create_parser().parse(["x", *flags]))

    assert fields() == {}
    assert fields("--temperature", "0") == {"temperature": 0.0}
    # a temperature alone would be greedy
    assert fields("--temperature", "0.7") == {"temperature": 0.7, "top_p": 1.0}
    assert fields("--top-p", "0.9", "--seed", "7") == {"top_p": 0.9, "seed": 7}
    config = {
        "input": [
            TEXT,
            {"name": "runtime_top_p", "data_type": "TYPE_FP32", "dims": ["1"], "optional": True},
            {"name": "random_seed", "data_type": "TYPE_UINT64", "dims": ["1"], "optional": True},
        ]
    }
    inputs = sampling_inputs("m", config, {"top_p": 0.5, "seed": 7})
    assert {name: (array.dtype, array.item()) for name, array in inputs.items()} == {
        "runtime_top_p": ("float32", 0.5),
        "random_seed": ("uint64", 7),
    }
    with pytest.raises(CommandError, match="model 'm' has no input for --temperature"):
        sampling_inputs("m", config, {"temperature": 1.0})

"""`slipstream infer` against servers that fail. tests/server/test_lifecycle.py has a good server."""

import http.server
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from command_line import run_cli


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


class Canned(http.server.BaseHTTPRequestHandler):
    status, body = 200, b""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *arguments):
        pass


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
        threading.Thread(target=server.handle_request, daemon=True).start()
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


def test_the_prompt_is_required():
    result = run_cli(["infer", "-m", "x"])
    assert result.exit_code == 2
    assert "--prompt" in result.output


def test_the_url_may_hold_the_port():
    class Answering(Canned):
        body = b'data: {"text_output": "yes"}\n\n'

    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        result = run_cli(["infer", "-m", "x", "--prompt", "y", "-u", address])
    assert (result.exit_code, result.output) == (0, "yes\n")

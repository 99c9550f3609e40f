"""`slipstream infer` against servers that answer badly; tests/server/test_lifecycle.py has the good one."""

import http.server
import socket
import threading

import pytest
from typer.testing import CliRunner

from slipstream.cli import main as command

runner = CliRunner()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_when_nobody_answers_it_says_what_to_run(protocol):
    port = free_port()
    arguments = ["infer", "-m", "x", "--prompt", "y", "-u", "127.0.0.1", "-p", str(port), "-i", protocol]
    result = runner.invoke(command.app, arguments)
    assert result.exit_code == 1
    assert f"no server answers at 127.0.0.1:{port}; start one with: slipstream start" in result.output


class Canned(http.server.BaseHTTPRequestHandler):
    status, body = 200, b""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def answer():
    """Ask a server that gives this status and body."""
    servers = []

    def ask(status, body):
        handler = type("Handler", (Canned,), {"status": status, "body": body})
        server = http.server.HTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        arguments = ["infer", "-m", "x", "--prompt", "y", "-u", "127.0.0.1", "-p", str(server.server_port)]
        return runner.invoke(command.app, arguments)

    yield ask
    for server in servers:
        server.shutdown()
        server.server_close()


def test_text_is_printed_piece_by_piece(answer):
    result = answer(200, b'data: {"text_output":"one"}\n\ndata: {"text_output":" two \xc3\xa9"}\n\n')
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
def test_errors_are_told_on_stderr_with_exit_code_1(answer, status, body, text):
    result = answer(status, body)
    assert result.exit_code == 1
    assert f"slipstream - ERROR - {text}" in result.stderr


def test_the_prompt_is_required():
    result = runner.invoke(command.app, ["infer", "-m", "x"])
    assert result.exit_code == 2
    assert "--prompt" in result.output

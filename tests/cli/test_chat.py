"""`slipstream chat` as a user runs it: through a pipe, and in a terminal with a real Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_support import RunningServer, wait_until
from real_server import ROOT, RealServer, build_engine, limit_cache
from tiny_hf_folder import save_model
from tiny_text import EchoEngine, text_registry, write_engine_folder

from slipstream.cli.conversation import SETTINGS
from slipstream.repository.models import read_repository
from slipstream.repository.templates import write_repository
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.health import ServerState
from slipstream.server.services import create_app, create_context

# With an engine that echoes the prompt, the answer is the conversation and then its end.
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}"
    "[assistant]{{ eos_token }}"
)
# Runs the command in a pseudo-terminal, where the kernel turns Ctrl-C into SIGINT. The handler is
# set because a test run in the background ignores SIGINT, and child processes inherit that.
IN_TERMINAL = (
    "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); os.login_tty(0); "
    "from slipstream.cli.main import main; main()"
)


FIGURES = re.compile(r"\x1b\[2m\d+ tokens?(, \d+\.\d tokens/s)?, first after \d+\.\d\d s\x1b\[0m")


class Place:
    """The address and the engine of a server that echoes its prompts."""

    def __init__(self, port: int, engine: EchoEngine) -> None:
        self.address = f"127.0.0.1:{port}"
        self.engine = engine

    def pipe(self, lines: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_chat(lines, "-u", self.address, *flags, **variables)


def run_chat(lines: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream.cli.main", "chat", *flags]
    return subprocess.run(
        command,
        input=lines,
        env=environment(**variables),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM")}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "TERM": "dumb", **variables}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    engine = write_engine_folder(folder / "engine")
    (engine / "chat_template.jinja").write_text(TEMPLATE)
    write_repository(folder / "models", "mine", engine, engine, 8)
    return folder / "models"


@pytest.fixture
def place(models: Path) -> Iterator[Place]:
    with serving(models) as place:
        yield place


@contextmanager
def serving(models: Path, key: str = "") -> Iterator[Place]:
    engine = EchoEngine()
    engine.stops_at_end_ids = True
    registry = text_registry(read_repository(models), engine)
    with RunningServer(
        create_app(registry, ServerState([engine]), create_context(access=Access(key)))
    ) as server:
        yield Place(server.port, engine)


# When the file appears, SIGINT arrives without interrupting a system call of the main thread, as if
# it came just before the call.
LATE = """
import os, signal, sys, threading, time
def interrupt(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=interrupt, args=(sys.argv.pop(),), daemon=True).start()
"""


class Terminal:
    def __init__(self, *flags: str, first: str = "") -> None:
        """`first`: code that Python runs before the command."""
        self._master, slave = os.openpty()
        command = [sys.executable, "-c", first + IN_TERMINAL, "chat", *flags]
        self.process = subprocess.Popen(
            command, env=environment(), stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self._unread = ""
        self.all = ""

    def until(self, text: str) -> str:
        """Wait for `text` and return the output before it."""
        deadline = time.monotonic() + 30
        while text not in self._unread:
            assert time.monotonic() < deadline, f"{text!r} did not come after {self.all[-500:]!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                new = os.read(self._master, 65536).decode(errors="replace").replace("\r\n", "\n")
                self._unread += new
                self.all += new
        before, _, self._unread = self._unread.partition(text)
        return before

    def answer(self) -> str:
        """Wait for the next prompt. Return what was printed, without the line of figures."""
        printed, figures = self.until("\n\n>>> ").rsplit("\n\n", 1)
        assert FIGURES.fullmatch(figures), figures
        return printed

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def begin(*flags: str, first: str = "") -> Terminal:
        opened.append(Terminal(*flags, first=first))
        return opened[-1]

    yield begin
    for one in opened:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(30)


FIRST = "[user] One? [assistant]"


def test_each_line_of_a_pipe_continues_the_conversation(place: Place) -> None:
    done = place.pipe("One?\n\nTwo?\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{FIRST}\n[user] One? [assistant] {FIRST} [user] Two? [assistant]\n"


def test_clear_keeps_only_the_system_message(place: Place) -> None:
    done = place.pipe("One?\n/clear\nTwo?\n/exit\nThree?\n", "--system", "Be kind.")
    assert (
        done.stdout
        == "[system] Be kind. [user] One? [assistant]\n[system] Be kind. [user] Two? [assistant]\n"
    )
    assert done.returncode == 0


def test_only_a_line_feed_separates_lines_of_a_pipe(place: Place) -> None:
    assert place.pipe("a\u2028b\x85c").stdout == "[user] a\u2028b\x85c [assistant]\n"


def test_an_unknown_chat_command_is_an_error_and_not_sent(place: Place) -> None:
    done = place.pipe("/clera\n/usr/bin?\n")
    assert done.stderr.startswith(
        "error: there is no command /clera: Ctrl-C stops an answer, /clear "
    )
    assert done.stdout == "[user] /usr/bin? [assistant]\n"


@pytest.mark.parametrize(("model", "code"), [("ensemble", 0), ("mine", 0), ("tensorrt_llm", 1)])
def test_a_model_without_chat_is_refused(place: Place, model: str, code: int) -> None:
    done = place.pipe("One?\n", "-m", model)
    assert done.returncode == code
    if code:
        assert done.stderr == f"error: there is no model '{model}' to talk to; there are: mine\n"


def test_without_a_server_the_error_says_what_to_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = run_chat("One?\n", "-u", "127.0.0.1", "-p", str(port))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"error: no server answers at 127.0.0.1:{port}; start one with slipstream start "
    )
    assert done.stderr.count("\n") == 1


@contextmanager
def another_server(models: Any, event: Any) -> Iterator[str]:
    """Serve these models and answer every request with this event."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(json.dumps(models))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

        def answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *about: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(20)


LISTED = {"data": [{"id": "mine"}]}
PIECE = {"delta": {"content": "caf\u00e9"}, "finish_reason": None}


@pytest.mark.parametrize(
    ("models", "event", "error"),
    [
        ({"hello": 1}, None, "the server at http://{address} has no list of models"),
        ([1], None, "the server at http://{address} has no list of models"),
        (LISTED, 5, "the server's answer is not one of OpenAI's API"),
        (LISTED, {"choices": [{"delta": None}]}, "the server's answer is not one of OpenAI's API"),
        (LISTED, {"error": {"message": "no\x1b[31m!"}}, "no[31m!"),
        (LISTED, {"choices": [PIECE], "error": None}, ""),
    ],
)
def test_a_server_of_another_kind_is_one_error_line(models: Any, event: Any, error: str) -> None:
    with another_server(models, event) as address:
        done = run_chat("One?\n", "-u", address, PYTHONIOENCODING="ascii")
        expected = (1, f"error: {error.format(address=address)}\n") if error else (0, "")
    assert (done.returncode, done.stderr) == expected
    assert done.stdout == ("" if error else "caf?\n")


def test_reasoning_is_printed_dimmed_in_a_terminal_and_not_through_a_pipe(
    terminal: Callable[..., Terminal],
) -> None:
    thought = {"delta": {"reasoning_content": "Hm\x07."}, "finish_reason": None}
    with another_server(LISTED, {"choices": [thought, PIECE]}) as address:
        assert run_chat("One?\n", "-u", address).stdout == "caf\u00e9\n"
        shell = terminal("-u", address)
        shell.until(">>> ")
        shell.type("One?\n")
        assert shell.answer().endswith("\x1b[2mHm.\x1b[0m\n\ncaf\u00e9")


def test_control_characters_in_a_model_name_are_removed(terminal: Callable[..., Terminal]) -> None:
    with another_server({"data": [{"id": "mi\x1b]0;ne\x07"}]}, {"choices": [PIECE]}) as address:
        shell = terminal("-u", address)
        assert shell.until(">>> ").startswith(f"This is mi]0;ne at {address}. ")
        shell.type("\x04")
        assert shell.close() == 0


def test_a_failed_answer_ends_a_pipe_with_code_1(place: Place) -> None:
    place.engine.failure = "out of order"
    done = place.pipe("One?\nTwo?\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: out of order\n")


def test_the_key_comes_from_a_file_or_the_environment(models: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open sesame\n")
    with serving(models, "open sesame") as place:
        assert place.pipe("One?\n").returncode == 1
        assert place.pipe("One?\n", "--api-key", str(tmp_path / "key")).stdout == f"{FIRST}\n"
        assert place.pipe("One?\n", SLIPSTREAM_API_KEY="open sesame").stdout == f"{FIRST}\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(
    place: Place, terminal: Callable[..., Terminal]
) -> None:
    place.engine.hold_end = True
    shell = terminal("-u", place.address)
    assert shell.until(">>> ").startswith(
        f"This is mine at {place.address}. Ctrl-C stops an answer, "
    )
    shell.type("One?\n")
    shell.until(FIRST)  # everything before the end of the answer, which is held back
    assert place.engine.cancels == []
    shell.type("\x03")
    shell.until("\n>>> ")
    wait_until(lambda: place.engine.cancels == [(1, "cancelled")])
    place.engine.hold_end = False
    shell.type("Two?\n")
    said = shell.answer().split("\n", 1)[1]
    assert said == f"[user] One? [assistant] {FIRST} [user] Two? [assistant]"
    shell.type("half a line")
    # wait until the program has read it: the terminal drops unread input at Ctrl-C
    shell.until("half a line")
    shell.type("\x03")
    shell.until("\n>>> ")
    shell.type("/exit\n")
    assert shell.close() == 0
    assert len(place.engine.submitted) == 2


def test_ctrl_c_just_before_a_read_stops_the_answer(
    place: Place, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    place.engine.hold_end = True
    shell = terminal("-u", place.address, str(tmp_path / "now"), first=LATE)
    shell.until(">>> ")
    shell.type("One?\n")
    shell.until(FIRST)
    (tmp_path / "now").touch()
    assert shell.until("\n>>> ").strip() == "", "the answer continued"
    wait_until(lambda: place.engine.cancels)
    assert place.engine.cancels == [(1, "cancelled")]


def test_ctrl_c_just_before_waiting_for_input_discards_the_line(
    place: Place, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    shell = terminal("-u", place.address, str(tmp_path / "now"), first=LATE)
    shell.until(">>> ")
    shell.type("half a line")
    shell.until("half a line")
    (tmp_path / "now").touch()
    shell.until("\n>>> ")
    shell.type("/exit\n")
    assert (shell.close(), place.engine.submitted) == (0, [])


def test_ctrl_d_quits_and_control_characters_of_answers_are_removed(
    place: Place, terminal: Callable[..., Terminal]
) -> None:
    shell = terminal("-u", place.address, "--system", "\x1b[31mred\x07")
    shell.until(">>> ")
    shell.type("One?\n")
    assert shell.answer().endswith("[system] [31mred [user] One? [assistant]")
    shell.type("\x04")
    assert shell.close() == 0


def test_an_error_within_an_answer_is_printed_on_its_own_line(
    place: Place, terminal: Callable[..., Terminal]
) -> None:
    place.engine.hold_end = True
    shell = terminal("-u", place.address)
    shell.until(">>> ")
    shell.type("One?\n")
    shell.until(FIRST)
    place.engine.failure = "out of order"
    place.engine.hold_end = False
    assert shell.until(">>> ") == "\n\nerror: out of order\n"
    shell.type("/exit\n")
    assert shell.close() == 0


def test_an_answer_that_fills_the_context_prints_a_hint(place: Place) -> None:
    place.engine.stops_at_end_ids = False  # the answer does not end by itself
    done = place.pipe("One?\n")
    assert done.stdout.startswith(f"{FIRST}[user] One?")
    assert (done.returncode, done.stderr) == (
        0,
        "error: the answer ends here because the context is full; /clear makes room\n",
    )


def test_chat_continues_after_the_server_is_gone(
    models: Path, terminal: Callable[..., Terminal]
) -> None:
    with serving(models) as place:
        shell = terminal("-u", place.address)
        shell.until(">>> ")
    shell.type("One?\n")
    shell.until(f"error: no server answers at {place.address}; start one with slipstream start")
    shell.until("\n>>> ")
    shell.type("\x04")
    assert shell.close() == 0


def test_stopping_an_answer_frees_the_row_of_a_real_engine(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    """The answers have at least 16,000 tokens unless they are stopped."""
    model = save_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16384}))
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    engine = build_engine(model, tmp_path / "engine")
    write_repository(tmp_path / "models", "tiny", engine, engine, 8)
    limit_cache(tmp_path / "models", 2 * 16384)
    server = RealServer(tmp_path / "models", tmp_path / "run").wait()
    try:
        shell = terminal("-u", server.http)
        for question in ("One", "Two"):
            shell.until(">>> ")
            shell.type(f"{question}\n")
            shell.until(f"{question}\n")
            wait_until(lambda: counted(server, 'request_type="active"') == 1)
            shell.type("\x03")
            wait_until(lambda: counted(server, 'request_type="active"') == 0)
        shell.until("\n>>> ")
        shell.type("/exit\n")
        assert shell.close() == 0
        assert counted(server, "slipstream_requests_cancelled_total{") == 2
    finally:
        server.close()


def counted(server: RealServer, series: str) -> float:
    """Return the value of a metric."""
    lines = httpx.get(f"http://{server.metrics}/metrics", trust_env=False).text.splitlines()
    return float(next(line for line in lines if series in line).rpartition(" ")[2])


def test_settings_are_changed_shown_and_sent(place: Place) -> None:
    lines = "/set max_tokens 7\n/set temperature\n/set system Be brief.\n/show\nOne?\n"
    result = place.pipe(lines)
    shown, answer = result.stdout.split("messages: 0\n")
    assert shown == "max_tokens: 7\nsystem: Be brief.\n"
    assert "[system] Be brief.".startswith(answer.strip())
    assert answer.strip()
    ((_, sampling),) = place.engine.submitted
    assert sampling.max_tokens == 7


def test_set_alone_lists_every_setting(place: Place) -> None:
    lines = place.pipe("/set top_k 3\n/set\n").stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == list(SETTINGS)
    assert "top_k: 3" in lines
    assert "seed: the server's default" in lines


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/set heat 1", "there is no setting heat; there are: temperature, top_p"),
        ("/set seed 1.5", "seed must be a whole number, not '1.5'"),
        ("/set top_p much", "top_p must be a number, not 'much'"),
        ("/sett seed 1", "there is no command /sett: "),
        ("/save", "/save needs the name of a file"),
        ("/retry", "there is no question to ask again"),
        ("/load /none", "No such file or directory"),
    ],
)
def test_a_wrong_command_is_named_and_not_sent(place: Place, line: str, text: str) -> None:
    result = place.pipe(f"{line}\n")
    assert text in result.stderr
    assert (result.stdout, place.engine.submitted) == ("", [])


def test_a_conversation_is_saved_and_continued(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    place.pipe(f"/set max_tokens 50\nOne?\n/save {file}\n")
    saved = json.loads(file.read_text())
    assert saved["settings"] == {"temperature": 0, "max_tokens": 50}
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
    result = place.pipe(f"/load {file}\n/set max_tokens\nTwo?\n")
    assert result.stdout.startswith("[user] One? [assistant] [user] One? ")
    assert result.stdout.endswith(" [user] Two? [assistant]\n")
    file.write_text('{"messages": []}')
    assert "not a conversation that /save wrote" in place.pipe(f"/load {file}\n").stderr


def test_retry_asks_the_last_question_again(place: Place) -> None:
    assert place.pipe("One?\n/retry\n").stdout == f"{FIRST}\n{FIRST}\n"
    assert len(place.engine.submitted) == 2


def test_a_message_of_several_lines_is_one_question(place: Place) -> None:
    result = place.pipe('"""\nOne\n  two\n"""\n/show\n')
    assert result.stdout.startswith("[user] One\n  two [assistant]")
    assert result.stdout.endswith("messages: 2\n")
    assert len(place.engine.submitted) == 1

"""`slipstream run MODEL`: a server and a chat in one terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import run_cli
from tiny_hf_folder import save_model
from tiny_server import children_of, is_running

from slipstream.cli.models.run import create_parser, is_classic

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    source = save_model(folder / "tiny")
    (source / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def start_run(place: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli.main", "run", *words, "--http-port=0"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "SLIPSTREAM_HOME": str(place / "home")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_model_is_built_served_and_answers(place: Path) -> None:
    running = start_run(place, str(place / "tiny"), "--max-seq-len=64", "--dtype=float32")
    output, _ = running.communicate("What is ML?\n", timeout=90)
    assert running.returncode == 0, output
    before, _, answer = output.partition("[INFO] Loading the model\n")
    assert "weights: 100%" in before
    assert len(answer.strip()) > 10
    again = start_run(place, str(place / "tiny"), "--max-seq-len=64", "--dtype=float32")
    output, _ = again.communicate("What is ML?\n", timeout=90)
    assert "skipping build" in output
    assert output.partition("[INFO] Loading the model\n")[2] == answer


def test_the_server_ends_with_a_killed_chat(place: Path) -> None:
    running = start_run(place, str(place / "tiny"), "--dtype=float32")
    assert running.stdout is not None
    while "Loading the model" not in running.stdout.readline():
        assert running.poll() is None
    deadline = time.monotonic() + 60
    while not (servers := children_of(running.pid)):
        assert time.monotonic() < deadline
    running.send_signal(signal.SIGKILL)
    running.wait()
    while any(is_running(server) for server in servers):
        assert time.monotonic() < deadline, "the server runs on"
        time.sleep(0.05)


def test_a_server_that_does_not_start_says_why(place: Path) -> None:
    running = start_run(place, str(place / "tiny"), "--max-seq-len=100000")
    output, _ = running.communicate("", timeout=90)
    assert running.returncode == 1
    assert "100000 is more than the 512 tokens that the engine was built for" in output
    assert output.endswith("error: the server did not start, for the reason above\n")


@pytest.mark.parametrize(
    ("words", "classic"),
    [
        (["--max_output_len", "3"], True),
        (["--max-out=3", "--engine_dir", "x"], True),
        (["--kv_cache_free_gpu_memory_fraction", "0.5", "--max_output_len=3"], True),
        (["tiny"], False),
        (["tiny", "--system", "--max_seq_len", "3"], False),
        (["tiny", "--kv-cache-free-gpu-memory-fraction=0.5"], False),
        (["tiny", "--nosuch"], False),
        ([], False),
    ],
)
def test_flags_of_run_py_are_recognised(words: list[str], classic: bool) -> None:
    assert is_classic(words) == classic


def test_mistakes_are_reported_before_a_model_is_fetched(tmp_path: Path) -> None:
    result = run_cli(["run"])
    assert result.exit_code == 2
    assert "the following arguments are required: MODEL" in result.stderr
    fractions = ["--gpu-memory-utilization=0.5", "--kv-cache-free-gpu-mem-fraction=0.5"]
    result = run_cli(["run", str(tmp_path), *fractions])
    assert result.exit_code == 2
    assert "give one of them" in result.stderr


def test_every_engine_flag_reaches_the_server() -> None:
    from slipstream.cli import start
    from slipstream.cli.models.run import _engine_words

    words = ["--device=cpu", "--replicas=2", "--deterministic", "--no-enable-prefix-caching"]
    words += ["--max-model-len=1k", "--server-timeout=60"]
    passed = _engine_words(create_parser().parse(["tiny", *words]))
    given = start.create_parser().parse(passed)
    assert (given.device, given.replicas, given.deterministic) == ("cpu", 2, True)
    assert (given.reuse, given.max_sequence_tokens, given.server_timeout) == (False, 1000, 60)
    assert len(passed) == 6

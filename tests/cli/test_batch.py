"""`slipstream batch`: files in OpenAI's batch format, with a server of its own and a running one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import run_cli
from tiny_hf_folder import save_model
from tiny_server import TinyServer, children_of, is_running, make_repository

from slipstream.client.batch.files import BatchFileError, BatchInput, BatchOutput, BatchResult

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def request(identity: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": identity, "method": "POST", "url": url, "body": body}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_results(path: Path) -> dict[str, Any]:
    """Return the results by custom_id. Each has one line."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    results = {line["custom_id"]: line for line in lines}
    assert len(results) == len(lines)
    return results


# with a server that counts: the answer to "5" is "6 7 8"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    folder = tmp_path_factory.mktemp("counter")
    server = TinyServer(make_repository(folder), folder / "tmp")
    server.wait_started()
    yield server
    server.close()


def test_results_are_the_responses_of_the_server(server: TinyServer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "5"}]
    lines = [
        request("text", model="counter", prompt="5", max_tokens=3),
        request("unnamed", prompt="7", max_tokens=2),
        request("chat", "/v1/chat/completions", model="counter", messages=messages),
        request("wrong", prompt="7", max_tokens=-2),
        request("stranger", model="gpt", prompt="7"),
        request("streamed", prompt="7", stream=True),
        {**request("method"), "method": "GET"},
        request("url", "/v1/models"),
        {**request("body"), "body": [1]},
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    given = run_cli(["batch", source, output, "-u", server.url.removeprefix("http://")])
    assert given.exit_code == 1
    assert "2 requests succeeded, 7 failed" in given.output
    reasons = [line for line in given.output.splitlines() if line.startswith("[WARNING]")]
    assert "[WARNING] 1 failed: stream is not supported in a batch: leave it out" in reasons
    assert reasons[-1] == "[WARNING] 2 failed for other reasons: see the errors in the file"
    assert len(reasons) == 6
    results = read_results(output)
    assert sorted(results) == sorted(line["custom_id"] for line in lines)
    for line in lines[:5]:
        result = results[line["custom_id"]]
        body = {"model": "counter", **line["body"]}
        url = server.url + line["url"]
        expected = httpx.post(url, json=body, trust_env=False)
        assert result["response"]["status_code"] == expected.status_code
        found = result["response"]["body"]
        assert comparable(found) == comparable(expected.json())
        assert (result["error"] is None) == (expected.status_code == 200)
    assert results["text"]["response"]["body"]["choices"][0]["text"].split() == ["6", "7", "8"]
    assert results["text"]["response"]["request_id"] == results["text"]["response"]["body"]["id"]
    assert results["stranger"]["error"]["code"] == "model_not_found"
    assert results["wrong"]["error"]["message"].startswith("max_tokens must")
    problems = {name: results[name]["error"]["message"] for name in ("streamed", "method", "url")}
    assert problems["streamed"] == "stream is not supported in a batch: leave it out"
    assert problems["method"] == "method must be POST, not GET"
    assert problems["url"].endswith("not /v1/models")
    assert results["body"]["response"] is None


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs between two equal requests."""
    return {name: value for name, value in body.items() if name not in ("id", "created", "usage")}


def test_a_run_sends_only_what_has_no_result(server: TinyServer, tmp_path: Path) -> None:
    lines = [request(str(number), prompt=str(number), max_tokens=2) for number in range(20)]
    lines[3]["body"]["model"] = "another"
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    command = [
        "batch",
        source,
        output,
        "-u",
        server.url.removeprefix("http://"),
        "--concurrency",
        "4",
    ]
    assert run_cli(command).exit_code == 1
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[:9]) + whole[9][:-30])  # killed in a write
    again = run_cli(command)
    assert "has 9 of 20 results" in again.output
    assert again.exit_code == 1
    results = read_results(output)
    assert len(results) == 20
    assert output.read_bytes().splitlines(keepends=True)[:9] == whole[:9]
    texts = {name: one["response"]["body"] for name, one in results.items() if one["error"] is None}
    assert {name: body["choices"][0]["text"].split()[0] for name, body in texts.items()} == {
        str(number): str(number + 1) for number in range(20) if number != 3
    }
    repaired = run_cli([*command, "--retry-failed", "--ignore-model-names"])
    assert repaired.exit_code == 0
    assert "has 19 of 20 results" in repaired.output
    assert read_results(output)["3"]["response"]["body"]["choices"][0]["text"].split()[0] == "4"
    before = output.read_bytes()
    assert run_cli(command).exit_code == 0
    assert output.read_bytes() == before


def test_a_server_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request("a", prompt="5")])
    given = run_cli(["batch", source, tmp_path / "out.jsonl", "-u", "127.0.0.1:9"])
    assert given.exit_code == 1
    assert "no server answers at 127.0.0.1:9" in given.output
    assert (tmp_path / "out.jsonl").read_bytes() == b""


# killed midway, with a server of its own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = save_model(tmp_path_factory.mktemp("batch") / "tiny")
    (source / "chat_template.jinja").write_text(TEMPLATE)
    return source


def start_batch(home: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slipstream.cli.main", "batch", *map(str, words)]
    return subprocess.Popen(
        command,
        env=os.environ | {"SLIPSTREAM_HOME": str(home), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_results(running: subprocess.Popen[str], output: Path, count: int) -> None:
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert running.poll() is None, running.communicate()[0]
        time.sleep(0.01)


def test_a_run_that_is_killed_midway_goes_on(server: TinyServer, tmp_path: Path) -> None:
    count = 400
    lines = [request(f"r{n}", prompt=str(n), max_tokens=300) for n in range(count)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    place = ["-u", server.url.removeprefix("http://")]
    running = start_batch(tmp_path, source, output, *place, "--concurrency=2")
    wait_for_results(running, output, 3)
    running.kill()
    running.communicate()
    before = output.read_bytes()
    done = before.count(b"\n")
    assert 3 <= done < count
    again = start_batch(tmp_path, source, output, *place)
    text, _ = again.communicate(timeout=120)
    assert again.returncode == 0, text
    assert f"has {done} of {count} results" in text
    assert output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    results = read_results(output)
    assert set(results) == {f"r{n}" for n in range(count)}
    for name, result in results.items():
        text = result["response"]["body"]["choices"][0]["text"]
        assert text.split()[0] == str(int(name[1:]) + 1)


def test_a_server_of_its_own_ends_with_a_killed_run(model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is ML?"}]
    body = {"messages": messages, "max_tokens": 80, "ignore_eos": True}
    lines = [
        request("vector", "/v1/embeddings", input="red"),
        request("response", "/v1/responses", input="What is ML?", max_output_tokens=16),
        *[request(f"r{n}", "/v1/chat/completions", **body) for n in range(40)],
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    own = ["--model", model, "--dtype=float32", "--max-seq-len=128", "--embeddings=mean"]
    running = start_batch(model.parent / "home", source, output, *own, "--concurrency=1")
    wait_for_results(running, output, 3)
    children = children_of(running.pid)
    assert children
    running.kill()
    running.communicate()
    while any(is_running(child) for child in children):
        time.sleep(0.05)
    results = [json.loads(line) for line in output.read_bytes().splitlines()[:3]]
    assert [one["custom_id"] for one in results] == ["vector", "response", "r0"]
    assert [one["error"] for one in results] == [None] * 3
    vector, response, chat = (one["response"]["body"] for one in results)
    assert {body["model"] for body in (vector, response, chat)} == {"tiny"}
    assert len(vector["data"][0]["embedding"]) == 64
    assert response["usage"]["output_tokens"] == 16
    assert chat["usage"]["completion_tokens"] == 80


def test_an_interrupted_run_says_how_to_go_on(server: TinyServer, tmp_path: Path) -> None:
    lines = [request(str(number), prompt="5", max_tokens=300) for number in range(2000)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    place = ["-u", server.url.removeprefix("http://"), "--concurrency=1"]
    running = start_batch(tmp_path, source, output, *place)
    wait_for_results(running, output, 1)
    running.send_signal(signal.SIGINT)
    text, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    done = len(read_results(output))
    assert f"{done} of 2000 requests are done; the same command sends the others" in text


# files


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no requests"),
        ("{}\n", "line 1 is no request of a batch: Object missing required field `custom_id`"),
        ('{"custom_id": "a", "method": "POST", "url": "/x", "body": {}\n', "line 1 is no request"),
        (json.dumps(request("a")) + "\n\n" + json.dumps(request("a")), "line 3: custom_id 'a'"),
        (json.dumps(request("a")) + "\nhello", "line 2 is no request"),
    ],
)
def test_an_input_that_is_no_batch_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(BatchFileError, match=r"in\.jsonl") as caught:
        BatchInput(source)
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["notes", "notes\n", 'one\n{"id', '{"custom_id": "a"}\n'])
def test_an_output_of_something_else_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text(text)
    with pytest.raises(BatchFileError, match="line 1 is no result of a batch"):
        BatchOutput(output)
    assert output.read_text() == text


def test_every_torn_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = BatchResult("a", 200, b'{"id": "x"}').line()
    torn = BatchResult("b", 400, b"not json").line()
    for length in range(len(torn)):
        path.write_bytes(whole + torn[:length])
        with BatchOutput(path) as output:
            assert output.done == {"a": True}
            output.write(BatchResult("c", None, problem="no"))
        first, second = path.read_bytes().splitlines(keepends=True)
        assert first == whole
        assert json.loads(second)["error"] == {"code": "invalid_request", "message": "no"}


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BatchFileError, match="is written by another process"):
            BatchOutput(path)
    with BatchOutput(path), pytest.raises(BatchFileError, match="another process"):
        BatchOutput(path)
    with BatchOutput(path) as output:
        output.write(BatchResult("a", 500, b"{}"))
    with BatchOutput(path, retry_failed=True) as output:
        assert output.done == {}
        with pytest.raises(BatchFileError, match="another process"):
            BatchOutput(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "m", "-u", "localhost"], "give either --model or --url"),
        (["--max-seq-len", "64"], "settings of an engine need --model"),
        (["--concurrency", "0"], "must be a whole number of at least 1"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    tmp_path: Path, words: list[str], message: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request("a")])
    given = run_cli(["batch", source, tmp_path / "out.jsonl", *words])
    assert given.exit_code == 2
    assert message in given.stderr
    assert not (tmp_path / "out.jsonl").exists()

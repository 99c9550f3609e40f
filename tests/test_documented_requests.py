"""The guides' requests are sent unchanged to a server that is started as the guides say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_server import RealServer, build_engine, limit_cache
from tiny_hf_folder import save_model

from slipstream.repository.templates import write_repository

ROOT = Path(__file__).parents[1]
GUIDES = (
    "README.md",
    "docs/quickstart.md",
    "docs/requests.md",
    "docs/openai.md",
    "docs/anthropic.md",
    "docs/operations.md",
)
MODEL = "smollm2-135m"  # the model's name in the guides
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
QUOTED = re.compile(r"(?<= )'[{][^']*'")  # a body, which may have several lines
ADDRESS = re.compile(r"(?:localhost|127\.0\.0\.1):8000")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("documented")
    save_model(folder / "hf")
    (folder / "hf" / "chat_template.jinja").write_text(TEMPLATE)
    engine = build_engine(folder / "hf", folder / "engine")
    write_repository(folder / "repo", MODEL, engine, engine, 8)
    limit_cache(folder / "repo")
    command = (
        "-m",
        "slipstream.cli.main",
        "start",
        "--repo",
        str(folder / "repo"),
        "--dtype",
        "float32",
        "--embeddings",
        "mean",
        "--trace-config",
        f"triton,file={folder / 'trace.json'}",
    )
    running = RealServer(folder / "repo", folder, *command)
    try:
        yield running.wait()
    finally:
        running.close()


def blocks(guide: str, *kinds: str) -> list[str]:
    found = re.findall(
        r"^```(\w*)\n(.*?)^```", (ROOT / guide).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    return [text for kind, text in found if kind in kinds]


def requests() -> list[tuple[str, str]]:
    found = []
    for guide in GUIDES:
        for block in blocks(guide, "console", ""):
            lines = QUOTED.sub(
                lambda quoted: quoted[0].replace("\n", " "), block.replace("\\\n", " ")
            ).splitlines()
            found += [
                (guide, line[line.index("curl") :])
                for line in lines
                if re.match(r"(\$ |Try it: +)curl ", line)
            ]
    return found


def test_every_documented_page_has_requests() -> None:
    assert {guide for guide, _ in requests()} == set(GUIDES)
    assert len(requests()) >= 8


@pytest.mark.parametrize(("guide", "command"), requests(), ids=str)
def test_a_documented_request_is_answered(server: RealServer, guide: str, command: str) -> None:
    body = send(server, command)
    if "generate_stream" in command:
        events = read_events(body)
        # A busy server may merge two tokens that it has not sent yet into one event.
        assert len(events) in (1, 2)
        assert all(event["text_output"] for event in events)
    elif "/generate" in command:
        assert json.loads(body)["text_output"]
    elif '"tools"' in command:
        assert json.loads(body)["choices"][0]["message"]["tool_calls"]
    elif "/v1/chat" in command:
        assert json.loads(body)["choices"][0]["message"]["content"]
    elif "/v1/completions" in command:
        assert json.loads(body)["choices"][0]["text"]
    elif "/v1/responses" in command:
        assert json.loads(body)["output"][0]["content"][0]["text"]
    elif "/v1/messages" in command:
        assert json.loads(body)["content"][0]["text"]
    elif "/v1/embeddings" in command:
        assert len(json.loads(body)["data"]) == 2
    elif "/v1/rerank" in command:
        assert len(json.loads(body)["results"]) == 2


def send(server: RealServer, command: str) -> str:
    """Run a documented command against the server and return the body of its answer."""
    words = ADDRESS.sub(server.http, command) + " -w '\\n%{http_code}'"
    answer = subprocess.run(words, shell=True, capture_output=True, text=True, check=True).stdout
    body, _, status = answer.rpartition("\n")
    assert status == "200", answer
    return body


def read_events(body: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]


@pytest.mark.parametrize("guide", ["docs/openai.md", "docs/anthropic.md"])
def test_the_documented_python_program_prints_an_answer(server: RealServer, guide: str) -> None:
    (program,) = blocks(guide, "python")
    assert ADDRESS.search(program)
    ran = subprocess.run(
        [sys.executable, "-c", ADDRESS.sub(server.http, program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, len(ran.stdout) > 1) == (0, True), ran.stderr

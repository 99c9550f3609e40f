"""LLM.serve: the engine of this process behind a server in another one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tritonclient.grpc as triton
from source_tree import ROOT
from tiny_hf_folder import save_model
from tiny_server import children_of, is_running

from slipstream import LLM
from slipstream.engine.messages import StepOutputs
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.process import start_real_engine
from slipstream.offline.serving import LLMServer, ServerFailed, served_name, start_options
from slipstream.server.engine_link.serve import Loop

PROMPT = "What is ML?"
ANY_PORTS = {"port": 0, "grpc_port": 0, "metrics_port": 0}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("serve")
    source = save_model(folder / "tiny")
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(folder / "home"))
        yield source


@pytest.fixture(scope="module")
def llm(source: Path) -> Iterator[LLM]:
    with LLM(source, dtype="float32", cache_tokens=4096, max_seq_len=512) as llm:
        yield llm


@pytest.fixture(scope="class")
def server(llm: LLM) -> Iterator[LLMServer]:
    with llm.serve(**ANY_PORTS, background=True) as server:
        yield server


def complete(server: LLMServer, **fields: object) -> str:
    # OpenAI's default temperature of 1 draws another token now and then
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30, trust_env=False)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def wait_idle(llm: LLM) -> None:
    """Wait until the engine has no request of anyone."""
    deadline = time.monotonic() + 20
    while llm._engine._link._live or llm._engine.outstanding:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestOneServer:
    """The tests share a server."""

    def test_every_protocol_gives_the_answer_of_this_process(
        self, llm: LLM, server: LLMServer
    ) -> None:
        (here,) = llm.generate(PROMPT, max_tokens=12)
        assert complete(server) == here.text
        body = {"text_input": PROMPT, "max_tokens": 12, "exclude_input_in_output": True}
        url = f"{server.url}/v2/models/tiny/generate"
        assert httpx.post(url, json=body, timeout=30).json()["text_output"] == here.text
        client = triton.InferenceServerClient(server.grpc_address)
        assert client.is_model_ready("tiny")
        client.close()
        metrics = httpx.get(f"{server.metrics_url}/metrics").text
        assert 'nv_inference_request_success{model="tiny",version="1"} 2' in metrics

    def test_calls_of_both_processes_run_together(self, llm: LLM, server: LLMServer) -> None:
        expected = llm.generate([PROMPT, "red", "blue"], max_tokens=40)

        async def both() -> None:
            here = [
                asyncio.to_thread(llm.generate, text, max_tokens=40) for text in ("red", "blue")
            ]
            there = [asyncio.to_thread(complete, server, max_tokens=40) for _ in range(3)]
            found = await asyncio.gather(*here, *there)
            assert [answer[0].text for answer in found[:2]] == [one.text for one in expected[1:]]
            assert found[2:] == [expected[0].text] * 3

        asyncio.run(both())
        wait_idle(llm)

    def test_no_process_of_the_server_has_the_weights_or_torch(self, server: LLMServer) -> None:
        assert complete(server)
        processes = [server.process_id, *children_of(server.process_id)]
        assert len(processes) == 2  # the second takes the place of an engine process
        for process in processes:
            libraries = Path(f"/proc/{process}/maps").read_text()
            assert "libtorch" not in libraries
            assert "safetensors" not in libraries

    def test_a_second_server_is_refused(self, llm: LLM, server: LLMServer) -> None:
        with pytest.raises(RuntimeError, match=r"is served at http://127\.0\.0\.1:\d+: stop that"):
            llm.serve(background=True)


def test_a_running_request_finishes_before_the_server_stops(llm: LLM) -> None:
    server = llm.serve(**ANY_PORTS, background=True)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "stream": True}
    body |= {"ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(server.process_id, signal.SIGTERM)
        assert list(lines)[-2] == "data: [DONE]"
    folder = server._shared_engine.path.parent
    assert folder.is_dir()
    server.stop()
    assert not server.running
    assert not folder.exists()
    assert not llm._engine._link._live
    server.stop()
    assert repr(server) == "<LLMServer of 'tiny': stopped>"


def test_several_front_ends_share_the_engine(llm: LLM) -> None:
    (here,) = llm.generate(PROMPT, max_tokens=12)
    options = ["--frontends=2"]
    with llm.serve(**ANY_PORTS, background=True, options=options) as server:
        # new connections reach either of them
        assert [complete(server) for _ in range(8)] == [here.text] * 8
        wait_idle(llm)


def test_requests_of_a_killed_server_are_cancelled(llm: LLM) -> None:
    server = llm.serve(**ANY_PORTS, background=True)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 400, "stream": True}
    body |= {"ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        os.kill(server.process_id, signal.SIGKILL)
    with pytest.raises(ServerFailed, match="killed by SIGKILL"):
        server.wait()
    wait_idle(llm)
    assert llm._engine._link._server is None
    (here,) = llm.generate(PROMPT, max_tokens=12)
    with llm.serve(**ANY_PORTS, background=True) as another:
        assert complete(another) == here.text


def test_an_engine_that_fails_ends_its_server(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = threading.Event()

    def start(folder: str, settings: EngineSettings) -> Loop:
        loop = start_real_engine(folder, settings)
        step = loop.step

        def step_or_fail() -> StepOutputs | None:
            if broken.is_set():
                raise RuntimeError("the device is gone")
            return step()

        monkeypatch.setattr(loop, "step", step_or_fail)
        return loop

    monkeypatch.setattr("slipstream.llm.start_real_engine", start)
    with LLM(source, dtype="float32", cache_tokens=2048) as llm:
        server = llm.serve(**ANY_PORTS, background=True)
        assert complete(server)
        broken.set()
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code in (500, 503)
        assert "the device is gone" in answer.json()["error"]["message"]
        with pytest.raises(ServerFailed, match="the engine failed for good"):
            server.wait()
        assert repr(llm).endswith("RuntimeError: the device is gone>")
        with pytest.raises(ServerFailed, match="the engine is not running: RuntimeError"):
            llm.serve(**ANY_PORTS, background=True)


def test_a_name_that_no_model_can_have_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="'a/b' cannot be a model's name here"):
        llm.serve(**ANY_PORTS, background=True, model_name="a/b")


def test_a_busy_port_is_reported(llm: LLM) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ServerFailed, match=f"cannot use 127.0.0.1:{port}: Address already in use"
        ):
            llm.serve(**{**ANY_PORTS, "port": port}, background=True)
    assert len(llm.generate(PROMPT, max_tokens=2)[0].tokens) == 2


def test_a_server_may_need_a_key_and_have_another_name(llm: LLM) -> None:
    with llm.serve(**ANY_PORTS, background=True, api_key="k1", model_name="other") as server:
        url = f"{server.url}/v1/models"
        assert httpx.get(url).status_code == 401
        models = httpx.get(url, headers={"Authorization": "Bearer k1"}).json()["data"]
        assert "other" in [model["id"] for model in models]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-x"], "'-x' is no option of slipstream start"),
        (["--repo=/x"], "--repo=/x cannot be given here: the engine is this one"),
    ],
)
def test_options_that_name_another_model_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_options("127.0.0.1", 0, 0, 0, options)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("/models/tiny llama.gguf", "tiny-llama"),
        ("ensemble", "ensemble-model"),
    ],
)
def test_the_served_name_is_the_last_part_of_the_model(model: str, name: str) -> None:
    assert served_name(model) == name


def test_the_programs_of_the_guide_run(source: Path) -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    blocking = "llm.serve(port=8000)\n"
    program = "".join(block for block in blocks if block != blocking)
    program = program.replace('"smollm2-135m"', f'"{source}", dtype="float32", cache_tokens=4096')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^kind='(warm|cold)' bright=(True|False)$", done.stdout, re.MULTILINE)
    assert re.search(r"^http://127\.0\.0\.1:\d+ 127\.0\.0\.1:\d+ tiny$", done.stdout, re.MULTILINE)


SCRIPT = """
import sys
from slipstream import LLM
with LLM(sys.argv[1], dtype="float32", cache_tokens=2048) as llm:
    llm.serve(port=0, grpc_port=0, metrics_port=0)
    print("stopped", flush=True)
"""


def start_script(source: Path) -> tuple[subprocess.Popen[str], str]:
    """Run a program that serves until it is interrupted. Return it and the address of HTTP."""
    running = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(source)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if "OpenAI:" in line:
            return running, line.split()[1].removesuffix("/v1")
    raise AssertionError(running.wait())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_blocking_form_serves_until_it_is_interrupted(source: Path, number: int) -> None:
    running, url = start_script(source)
    status = httpx.get(f"{url}/v2/health/ready").status_code
    running.send_signal(number)
    output, _ = running.communicate(timeout=60)
    assert (status, running.returncode, output) == (200, 0, "stopped\n")


def test_the_server_ends_with_a_killed_program(source: Path) -> None:
    running, _ = start_script(source)
    children = children_of(running.pid)
    others = [process for child in children for process in children_of(child)]
    running.kill()
    running.communicate()
    assert len(children) == len(others) == 1
    deadline = time.monotonic() + 20
    while any(is_running(process) for process in [*children, *others]):
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""Two imported models with a LoRA adapter each, on one server. One is replaced under load."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest
import transformers
import tritonclient.grpc as triton_grpc
from command_line import run_cli
from real_server import RealServer
from tiny_adapters import save_adapter
from tiny_hf_folder import greedy_text, save_model

PROMPT = "What is ML?"
TOKENS = 8
LAYERS = {"one": 1, "two": 2, "newer": 3}
MODELS = ("one", "two")


@dataclass
class Place:
    folder: Path
    server: RealServer
    expected: dict[str, str] = field(default_factory=dict)  # by the name of a source or an adapter

    def add(self, *words: object) -> None:
        result = run_cli(["import", *words, "--repo", self.folder / "models"])
        assert result.exit_code == 0, result.output


def save_sources(folder: Path) -> dict[str, str]:
    """Save the models, and an adapter for each that is served. Return their answers."""
    expected = {}
    for name, layers in LAYERS.items():
        source = save_model(folder / name, num_hidden_layers=layers)
        expected[name] = greedy_text(source, PROMPT, TOKENS, special=True, dtype="bfloat16")
        if name in MODELS:
            base = transformers.AutoModelForCausalLM.from_pretrained(source)
            merged = save_adapter(
                base, folder / f"adapters of {name}" / f"{name}-lora", seed=layers
            )
            merged.save_pretrained(folder / f"{name} merged")
            for file in source.glob("token*"):
                (folder / f"{name} merged" / file.name).write_bytes(file.read_bytes())
            expected[f"{name}-lora"] = greedy_text(
                folder / f"{name} merged", PROMPT, TOKENS, special=True, dtype="float32"
            )
    assert len(set(expected.values())) == 5, expected
    return expected


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("several")
    expected = save_sources(folder)
    patch = pytest.MonkeyPatch()
    patch.setenv("SLIPSTREAM_HOME", str(folder / "log" / "home"))  # the server's
    patch.delenv("ENGINE_DEST_PATH", raising=False)
    server = RealServer(
        folder / "models",
        folder / "log",
        "-m",
        "slipstream.cli.compat.tritonserver",
        f"--model-repository={_with_models(folder)}",
        "--model-control-mode=poll",
        "--repository-poll-secs=1",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
    )
    place = Place(folder, server.wait(), expected)
    yield place
    server.close()
    patch.undo()


def _with_models(folder: Path) -> Path:
    for name in MODELS:
        words = ["-m", name, "-s", folder / name, "--lora-dir", folder / f"adapters of {name}"]
        result = run_cli(["import", *words, "--repo", folder / "models"])
        assert result.exit_code == 0, result.output
    return folder / "models"


def ask_generate(server: RealServer, model: str, adapter: str) -> str:
    body = {"text_input": PROMPT, "max_tokens": TOKENS}
    named = {"lora_name": adapter} if adapter else {}
    answer = httpx.post(
        f"http://{server.http}/v2/models/{model}/generate", json=body | named, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text_output"])


def ask_openai(server: RealServer, model: str, adapter: str) -> str:
    body = {"model": adapter or model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    answer = httpx.post(f"http://{server.http}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def ask_grpc(server: RealServer, model: str, adapter: str) -> str:
    text = triton_grpc.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(numpy.array([[PROMPT]], dtype=object))
    count = triton_grpc.InferInput("max_tokens", [1, 1], "INT32")
    count.set_data_from_numpy(numpy.array([[TOKENS]], dtype=numpy.int32))
    parameters = {"lora_name": adapter} if adapter else {}
    answers: list[Any] = []
    arrived = threading.Event()

    def receive(result: Any, error: Any) -> None:
        answers.append(error or result)
        arrived.set()

    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(receive)
        client.async_stream_infer(model, [text, count], parameters=parameters)
        assert arrived.wait(60)
        client.stop_stream()
    return str(answers[0].as_numpy("text_output").flatten()[0].decode())


@pytest.mark.parametrize("ask", [ask_generate, ask_openai, ask_grpc])
@pytest.mark.parametrize("model", MODELS)
def test_models_and_adapters_are_chosen_by_name(
    place: Place, ask: Callable[[RealServer, str, str], str], model: str
) -> None:
    assert ask(place.server, model, "") == place.expected[model]
    adapter = f"{model}-lora"
    assert ask(place.server, model, adapter) == place.expected[adapter]


def test_the_helper_models_are_not_offered(place: Place) -> None:
    listed = httpx.get(f"http://{place.server.http}/v1/models", timeout=60).json()["data"]
    names = [model["id"] for model in listed]
    assert sorted(names) == ["ensemble", "one", "one-lora", "two", "two-lora"]
    assert ask_openai(place.server, "two-ensemble", "") == place.expected["two"]


def test_models_that_start_together_divide_the_memory(place: Place) -> None:
    found = re.findall(r"(\S+) may take (\d+)% of the memory", place.server.log())
    # a model that is loaded again has another line
    shares = {name: int(share) for name, share in reversed(found)}
    both = [shares[name] for name in ("tensorrt_llm", "two-tensorrt_llm")]
    assert sum(both) == 100
    assert min(both) > 20


def test_list_says_which_models_are_served(place: Place) -> None:
    lines = run_cli(["list", "--repo", place.folder / "models"]).stdout.splitlines()
    assert [line.split()[0] for line in lines if " yes " in line] == ["one", "two"]


class Load:
    """Requests to one model, one after the other, until it is stopped."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._ask = ask
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(self._ask())
            except Exception as error:
                self.failures.append(repr(error))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


def test_one_is_replaced_under_load_and_none_of_the_other_fails(place: Place) -> None:
    server = place.server
    other = [
        Load(lambda: ask_generate(server, "one", "")),
        Load(lambda: ask_openai(server, "one", "one-lora")),
    ]
    replaced = Load(lambda: ask_generate(server, "two", ""))
    try:
        place.add("-m", "two", "-s", place.folder / "newer")
        deadline = time.monotonic() + 90
        while place.expected["newer"] not in replaced.answers:
            assert time.monotonic() < deadline, server.log()[-3000:]
            time.sleep(0.05)
        reached = [len(load.answers) for load in other]
        while any(len(load.answers) < had + 2 for load, had in zip(other, reached, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for load in (*other, replaced):
            load.stop()
    assert [load.failures for load in (*other, replaced)] == [[], [], []]
    assert set(other[0].answers) == {place.expected["one"]}
    assert set(other[1].answers) == {place.expected["one-lora"]}
    assert set(replaced.answers) == {place.expected["two"], place.expected["newer"]}
    for ask in (ask_generate, ask_openai, ask_grpc):
        assert ask(server, "two", "") == place.expected["newer"]


def test_a_model_is_added_and_removed_while_the_server_runs(place: Place) -> None:
    def models() -> set[str]:
        answer = httpx.get(f"http://{place.server.http}/v1/models", timeout=60)
        return {model["id"] for model in answer.json()["data"]}

    place.add("-m", "three", "-s", place.folder / "one")
    deadline = time.monotonic() + 90
    while "three" not in models():
        assert time.monotonic() < deadline, place.server.log()[-3000:]
        time.sleep(0.1)
    assert ask_generate(place.server, "three", "") == place.expected["one"]
    result = run_cli(["remove", "three", "--repo", place.folder / "models"])
    assert "Its engine stays: " in result.stdout
    while "three" in models():
        assert time.monotonic() < deadline, place.server.log()[-3000:]
        time.sleep(0.1)
    assert ask_openai(place.server, "one", "") == place.expected["one"]
    index = httpx.post(f"http://{place.server.http}/v2/repository/index", json={}, timeout=60)
    states = {row["name"]: row["state"] for row in index.json()}
    assert states["one"] == states["two"] == "READY"


def test_explicit_mode_adds_replaces_and_removes_a_model(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(place.folder / "log" / "home"))
    models = tmp_path / "models"

    def add(name: str, source: str) -> None:
        words = ["import", "-m", name, "-s", place.folder / source, "--repo", models]
        assert run_cli(words).exit_code == 0

    add("one", "one")
    server = RealServer(
        models,
        tmp_path / "log",
        "-m",
        "slipstream.cli.compat.tritonserver",
        f"--model-repository={models}",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
    )
    try:
        server.wait()

        def control(name: str, action: str, **parameters: bool) -> None:
            url = f"http://{server.http}/v2/repository/models/{name}/{action}"
            answer = httpx.post(url, json={"parameters": parameters}, timeout=120)
            assert answer.status_code == 200, answer.text

        add("two", "two")
        index = httpx.post(f"http://{server.http}/v2/repository/index", json={}, timeout=60).json()
        assert {row.get("state") for row in index if row["name"] == "two"} != {"READY"}
        for name in ("two-tensorrt_llm", "two"):
            control(name, "load")
        assert ask_generate(server, "two", "") == place.expected["two"]
        add("two", "newer")
        assert ask_generate(server, "two", "") == place.expected["two"], "until it is loaded again"
        control("two-tensorrt_llm", "load")
        assert ask_generate(server, "two", "") == place.expected["newer"]
        control("two", "unload", unload_dependents=True)
        body = {"text_input": PROMPT, "max_tokens": 1}
        url = f"http://{server.http}/v2/models/two/generate"
        assert httpx.post(url, json=body, timeout=60).status_code != 200
        assert ask_generate(server, "one", "") == place.expected["one"]
    finally:
        server.close()

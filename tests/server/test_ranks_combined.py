"""Two ranks together with what else a server does, compared with one rank over HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import text_samples
from rank_models import save_rank_model
from real_server import RealServer, limit_cache
from tiny_adapters import ALL_MODULES, save_adapter
from tiny_server import children_of, command_of, is_running, wait_for

from slipstream.repository.templates import write_repository
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.build import build_engine

MODEL = "tiny"
PROMPT = "The quick brown fox"
COLOURS = "(red|green|blue), (one|two) [a-z]{3}"
LONG = 400  # tokens of a stream that is still running when a rank is killed
START = ("-m", "slipstream.cli.main", "start", "--repo", "{}", "--dtype", "float32")
START += ("--device", "cpu", "--frontends", "1")
TRITONSERVER = ("-m", "slipstream.cli.compat.tritonserver", "--model-repository", "{}")
TRITONSERVER += ("--http-address=127.0.0.1", "--grpc-address=127.0.0.1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an engine with an adapter beside it."""
    import transformers

    folder = tmp_path_factory.mktemp("combined")
    tokenizer = text_samples.byte_level()
    vocabulary = Tokenizer.load(tokenizer).vocab_size
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": 512}
    model = save_rank_model("llama", folder / "model", **sizes)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    save_adapter(base, folder / "adapters" / "french", rank=8, modules=ALL_MODULES)
    for path in tokenizer.iterdir():
        shutil.copy(path, model)
    build_engine(model, folder / "engine", dtype="float32")
    return folder


class Served:
    """A server of the engine."""

    def __init__(
        self,
        place: Path,
        folder: Path,
        *flags: str,
        count: int = 1,
        program: tuple[str, ...] = START,
    ) -> None:
        repository = folder / "repository"
        engine = place / "engine"
        write_repository(repository, MODEL, engine, engine, 64)
        limit_cache(repository, 2048)
        config = repository / "tensorrt_llm" / "config.pbtxt"
        text = config.read_text().replace("{ count: 1", f"{{ count: {count}")
        for name, value in (
            ("lora_prefetch_dir", place / "adapters"),
            ("max_num_sequences", 8),
        ):
            text += f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        beams = r'("max_beam_width" value { string_value: ")[^"]*'
        text, found = re.subn(beams, r"\g<1>3", text)
        assert found == 1
        config.write_text(text)
        command = [word.format(repository) for word in program]
        self.server = RealServer(repository, folder / "log", *command, *flags).wait()
        self.url = f"http://127.0.0.1:{self.server.ports['HTTPService']}"

    def post(self, route: str, **fields: Any) -> dict[str, Any]:
        found = httpx.post(f"{self.url}{route}", json=fields, timeout=60)
        assert found.status_code == 200, found.text
        answer: dict[str, Any] = json.loads(found.text or "{}")
        return answer

    def generate(self, **fields: Any) -> Any:
        body = {"text_input": PROMPT, "max_tokens": 16, "end_id": -1, **fields}
        return self.post(f"/v2/models/{MODEL}/generate", **body)["text_output"]

    def complete(self, **fields: Any) -> list[str]:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "ignore_eos": True}
        body |= {"temperature": 0, **fields}
        return [choice["text"] for choice in self.post("/v1/completions", **body)["choices"]]

    def ready(self) -> bool:
        return httpx.get(f"{self.url}/v2/health/ready", timeout=60).status_code == 200

    def engines(self) -> dict[tuple[int, int], int]:
        """Return the processes of the engines, by replica and rank."""
        found = {}
        for child in children_of(self.server.process_id):
            command = command_of(child)
            if "engine_worker.process" in command:
                order = json.loads(command[command.index("{") :])
                rank = 0 if order["place"] is None else order["place"]["rank"]
                found[order["settings"]["replica"], rank] = child
        return found

    def close(self) -> None:
        self.server.close()


REQUESTS = {
    "greedy": lambda served: served.complete(),
    "sampled": lambda served: served.complete(temperature=1.0, seed=4, n=3),
    "guided": lambda served: served.complete(structured_outputs={"regex": COLOURS}, max_tokens=24),
    "beams": lambda served: served.generate(beam_width=3),
    "adapter": lambda served: served.complete(model="french"),
    "embeddings": lambda served: served.post("/v1/embeddings", model=MODEL, input=[PROMPT, "a"]),
    "triton": lambda served: served.generate(),
}


@pytest.fixture(scope="module")
def expected(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the answers of one rank."""
    folder = tmp_path_factory.mktemp("one")
    served = Served(place, folder, "--embeddings", "last", "--deterministic")
    try:
        return {name: ask(served) for name, ask in REQUESTS.items()}
    finally:
        served.close()


@pytest.fixture(scope="module")
def replicas(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two replicas of two ranks each."""
    folder = tmp_path_factory.mktemp("two")
    flags = ("--ranks", "2", "--embeddings", "last", "--deterministic")
    served = Served(place, folder, *flags, count=2)
    yield served
    served.close()


@pytest.mark.parametrize("kind", REQUESTS)
def test_replicas_of_two_ranks_answer_as_one_rank(replicas, expected, kind):
    found = REQUESTS[kind](replicas)
    if kind == "embeddings":
        pairs = zip(found["data"], expected[kind]["data"], strict=True)
        for vector, other in pairs:
            assert vector["embedding"] == pytest.approx(other["embedding"], rel=1e-4, abs=1e-5)
    else:
        assert found == expected[kind]


def test_the_requests_do_what_they_are_for(expected):
    assert re.fullmatch(COLOURS, expected["guided"][0])
    assert len(set(expected["sampled"])) == 3
    assert len(expected["beams"]) == 3
    assert expected["adapter"] != expected["greedy"]
    assert expected["triton"] == expected["greedy"][0]


class Stream:
    """A streamed answer that is read in a thread."""

    def __init__(self, served: Served, number: int) -> None:
        self._url = f"{served.url}/v2/models/{MODEL}/generate_stream"
        self._body = {"text_input": f"{number} {PROMPT}", "max_tokens": LONG, "end_id": -1}
        self.began = threading.Event()
        self.text = ""
        self.error = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body | {"stream": True}, timeout=60) as got:
            for line in got.iter_lines():
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    self.error += event.get("error", "")
                    self.text += event.get("text_output", "")
                    self.began.set()
        self.began.set()

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_a_killed_rank_ends_the_streams_of_its_replica_only(replicas):
    whole = [Stream(replicas, number) for number in range(4)]
    for stream in whole:
        stream.end()
    assert [stream.error for stream in whole] == [""] * 4
    before = replicas.engines()
    assert sorted(before) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    streams = [Stream(replicas, number) for number in range(4)]
    for stream in streams:
        assert stream.began.wait(60)
    os.kill(before[0, 1], signal.SIGKILL)
    for stream in streams:
        stream.end()
    failed = [stream for stream in streams if stream.error]
    assert 0 < len(failed) < len(streams)
    for stream in failed:
        assert "rank 1: killed by SIGKILL" in stream.error
    for stream, other in zip(streams, whole, strict=True):
        if not stream.error:
            assert stream.text == other.text
    assert replicas.ready()
    wait_for(lambda: len(replicas.engines()) == 4, 60)
    after = replicas.engines()
    assert [after[1, other] for other in (0, 1)] == [before[1, other] for other in (0, 1)]
    assert not {after[0, 0], after[0, 1]} & {before[0, 0], before[0, 1]}
    wait_for(lambda: not any(is_running(before[0, other]) for other in (0, 1)))


@pytest.fixture(scope="module")
def unloading(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine of two ranks that is unloaded while idle."""
    folder = tmp_path_factory.mktemp("idle")
    flags = ("--ranks", "2", "--idle-unload", "1", "--deterministic")
    served = Served(place, folder, *flags)
    yield served
    served.close()


def test_all_ranks_of_an_idle_engine_end_and_the_next_request_starts_them(unloading, expected):
    assert unloading.complete() == expected["greedy"]
    before = unloading.engines()
    wait_for(lambda: not unloading.engines(), 60)
    assert not any(is_running(process) for process in before.values())
    assert unloading.ready()
    assert unloading.complete() == expected["greedy"]
    assert sorted(unloading.engines()) == [(0, 0), (0, 1)]
    assert unloading.complete(model="french") == expected["adapter"]


def test_a_model_of_two_ranks_is_unloaded_and_loaded_again(place, tmp_path, expected):
    flags = ("--ranks=2", "--model-control-mode=explicit", "--load-model=*")
    served = Served(place, tmp_path, *flags, program=TRITONSERVER)
    try:
        assert served.generate() == expected["triton"]
        before = served.engines()
        served.post("/v2/repository/models/tensorrt_llm/unload")
        wait_for(lambda: not served.engines(), 60)
        assert not any(is_running(process) for process in before.values())
        served.post("/v2/repository/models/tensorrt_llm/load")
        assert served.generate() == expected["triton"]
        assert sorted(served.engines()) == [(0, 0), (0, 1)]
    finally:
        served.close()

"""What benchmarks/online.py asks of servers and load generators of others, and how it reads them."""

import json
import sys
from types import SimpleNamespace

import pytest
from serving import clients, servers
from serving.cells import Cell
from serving.load import Target
from serving.shapes import Model

CELL = Cell(4, 16, 512, 128, sampled=True, seed=3)


@pytest.fixture
def run(tmp_path):
    return clients.Run(Target("bench", 8000), CELL, tmp_path / "model", tmp_path)


def options(arguments):
    """Return the options of a command: name → the words that follow it."""
    found = {}
    for word in arguments:
        if word.startswith("--"):
            values = found.setdefault(word, [])
        elif found:
            values.append(word)
    return found


def test_vllm_is_started_without_options_that_its_releases_have_dropped(monkeypatch, tmp_path):
    started = []

    def start(*given):
        started.append(given)
        return SimpleNamespace(name=given[0])

    monkeypatch.setattr(servers, "Peer", start)
    model = Model("tiny", tmp_path / "engine", "bfloat16", tmp_path / "hf")
    servers.start_vllm(model, tmp_path / "run", servers.ServerOptions())
    command = started[0][1]
    assert command[1:3] == ["serve", str(model.hugging_face)]
    assert set(options(command)) == {"--port", "--host", "--served-model-name", "--dtype"}


def test_the_load_of_vllms_client_is_that_of_the_cell(run):
    given = options(clients._vllm_arguments(run))
    assert given["--random-input-len"] == ["512"]
    assert given["--random-output-len"] == ["128"]
    assert given["--num-prompts"] == ["16"]
    assert given["--max-concurrency"] == ["4"]
    assert given["--temperature"] + given["--top-p"] == ["0.7", "0.9"]


def test_the_result_of_vllms_client_is_read(run):
    result = {"completed": 15, "output_throughput": 50.5, "request_throughput": 2.0}
    result |= {"duration": 7.5, "mean_tpot_ms": 4.0}
    for name in ("ttft", "itl"):
        result |= {f"mean_{name}_ms": 1.0, f"median_{name}_ms": 2.0, f"p99_{name}_ms": 3.0}
    (run.folder / "result.json").write_text(json.dumps(result))
    found = clients._read_vllm(run)
    assert found["tokens_per_second"] == 50.5
    assert found["errors"] == ["1 requests failed"]
    assert (found["ttft"].mean, found["itl"].p50, found["itl"].p99) == (1.0, 2.0, 3.0)


def test_the_report_of_aiperf_is_read(run):
    spread = {"avg": 1.5, "p50": 1.0, "p99": 9.0}
    report = {"output_token_throughput": {"avg": 80.0}, "request_throughput": {"avg": 4.0}}
    report |= {"request_count": {"avg": 16.0}, "time_to_first_token": spread}
    (run.folder / "deep").mkdir()
    (run.folder / "deep" / "profile_export_aiperf.json").write_text(json.dumps(report))
    found = clients._read_genai(run, "profile_export_aiperf.json")
    assert (found["tokens_per_second"], found["completed"], found["errors"]) == (80.0, 16, [])
    assert found["ttft"].p99 == 9.0
    assert found["itl"] is None


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_client_may_look_for_the_hub_only_if_it_must(run, monkeypatch, is_offline):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    program = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(repr(os.environ.get('HF_HUB_OFFLINE')))"
    client = clients.ThirdParty(
        "client",
        sys.executable,
        lambda run: ["-c", program, str(run.folder / "seen")],
        lambda run: {"tokens_per_second": 1.0},
        is_offline,
    )
    client.measure("server", run)
    assert (run.folder / "seen").read_text() == repr("1" if is_offline else None)

"""Upstream's own checks of a server, rewritten: speculative decoding, base and custom metrics."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from real_server import RealServer, build_engine, write_repository
from tiny_hf_folder import greedy_text, save_model
from tritonclient.utils import np_to_triton_dtype

from slipstream.cli.commands import run_command
from slipstream.cli.compat.speculative_client import create_parser, speculate
from slipstream.cli.connections import connect_grpc

COMPOSING = ("preprocessing", "tensorrt_llm", "postprocessing")
PHASES = ("compute_input", "compute_infer", "compute_output")
# thirteen prompts and the number of tokens that each asks for
REQUESTS = [(f"Tell me more about number {index}.", 6 + index) for index in range(13)]
# label and category of a metric: its key in the log
LOG_KEYS = {
    "request_type=context": "Context Requests",
    "request_type=scheduled": "Scheduled Requests",
    "request_type=max": "Max Request Count",
    "request_type=active": "Active Request Count",
    "request_type=waiting": "Waiting Requests",
    "memory_type=pinned": "Runtime Pinned Memory Usage",
    "memory_type=gpu": "Runtime GPU Memory Usage",
    "memory_type=cpu": "Runtime CPU Memory Usage",
    "kv_cache_block_type=tokens_per": "Tokens per KV cache block",
    "kv_cache_block_type=used": "Used KV cache blocks",
    "kv_cache_block_type=free": "Free KV cache blocks",
    "kv_cache_block_type=max": "Max KV cache blocks",
    "kv_cache_block_type=reused": "Reused KV cache blocks",
    "kv_cache_block_type=fraction": "Fraction used KV cache blocks",
    "inflight_batcher_specific_metric=total_context_tokens": "Total Context Tokens",
    "inflight_batcher_specific_metric=micro_batch_id": "MicroBatch ID",
    "inflight_batcher_specific_metric=generation_requests": "Generation Requests",
    "inflight_batcher_specific_metric=paused_requests": "Paused Requests",
    "general_type=iteration_counter": "Iteration Counter",
    "general_type=timestamp": "Timestamp",
    "disaggregated_serving_type=kv_cache_transfer_ms": "KV cache transfer time",
    "disaggregated_serving_type=request_count": "Request count",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama", decided=False)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server of the v0.18 repository. The BLS model's draft model is the target itself."""
    folder = tmp_path_factory.mktemp("served")
    repository = write_repository(
        folder / "models",
        "inflight_batcher_llm",
        "v0.18",
        build_engine(model, folder / "engine"),
        decoupled_mode="False",
        tensorrt_llm_draft_model_name="tensorrt_llm",
    )
    running = RealServer(repository, folder / "run").wait()
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc) as found:
        yield found


def ask(client: triton.InferenceServerClient, model: str, prompt: str, **fields: Any) -> str:
    """Return the text of one answer. Numbers are sent as INT32 or FP32."""
    arrays = {"text_input": np.array([[prompt.encode()]], dtype=object)}
    for name, value in fields.items():
        kind = {int: np.int32, float: np.float32, bool: np.bool_}[type(value)]
        arrays[name] = np.array([[value]], dtype=kind)
    inputs = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    answer = client.infer(model, inputs)
    return str(answer.as_numpy("text_output").reshape(-1)[0].decode())


@pytest.fixture(scope="module")
def control(client: triton.InferenceServerClient) -> list[str]:
    """The answers of upstream's default requests."""
    return [
        ask(client, "ensemble", prompt, max_tokens=count, temperature=1.0)
        for prompt, count in REQUESTS
    ]


class TestSampling:
    """Upstream's clients send a temperature of 1.0 by default, and expect greedy answers."""

    def test_a_temperature_alone_is_greedy_as_in_transformers(
        self, client: triton.InferenceServerClient, control: list[str], model: Path
    ) -> None:
        for (prompt, count), answer in zip(REQUESTS, control, strict=True):
            assert answer == prompt + greedy_text(
                model, prompt, count, special=True, dtype="float32"
            )
        prompt, count = REQUESTS[-1]
        for more in ({"top_k": 1, "top_p": 0.9}, {"top_k": 0, "top_p": 0.0}, {}):
            again = ask(client, "ensemble", prompt, max_tokens=count, temperature=5.0, **more)
            assert again == control[-1]
        drawn = {
            ask(client, "ensemble", prompt, max_tokens=count, temperature=1.0, top_p=1.0)
            for _ in range(3)
        }
        assert len({*drawn, control[-1]}) == 4  # this model's answers show whether it sampled

    def test_a_client_that_speculates_gets_the_text_of_the_target_model(
        self, server: RealServer, control: list[str]
    ) -> None:
        words = ["-p", "", "-u", server.grpc, "--temperature", "1.0"]
        given = vars(create_parser().parse_args(words))
        connection = connect_grpc(server.grpc)
        try:
            found = [
                speculate(
                    Namespace(**given | {"prompt": prompt, "output_len": count}),
                    connection,
                    connection,
                )
                for prompt, count in REQUESTS
            ]
        finally:
            connection.close()
        assert found == control

    def test_bls_with_a_draft_model_gives_the_text_of_the_target_model(
        self, client: triton.InferenceServerClient, control: list[str]
    ) -> None:
        found = [
            ask(
                client,
                "tensorrt_llm_bls",
                prompt,
                max_tokens=count,
                temperature=1.0,
                num_draft_tokens=5,
            )
            for prompt, count in REQUESTS
        ]
        assert found == control

    def test_the_workspaces_client_samples_if_it_is_asked_to(
        self, server: RealServer, capsys: pytest.CaptureFixture[str], control: list[str]
    ) -> None:
        prompt, count = REQUESTS[-1]
        words = ["-u", server.grpc, "-p", prompt, "-o", str(count), "--temperature", "1.0"]
        assert run_command("end-to-end-client", words) == 0
        assert capsys.readouterr().out == control[-1] + "\n"
        assert run_command("end-to-end-client", [*words, "--top-p", "1.0"]) == 0
        assert capsys.readouterr().out != control[-1] + "\n"


def scrape(server: RealServer) -> list[str]:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def base_metrics(server: RealServer) -> dict[str, dict[str, int]]:
    """Return the base metrics by model, read as upstream's test reads them."""
    found: dict[str, dict[str, int]] = {}
    for line in scrape(server):
        if line.startswith("nv_inference") and "histogram" not in line:
            name, labels, value = line.replace("{", " {").split()
            metrics = found.setdefault(labels.split('"')[1], {})
            metrics[name.removeprefix("nv_inference_")] = int(value)
    return found


def run_ensemble(client: triton.InferenceServerClient) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(
            threads.map(lambda item: ask(client, "ensemble", item[0], max_tokens=item[1]), REQUESTS)
        )


def test_base_metrics_of_an_ensemble_and_its_steps(
    server: RealServer, client: triton.InferenceServerClient
) -> None:
    before = base_metrics(server)
    run_ensemble(client)
    after = base_metrics(server)
    names = ("ensemble", *COMPOSING)
    spent = {
        name: {key: value - before[name][key] for key, value in after[name].items()}
        for name in names
    }
    assert {len(spent[name]) for name in names} == {len(spent["ensemble"])}
    for count in ("request_success", "count", "exec_count"):
        assert {spent[name][count] for name in names} == {len(REQUESTS)}, count
    for count in ("request_failure", "pending_request_count"):
        assert {spent[name][count] for name in names} == {0}, count
    for phase in ("request", *PHASES):
        key = f"{phase}_duration_us"
        parts = [spent[name][key] for name in COMPOSING]
        assert min(parts) > 0, (phase, parts)
        # each of the counters is cut to whole microseconds
        assert spent["ensemble"][key] >= sum(parts) - len(parts), phase
    for name in names:
        phases = ("queue", *PHASES)
        total = sum(spent[name][f"{phase}_duration_us"] for phase in phases)
        assert abs(spent[name]["request_duration_us"] - total) <= 2 * len(phases), name


def test_statistics_show_the_durations_of_the_metrics(
    server: RealServer, client: triton.InferenceServerClient
) -> None:
    run_ensemble(client)
    ask(client, "tensorrt_llm_bls", "a", max_tokens=3)
    metrics = base_metrics(server)
    statistics = client.get_inference_statistics(as_json=True)["model_stats"]
    found = {entry["name"]: entry["inference_stats"] for entry in statistics}
    for name in ("ensemble", "tensorrt_llm_bls", *COMPOSING):
        durations = {phase: int(found[name][phase].get("ns", 0)) for phase in ("queue", *PHASES)}
        assert all(durations[phase] > 0 for phase in PHASES), (name, durations)
        assert sum(durations.values()) == int(found[name]["success"]["ns"]), name
        shown = {phase: metrics[name][f"{phase}_duration_us"] for phase in durations}
        assert shown == {phase: ns // 1000 for phase, ns in durations.items()}, name


def log_level(server: RealServer, level: int) -> None:
    body = json.dumps({"log_verbose_level": level}).encode()
    urllib.request.urlopen(f"http://{server.http}/v2/logging", body, timeout=30).close()


def custom_metrics(server: RealServer, model: str) -> dict[str, str]:
    """Return the engine's metrics by their keys in the log, read as upstream's test reads them."""
    found = {}
    for line in scrape(server):
        if line.startswith("nv_trt_llm") and f'model="{model}"' in line:
            labels, value = re.sub(r"^.*?{", "{", line).split()
            (category,) = [
                label
                for label in labels.replace('"', "").strip("{}").split(",")
                if not label.startswith(("model", "version"))
            ]
            found[LOG_KEYS[category]] = value
    return found


def iterations(server: RealServer, since: int) -> list[dict[str, Any]]:
    lines = [line for line in server.log()[since:].splitlines() if "Active Request Count" in line]
    return [json.loads(re.sub(r"^.*?{", "{", line)) for line in lines]


def test_the_last_iteration_in_the_log_has_the_numbers_of_the_metrics(
    server: RealServer, client: triton.InferenceServerClient
) -> None:
    run_ensemble(client)
    quiet = len(server.log())
    assert "Active Request Count" not in server.log()
    log_level(server, 3)
    run_ensemble(client)
    deadline = time.monotonic() + 30
    while True:
        metrics = custom_metrics(server, "tensorrt_llm")
        logged = iterations(server, quiet)
        if metrics["Active Request Count"] == "0" and logged[-1]["Active Request Count"] == 0:
            break
        assert time.monotonic() < deadline
    log_level(server, 0)
    last = next(
        one
        for one in reversed(logged)
        if str(one["Iteration Counter"]) == metrics["Iteration Counter"]
    )
    assert set(last) == set(metrics) == set(LOG_KEYS.values())
    for key, value in metrics.items():
        if key != "Timestamp":
            assert int(last[key]) == int(value), key
    shown = datetime.fromtimestamp(int(metrics["Timestamp"]) // 1_000_000)
    assert abs(shown - datetime.now()) < timedelta(minutes=1)
    logged_at = datetime.strptime(last["Timestamp"], "%m-%d-%Y %H:%M:%S.%f")
    assert timedelta(0) <= logged_at - shown < timedelta(seconds=2)
    counters = [one["Iteration Counter"] for one in logged]
    assert max(one["Active Request Count"] for one in logged) > 0
    assert len(set(counters)) >= REQUESTS[-1][1]  # one for each step, not ten a second
    ask(client, "ensemble", "quiet again", max_tokens=2)
    ask(client, "ensemble", "quiet again", max_tokens=2)
    before = len(server.log())
    run_ensemble(client)
    assert iterations(server, before) == []

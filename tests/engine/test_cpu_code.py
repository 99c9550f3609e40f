"""Engines that run compiled CPU code: the same tokens as torch, whatever the threads, the chunks and
the other requests are.
"""

import numpy as np
import pytest
import torch
from run_engine import engine, generate, logits_of, run_all
from tiny_models import config_of, engine_tensors, random_model

from slipstream.engine.cpu.runner import CpuRunner
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.engine.with_torch.runner import Runner
from slipstream.weights.build import build_engine

PROMPTS = [[5, 6, 7], list(range(60)), [9] * 40, [1, 2] * 10, [33]]
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3", "phi3", "gptj", "falcon")
LONGEST = 128


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return engine_tensors(random_model(config_of(request.param)))


@pytest.fixture(scope="module")
def llama():
    return engine_tensors(random_model(config_of("llama")))


def start(model, dtype="float32", **settings):
    spec, tensors = model
    chosen = EngineSettings(
        dtype=dtype, device="cpu", **{"cache_tokens": 2048, "block_tokens": 16, **settings}
    )
    return create_engine(spec, dict(tensors), chosen, LONGEST)


def test_tokens_are_those_of_torch(family):
    compiled = start(family)
    assert isinstance(compiled.runner, CpuRunner)
    plain = start(family, cpu_code="off")
    assert isinstance(plain.runner, Runner)
    assert generate(compiled, PROMPTS, max_tokens=24) == generate(plain, PROMPTS, max_tokens=24)


def test_logits_are_those_of_torch(family):
    spec, tensors = family
    sequence = PROMPTS[1]
    loop = start(family)
    request = GenerateRequest(0, sequence, SamplingParams(max_tokens=1, context_logits=True))
    found = context_logits(loop, request, spec.vocab_size)
    [expected] = logits_of(spec, dict(tensors), torch.float32, [sequence])
    assert np.abs(found - expected.numpy()).max() < 1e-4


def context_logits(loop, request, vocabulary):
    loop.submit(request)
    found = []
    while loop.has_work():
        outputs = loop.step()
        for scores in outputs.scores.values() if outputs is not None else ():
            found.append(np.frombuffer(scores.context_logits, dtype=np.float32))
    return np.concatenate(found).reshape(-1, vocabulary)


@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize(
    "settings",
    [
        {"threads": 1},
        {"threads": 3},
        {"step_tokens": 7},
        {"cache_tokens": 160},  # requests are preempted
        {"max_rows": 1},
        {"block_tokens": 10},
    ],
    ids=str,
)
def test_nothing_around_a_request_changes_its_tokens(llama, settings, dtype, deterministic):
    own = {"threads": 2, "policy": "max_utilization"}
    loop = start(llama, dtype, deterministic=deterministic, **own)
    expected = generate(loop, PROMPTS, max_tokens=40, log_probs=True)
    other = start(llama, dtype, deterministic=deterministic, **{**own, **settings})
    assert generate(other, PROMPTS, max_tokens=40, log_probs=True) == expected


def test_log_probabilities_are_bitwise_the_same_in_batches_and_chunks(llama):
    def log_probs(**settings):
        requests = [
            GenerateRequest(i, prompt, SamplingParams(max_tokens=20, log_probs=True))
            for i, prompt in enumerate(PROMPTS)
        ]
        return run_all(start(llama, **settings), requests).log_probs

    expected = log_probs()
    assert log_probs(step_tokens=5, threads=1) == expected
    assert log_probs(max_rows=1, threads=4) == expected


def test_reasons_for_torch_are_logged(llama, caplog):
    caplog.set_level("INFO")
    start(llama, dtype="float16")
    assert "torch computes this model on the CPU: activations are float16" in caplog.text
    caplog.clear()
    start(llama, cpu_code="off")
    assert "it is switched off" in caplog.text


def test_an_unknown_level_is_refused(llama):
    with pytest.raises(ValueError, match="cpu_code must be auto, off or one of"):
        start(llama, cpu_code="mmx")


def test_an_engine_folder_runs_compiled_code(tmp_path):
    random_model(config_of("llama")).save_pretrained(tmp_path / "hf")
    folder = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="bfloat16")
    loop = engine(folder, dtype="bfloat16")
    assert isinstance(loop.runner, CpuRunner)
    plain = engine(folder, dtype="bfloat16", cpu_code="off")
    found = np.array(generate(loop, PROMPTS, max_tokens=16))
    expected = np.array(generate(plain, PROMPTS, max_tokens=16))
    assert (found == expected).mean() > 0.8  # two tokens may nearly tie in bfloat16

"""Pooled states of prompts, however they are computed, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from run_engine import engine, greedy_choices
from run_outputs import RunOutputs, run
from tiny_adapters import save_adapter
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.weights.build import build_engine

KINDS = ("last", "mean", "weightedmean", "cls")
WAYS: dict[str, dict[str, Any]] = {"one step": {}, "in steps of 7 tokens": {"step_tokens": 7}}


def save_random(model_class: Any, config: Any, folder: Path) -> Any:
    torch.manual_seed(7)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    place = tmp_path_factory.mktemp("pooling")
    model = random_model(config_of("llama", max_position_embeddings=256)).eval()
    model.save_pretrained(place / "hf")
    return model, build_engine(place / "hf", place / "engine", dtype="float32")


def some_prompts(count: int, length: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, VOCABULARY, (length + i,), generator=generator).tolist()
        for i in range(count)
    ]


def expected(model: Any, prompt: list[int], kind: str) -> np.ndarray:
    """Return the pooled vector of the last hidden states, which are normalised."""
    with torch.inference_mode():
        states = model(torch.tensor([prompt])).last_hidden_state[0].double()
    weights = {
        "last": torch.arange(len(prompt)) == len(prompt) - 1,
        "cls": torch.arange(len(prompt)) == 0,
        "mean": torch.ones(len(prompt)),
        "weightedmean": torch.arange(1, len(prompt) + 1),
    }[kind].double()
    return (weights @ states / weights.sum()).numpy()


def pooled(outputs: RunOutputs, request_id: int = 0) -> np.ndarray:
    return np.frombuffer(outputs.scores[request_id].pooled, dtype=np.float32)


def test_a_step_has_room_for_pooled_and_sampled_states_of_every_token(llama):
    model, folder = llama
    [prompt] = some_prompts(1, length=64)  # as many tokens as a step has memory for at first
    outputs = run(
        engine(folder), [GenerateRequest(0, prompt, SamplingParams(max_tokens=1, pooling="mean"))]
    )
    np.testing.assert_allclose(pooled(outputs), expected(model.model, prompt, "mean"), atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_pooled_states_equal_those_of_transformers(llama, way):
    model, folder = llama
    loop = engine(folder, **WAYS[way])
    prompts = [*some_prompts(7), [5]]
    kinds = [*KINDS, "last", "mean", "", "last"]
    outputs = run(
        loop,
        [
            GenerateRequest(
                i, prompt, SamplingParams(max_tokens=12 if not kind else 1, pooling=kind)
            )
            for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
        ],
    )
    for i, kind in enumerate(kinds):
        if kind:
            assert (outputs.tokens[i], outputs.reasons[i]) == ([], "stop")
            found = pooled(outputs, i)
            np.testing.assert_allclose(found, expected(model.model, prompts[i], kind), atol=1e-5)
        else:  # a request that generates in the same steps
            tokens = outputs.tokens[i]
            chosen = greedy_choices(model, [prompts[i] + tokens])[0]
            assert tokens == chosen[len(prompts[i]) - 1 : -1]
    assert loop.stats().output_tokens == 12


def test_a_preempted_prompt_is_pooled_once(llama):
    model, folder = llama
    loop = engine(folder, policy="max_utilization", cache_tokens=224, block_tokens=8, step_tokens=4)
    prompts = some_prompts(3)
    long = prompts[2] * 3
    parameters = [SamplingParams(max_tokens=80), SamplingParams(max_tokens=80)]
    parameters.append(SamplingParams(max_tokens=1, pooling="mean"))
    outputs = run(
        loop,
        [
            GenerateRequest(i, prompt, sampling)
            for i, (prompt, sampling) in enumerate(
                zip([*prompts[:2], long], parameters, strict=True)
            )
        ],
    )
    assert loop.stats().preemptions > 0
    np.testing.assert_allclose(pooled(outputs, 2), expected(model.model, long, "mean"), atol=1e-5)


def test_cached_blocks_are_used_for_the_last_token_only(llama):
    model, folder = llama
    loop = engine(folder, block_tokens=8)
    prompt = some_prompts(1)[0]
    run(loop, [GenerateRequest(0, prompt, SamplingParams(max_tokens=1))])
    for number, kind in enumerate(KINDS, 1):
        before = loop.stats().cached_prompt_tokens
        outputs = run(
            loop, [GenerateRequest(number, prompt, SamplingParams(max_tokens=1, pooling=kind))]
        )
        found = loop.stats().cached_prompt_tokens - before
        assert found == (32 if kind == "last" else 0)
        np.testing.assert_allclose(
            pooled(outputs, number), expected(model.model, prompt, kind), atol=1e-5, err_msg=kind
        )


def test_an_adapter_changes_the_pooled_states(llama, tmp_path):
    model, folder = llama
    merged = save_adapter(model, tmp_path / "adapter")
    source = AdapterSource(folder=str(tmp_path / "adapter"))
    prompt = some_prompts(1)[0]
    requests = [
        GenerateRequest(
            number,
            prompt,
            SamplingParams(max_tokens=1, pooling=kind),
            adapter=1,
            adapter_name="adapter",
            adapter_source=source,
        )
        for number, kind in enumerate(("last", "mean"))
    ]
    outputs = run(engine(folder), requests)
    for number, kind in enumerate(("last", "mean")):
        wanted = expected(merged.model, prompt, kind)
        np.testing.assert_allclose(pooled(outputs, number), wanted, atol=1e-5)
        assert np.abs(wanted - expected(model.model, prompt, kind)).max() > 1e-2


def test_a_pooling_that_does_not_exist_is_refused(llama):
    request = GenerateRequest(0, [1], SamplingParams(max_tokens=1, pooling="max"))
    outputs = run(engine(llama[1]), [request])
    assert outputs.reasons[0] == "error"
    assert "pooling must be one of last, mean" in outputs.errors[0]


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "LlamaModel"), ("mistral", "MistralModel"), ("qwen3", "Qwen3Model")],
)
def test_a_bare_model_is_imported_without_an_output_layer(tmp_path, family, name):
    model = save_random(getattr(hf, name), config_of(family), tmp_path / "hf")
    loop = engine(build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32"))
    prompt = some_prompts(1)[0]
    outputs = run(
        loop,
        [
            GenerateRequest(i, prompt, SamplingParams(max_tokens=1, pooling=kind))
            for i, kind in enumerate(("last", "mean"))
        ],
    )
    for i, kind in enumerate(("last", "mean")):
        np.testing.assert_allclose(pooled(outputs, i), expected(model, prompt, kind), atol=1e-5)


@pytest.mark.parametrize(("family", "labels"), [("qwen2", 1), ("llama", 3)])
def test_a_score_layer_gives_the_logits_of_transformers(tmp_path, family, labels):
    name = {"qwen2": "Qwen2", "llama": "Llama"}[family] + "ForSequenceClassification"
    config = config_of(family, num_labels=labels, pad_token_id=0)
    model = save_random(getattr(hf, name), config, tmp_path / "hf")
    loop = engine(
        build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32"), step_tokens=16
    )
    prompt = [token or 1 for token in some_prompts(1)[0]]  # 0 would count as padding
    outputs = run(loop, [GenerateRequest(0, prompt, SamplingParams(max_tokens=1, pooling="score"))])
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0].numpy()
    assert wanted.shape == (labels,)
    np.testing.assert_allclose(pooled(outputs), wanted, atol=1e-5)

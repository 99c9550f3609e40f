"""Settings of the KV cache: windows and sinks change the tokens, the size of the cache and host
memory do not.
"""

import random

import pytest
import torch
from run_engine import engine, generate, run_all
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.engine.cache import host_cache
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.weights.build import build_engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("kv")
    model = random_model(
        config_of("llama", max_position_embeddings=256, attn_implementation="eager")
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(4.0)  # so that tokens depend on what attention sees
    model.save_pretrained(place / "hf")
    return model, build_engine(place / "hf", place / "engine", dtype="float32")


def prompts(count: int, length: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, VOCABULARY, (length + 3 * i,), generator=generator).tolist()
        for i in range(count)
    ]


def choices_with(model, sequence: list[int], windows: list[int], sinks: int) -> list[int]:
    """Return what transformers' model chooses after every prefix when its layers see only what the
    window allows.
    """
    position = torch.arange(len(sequence))
    layers = model.model.layers
    hooks = []
    for index, layer in enumerate(layers):
        window = windows[index % len(windows)]
        near = position[None, :] > position[:, None] - (window - sinks)
        seen = (near | (position < sinks)[None, :]) & (position[None, :] <= position[:, None])
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[
            None, None
        ]

        def show(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(layer.register_forward_pre_hook(show, with_kwargs=True))
    try:
        with torch.inference_mode():
            return model(torch.tensor([sequence])).logits[0].argmax(-1).tolist()
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(("windows", "sinks"), [([16], 0), ([24], 4), ([12, 40], 0), ([300], 0)])
def test_a_window_attends_to_the_last_tokens_and_the_sinks_only(model, windows, sinks):
    reference, folder = model
    asked = prompts(3)
    for more in ({}, {"step_tokens": 13, "block_tokens": 8}):
        answers = generate(
            engine(folder, attention_windows=windows, sink_tokens=sinks, **more),
            asked,
            max_tokens=24,
        )
        for prompt, answer in zip(asked, answers, strict=True):
            expected = choices_with(reference, prompt + answer, windows, sinks)
            assert answer == expected[len(prompt) - 1 : -1]
    if windows != [300]:
        assert answers != generate(engine(folder), asked, max_tokens=24)


@pytest.mark.parametrize(("windows", "sinks"), [([16], 0), ([24], 4)])
@pytest.mark.parametrize(
    "more", [{}, {"policy": "max_utilization"}, {"lookup_tokens": 3}, {"host_cache_bytes": 1 << 18}]
)
def test_requests_longer_than_the_cache_run_with_a_sliding_window(model, windows, sinks, more):
    """Blocks outside the window are released: 150 tokens of cache serve several requests of 230
    tokens at the same time.
    """
    reference, folder = model
    loop = engine(
        folder,
        attention_windows=windows,
        sink_tokens=sinks,
        cache_tokens=150,
        block_tokens=8,
        step_tokens=24,
        **more,
    )
    asked = [*prompts(2, length=190), prompts(1)[0]]
    for group in (asked, asked[:1], asked[:1]):
        answers = generate(loop, group, max_tokens=35)
        for prompt, answer in zip(group, answers, strict=True):
            assert (
                answer
                == choices_with(reference, prompt + answer, windows, sinks)[len(prompt) - 1 : -1]
            )
    # The last run reuses only the end of the cached prompt; the beginning was evicted.
    assert loop.stats().cached_prompt_tokens >= 184


def test_a_window_wider_than_the_cache_does_not_make_a_request_fit(model):
    loop = engine(model[1], attention_windows=[200], cache_tokens=150, block_tokens=8)
    answers = run_all(loop, [GenerateRequest(1, prompts(1)[0] * 3, SamplingParams(max_tokens=40))])
    assert (
        answers.errors[1]
        == "prompt (180 tokens) and max_tokens (40) exceed the KV cache, 144 tokens"
    )


def test_a_layer_with_full_attention_keeps_every_block(model):
    """A window of some layers only: the others attend to the whole sequence."""
    loop = engine(model[1], attention_windows=[16, 300], cache_tokens=150, block_tokens=8)
    answers = run_all(loop, [GenerateRequest(1, prompts(1)[0] * 3, SamplingParams(max_tokens=40))])
    assert "exceed the KV cache" in answers.errors[1]


def test_sinks_without_a_larger_window_are_refused():
    for windows, sinks in (((), 4), ((4,), 4)):
        with pytest.raises(ValueError, match="sink tokens need a larger attention window"):
            EngineSettings(attention_windows=windows, sink_tokens=sinks)
    with pytest.raises(ValueError, match="attention windows must be at least 1"):
        EngineSettings(attention_windows=(0,))


def test_host_memory_restores_evicted_blocks(model):
    _, folder = model
    asked = prompts(6)
    plain = [generate(engine(folder), [prompt], max_tokens=10)[0] for prompt in asked]
    cached = {}
    for host_bytes in (0, 1 << 20):
        loop = engine(
            folder, cache_tokens=128, block_tokens=8, max_rows=1, host_cache_bytes=host_bytes
        )
        for _ in range(2):
            for prompt, answer in zip(asked, plain, strict=True):
                assert generate(loop, [prompt], max_tokens=10) == [answer]
        cached[host_bytes] = loop.stats().cached_prompt_tokens
    assert cached[0] == 0, "each of the others pushed it out"
    assert cached[1 << 20] == sum((len(prompt) - 1) // 8 * 8 for prompt in asked)


def test_host_memory_in_several_pieces_restores_the_same_blocks(model, monkeypatch):
    monkeypatch.setattr(host_cache, "_PIECE_BYTES", 100_000)
    _, folder = model
    asked = prompts(6)
    loop = engine(folder, cache_tokens=128, block_tokens=8, max_rows=1, host_cache_bytes=1 << 20)
    assert len(loop.runner.host._pieces) > 3
    assert 0.9 * (1 << 20) < loop.runner.host.nbytes <= 1 << 20
    first, second = (
        [generate(loop, [prompt], max_tokens=10) for prompt in asked] for _ in range(2)
    )
    assert first == [generate(engine(folder), [prompt], max_tokens=10) for prompt in asked]
    assert second == first
    assert loop.stats().cached_prompt_tokens == sum((len(prompt) - 1) // 8 * 8 for prompt in asked)


def storm(folder, cancels: int, seed: int, **more) -> None:
    """Cancel sampled requests, beam searches and requests with drafts at random moments."""
    chance = random.Random(seed)
    loop = engine(
        folder,
        cache_tokens=1024,
        block_tokens=8,
        max_rows=8,
        policy="max_utilization",
        lookup_tokens=2,
        host_cache_bytes=1 << 19,
        **more,
    )
    count, live = 0, []
    for request_id in range(1, cancels + 1):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 40))]
        kind, length = request_id % 4, chance.randrange(1, 24)
        sampling = SamplingParams(
            max_tokens=length,
            temperature=float(kind % 2),
            seed=request_id,
            beam_width=chance.randrange(2, 5) if kind == 0 else 1,
        )
        draft = [chance.randrange(VOCABULARY) for _ in range(3)] if kind == 3 else []
        loop.submit(GenerateRequest(request_id, prompt, sampling, draft=draft))
        live.append(request_id)
        if kind == 2:
            count += 1
            loop.submit(
                GenerateRequest(cancels + count, prompt, sampling, shares_prompt_with=request_id)
            )
            live.append(cancels + count)
        while len(live) > 7:
            loop.cancel([live.pop(chance.randrange(len(live)))])
        if chance.random() < 0.25:
            loop.step()
    loop.cancel(live)
    while loop.has_work():
        loop.step()
    loop.check_integrity()
    stats = loop.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.total_blocks, 0, 0)
    assert stats.finished == cancels + count
    assert stats.cancelled > cancels // 2


def test_1000_cancels_release_every_row_and_block(model):
    storm(model[1], 1000, seed=8)


def test_cancels_with_a_window_release_every_row_and_block(model):
    storm(model[1], 400, seed=10, attention_windows=(12,), sink_tokens=3)


@pytest.mark.slow
def test_10000_cancels_release_every_row_and_block(model):
    storm(model[1], 10_000, seed=9)


def test_a_prompt_takes_one_step_without_chunks_and_several_with_them(model):
    _, folder = model
    steps = {}
    for chunked in (True, False):
        loop = engine(folder, step_tokens=16, chunked=chunked)
        run_all(loop, [GenerateRequest(1, prompts(1)[0], SamplingParams(max_tokens=1))])
        steps[chunked] = loop.stats().steps
    assert steps[True] - steps[False] == 3  # 60 tokens by 16

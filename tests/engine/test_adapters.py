"""Adapters give the tokens of merged weights in any batch, and no page or byte is lost."""

import itertools
import random
import shutil

import numpy
import pytest
import torch
from run_engine import engine, greedy_choices, run_all
from tiny_adapters import ALL_MODULES, save_adapter
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.engine.adapters.cache import AdapterCache, AdapterSource
from slipstream.engine.plan import StepFailed
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.weights.build import build_engine
from slipstream.weights.lora import read_adapter

LENGTH = 256
# Ranks below, at and above a page's; with and without parts of a linear; scaled in both ways.
KINDS = {
    "attention": {"rank": 8},
    "everything": {"rank": 20, "modules": ALL_MODULES, "lora_alpha": 13},
    "mlp": {"rank": 3, "modules": ["up_proj", "down_proj"], "use_rslora": True},
    "some layers": {"rank": 64, "modules": ["v_proj", "gate_proj"], "layers_to_transform": [1]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the merged models by adapter name; "" is the base model."""
    place = tmp_path_factory.mktemp("adapters")
    base = random_model(config_of("llama", max_position_embeddings=LENGTH)).eval()
    base.save_pretrained(place / "hf")
    build_engine(place / "hf", place / "engine", dtype="float32")
    merged = {"": base}
    for seed, (name, options) in enumerate(KINDS.items()):
        merged[name] = save_adapter(base, place / name, seed=seed, **options)
    return place, merged


def number_of(name: str) -> int:
    return 1 + list(KINDS).index(name) if name else 0


def request(
    place, number: int, name: str, prompt: list[int], tokens: int = 24, **sampling
) -> GenerateRequest:
    source = AdapterSource(folder=str(place / name)) if name else None
    return GenerateRequest(
        number,
        prompt,
        SamplingParams(max_tokens=tokens, **sampling),
        adapter=number_of(name),
        adapter_name=f"adapter {name!r}",
        adapter_source=source,
    )


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(4)
    return [[draw.randrange(VOCABULARY) for _ in range(1 + 7 * i % 60)] for i in range(count)]


def assert_merged(
    models, names: list[str], asked: list[list[int]], answers: dict[int, list[int]]
) -> None:
    _, merged = models
    for number, (name, prompt) in enumerate(zip(names, asked, strict=True)):
        choices = greedy_choices(merged[name], [prompt + answers[number]])[0]
        assert answers[number] == choices[len(prompt) - 1 : -1], (
            f"request {number}, adapter {name!r}"
        )


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"step_tokens": 16},
        {"max_rows": 2},
        {"adapter_page_rank": 64},
        {"policy": "max_utilization", "cache_tokens": 320, "block_tokens": 16},
    ],
    ids=str,
)
def test_a_mixed_batch_equals_each_adapter_merged(models, way):
    place, _ = models
    names = list(itertools.islice(itertools.cycle(["", *KINDS]), 10))
    asked = prompts(len(names))
    loop = engine(place / "engine", **way)
    answers = run_all(
        loop, [request(place, *row) for row in zip(range(10), names, asked, strict=True)]
    )
    assert set(answers.reasons.values()) == {"length"}
    assert_merged(models, names, asked, answers)
    alone = run_all(engine(place / "engine"), [request(place, 1, names[1], asked[1])])
    assert alone[1] == answers[1]
    assert loop.stats().adapter_loads == len(KINDS)


@pytest.mark.parametrize("way", [{}, {"step_tokens": 16}], ids=str)
def test_deterministic_answers_have_the_same_bits_beside_other_adapters(models, way):
    place, _ = models
    names = list(itertools.islice(itertools.cycle(["", *KINDS]), 10))
    rows = list(zip(range(10), names, prompts(len(names)), strict=True))
    settings = {"deterministic": True, "dtype": "bfloat16", **way}

    def run(chosen):
        requests = [request(place, *row, log_probs=True) for row in chosen]
        return run_all(engine(place / "engine", **settings), requests)

    together = run(rows)
    for row in rows[:5]:
        alone = run([row])
        assert alone[row[0]] == together[row[0]], row[1]
        assert alone.log_probs[row[0]] == together.log_probs[row[0]], row[1]


def test_adapters_do_not_share_cached_blocks(models):
    place, _ = models
    prompt = prompts(9)[8] * 3
    loop = engine(place / "engine")
    for name in ["", *KINDS, ""]:
        answers = run_all(loop, [request(place, 0, name, prompt)])
        assert_merged(models, [name], [prompt], answers)
    assert answers.cached[0] > 0  # the base model reuses its own blocks


def converted(place, name: str, storage_type: str = "float32") -> AdapterSource:
    adapter = read_adapter(place / name, storage_type)
    modules = [tuple(map(int, row)) for row in adapter.config[0]]
    return AdapterSource(weights=adapter.weights.tobytes(), datatype=storage_type, modules=modules)


def test_request_tensors_and_a_converted_folder_give_the_same_adapter(models, tmp_path):
    from slipstream.weights.lora import convert_adapter

    place, _ = models
    convert_adapter(place / "everything", tmp_path / "converted", "float32")
    prompt = prompts(5)[4]
    for source in (
        converted(place, "everything"),
        AdapterSource(folder=str(tmp_path / "converted")),
    ):
        asked = GenerateRequest(
            0, prompt, SamplingParams(max_tokens=24), adapter=77, adapter_source=source
        )
        assert_merged(models, ["everything"], [prompt], run_all(engine(place / "engine"), [asked]))


def test_a_fused_module_equals_its_parts(models):
    """attn_qkv equals q, k and v with one A. bfloat16 is sent as bit patterns."""
    place, _ = models
    draw = numpy.random.default_rng(3)
    first, second = draw.normal(size=(4, 64)), draw.normal(size=(128, 4)) * 0.2
    parts = numpy.split(second, [64, 96])

    def bits(*arrays):
        return (
            numpy.concatenate([a.ravel() for a in arrays]).astype(numpy.float32).view(numpy.uint32)
            >> 16
        ).astype(numpy.uint16)

    fused = AdapterSource(
        weights=bits(first, second).tobytes(), datatype="bfloat16", modules=[(0, 1, 4)]
    )
    rows = [bits(first, part, numpy.zeros((64 - len(part)) * 4)) for part in parts]
    separate = AdapterSource(
        weights=numpy.stack(rows).tobytes(),
        datatype="bfloat16",
        modules=[(1, 1, 4), (2, 1, 4), (3, 1, 4)],
    )
    prompt = prompts(9)[8]
    answers = run_all(
        engine(place / "engine"),
        [
            GenerateRequest(
                n,
                prompt,
                SamplingParams(max_tokens=24, log_probs=True),
                adapter=n,
                adapter_source=source,
            )
            for n, source in ((1, fused), (2, separate))
        ]
        + [GenerateRequest(3, prompt, SamplingParams(max_tokens=24))],
    )
    assert answers[1] == answers[2]
    torch.testing.assert_close(
        torch.tensor(answers.log_probs[1]), torch.tensor(answers.log_probs[2])
    )
    assert answers[3] != answers[1]


FAMILIES = {
    "mixtral": ALL_MODULES[:4],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gptj": ["fc_in", "fc_out"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_every_linear_equal_merged_weights_in_every_family(tmp_path, family):
    base = random_model(config_of(family)).eval()
    base.save_pretrained(tmp_path / "hf")
    layout = {"fan_in_fan_out": True} if family == "gpt2" else {}
    merged = save_adapter(base, tmp_path / "adapter", rank=6, modules=FAMILIES[family], **layout)
    build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32")
    prompt = prompts(6)[5]
    source = AdapterSource(folder=str(tmp_path / "adapter"))
    sampling = SamplingParams(max_tokens=16)
    answers = run_all(
        engine(tmp_path / "engine"),
        [
            GenerateRequest(0, prompt, sampling, adapter=1, adapter_source=source),
            GenerateRequest(1, prompt, sampling),
        ],
    )
    assert answers.errors == {}
    assert answers[0] == greedy_choices(merged, [prompt + answers[0]])[0][len(prompt) - 1 : -1]
    assert answers[1] != answers[0]


def test_adapters_of_experts_are_refused(tmp_path):
    base = random_model(config_of("mixtral"))
    base.save_pretrained(tmp_path / "hf")
    build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32")
    source = AdapterSource(weights=bytes(4 * 160), datatype="float32", modules=[(5, 0, 1)])
    asked = GenerateRequest(0, [5], SamplingParams(max_tokens=4), adapter=1, adapter_source=source)
    assert run_all(engine(tmp_path / "engine"), [asked]).errors == {
        0: "the adapter: mlp_h_to_4h cannot be adapted: the model has no such linear layer"
    }


# --- caches ---


def test_a_cache_of_one_adapter_serves_all_adapters(models):
    place, _ = models
    names = list(itertools.islice(itertools.cycle(KINDS), 12))
    asked = prompts(len(names))
    rows = list(zip(range(12), names, asked, strict=True))
    roomy = engine(place / "engine")
    answers = run_all(roomy, [request(place, *row) for row in rows])
    assert_merged(models, names, asked, answers)
    largest = max(roomy.adapters._bytes.values())
    loop = engine(place / "engine", adapter_page_rank=64, adapter_host_bytes=largest)
    assert run_all(loop, [request(place, *row) for row in rows]) == answers
    for row in rows:
        assert run_all(loop, [request(place, *row)])[row[0]] == answers[row[0]]
    stats = loop.stats()
    assert stats.adapter_bytes <= largest
    assert (stats.free_adapter_pages, loop.adapters.cache.total_pages) == (1, 1)
    assert stats.adapter_loads > 2 * len(KINDS)


def test_an_evicted_adapter_must_be_sent_again(models):
    place, _ = models
    loop = engine(place / "engine")
    prompt = prompts(3)[2]
    by_number = GenerateRequest(
        5, prompt, SamplingParams(max_tokens=4), adapter=1, adapter_name="LoRA task 1"
    )
    missing = "LoRA task 1 not found in cache. Please send LoRA weights with request"
    assert run_all(loop, [by_number]).errors == {5: missing}
    expected = run_all(loop, [request(place, 0, "attention", prompt, 4)])[0]
    assert run_all(loop, [by_number])[5] == expected
    # bytes for this adapter, or for the others
    loop.adapters.cache.host_bytes = loop.stats().adapter_bytes
    run_all(loop, [request(place, 0, "mlp", prompt, 4)])
    assert run_all(loop, [by_number]).errors == {5: missing}
    assert run_all(loop, [request(place, 0, "attention", prompt, 4)])[0] == expected


def test_pages_of_the_least_recently_used_idle_adapter_are_reused():
    cache = AdapterCache(total_pages=4, page_rank=8, max_rank=32, host_bytes=100)
    for adapter, rank in ((1, 8), (2, 8), (3, 16), (4, 32)):
        assert cache.request_load(adapter)
        cache.hold(adapter)
        cache.add_loaded(adapter, rank, 10)
    assert [cache.reserve(adapter) for adapter in (1, 2, 3)] == [True, True, True]
    assert [cache.get_pages(adapter) for adapter in (1, 2, 3)] == [(1,), (2,), (3, 4)]
    cache.begin_step(1)
    cache.use(2)
    cache.step_launched(1)
    assert not cache.reserve(4)  # the second is running
    cache.release(2)
    assert not cache.reserve(4)  # a plan that uses it is in flight
    assert cache.free_pages == 3
    cache.step_returned(1)
    assert cache.reserve(4)
    assert cache.get_pages(4) == (1, 2, 3, 4)
    assert cache.take_placed() == [(4, (1, 2, 3, 4))]
    cache.check_integrity([1, 2, 3, 4], [])
    with pytest.raises(AssertionError, match="counts 1 requests and 0 rows"):
        cache.check_integrity([1, 2, 3], [])


def test_the_least_recently_used_adapter_without_holders_leaves_the_host():
    cache = AdapterCache(total_pages=4, page_rank=8, max_rank=32, host_bytes=30)
    for adapter in (1, 2, 3):
        cache.request_load(adapter)
        cache.add_loaded(adapter, 8, 10)
    assert cache.trim() == []
    cache.request_load(1)  # used once more
    cache.request_load(4)
    cache.add_loaded(4, 8, 10)
    cache.hold(2)
    assert cache.trim() == [3]
    for adapter in (1, 4):
        cache.hold(adapter)
    cache.request_load(5)
    cache.add_loaded(5, 8, 10)
    cache.hold(5)
    assert (cache.trim(), cache.used_bytes) == ([], 40)  # all of them are in use
    cache.drop(4)
    assert (cache.trim(), cache.used_bytes) == ([4], 30)
    assert (
        cache.problem(3, "the third")
        == "the third not found in cache. Please send LoRA weights with request"
    )
    cache.check_integrity([1, 2, 5], [])


# --- invalid adapters ---


def a_source(rows, modules, datatype="float32"):
    return AdapterSource(
        weights=numpy.asarray(rows, dtype=numpy.float32).tobytes(),
        datatype=datatype,
        modules=modules,
    )


WRONG = {
    "rank over the largest": (
        a_source(numpy.zeros((1, 65 * 128)), [(1, 0, 65)]),
        "layer 0, attn_q: rank 65 is not 1 to 64 (lora_cache_max_adapter_size)",
    ),
    "no rank": (
        a_source(numpy.zeros((1, 128)), [(1, 0, 0)]),
        "layer 0, attn_q: rank 0 is not 1 to 64",
    ),
    "layer": (
        a_source(numpy.zeros((1, 128)), [(1, 2, 1)]),
        "layer 2, attn_q: the model has layers 0 to 1",
    ),
    "too short": (
        a_source(numpy.zeros((1, 100)), [(1, 0, 1)]),
        "too few values for attn_q of layer 0: rank 1 takes 128, there are 100",
    ),
    "too long": (
        a_source(numpy.ones((1, 128)), [(2, 0, 1)]),
        "layer 0, attn_k: 96 values were expected at rank 1, and more than zeros follow",
    ),
    "experts": (
        a_source(numpy.zeros((1, 128)), [(13, 0, 1)]),
        "module 13 (moe_h_to_4h) cannot be adapted here",
    ),
    "unknown": (
        a_source(numpy.zeros((1, 128)), [(99, 0, 1)]),
        "module 99 cannot be adapted here; these can: 0 attn_qkv, 1 attn_q",
    ),
    "twice": (
        a_source(numpy.zeros((2, 128)), [(1, 0, 1), (1, 0, 1)]),
        "layer 0: attn_q comes twice",
    ),
    "not finite": (
        a_source(numpy.full((1, 128), numpy.nan), [(1, 0, 1)]),
        "layer 0, attn_q: holds values that are not finite",
    ),
    "uneven": (
        a_source(numpy.zeros(129), [(1, 0, 1), (2, 0, 1)]),
        "lora_weights has 129 values, which are no rows of 2 modules",
    ),
    "nothing": (
        AdapterSource(modules=[]),
        "lora_weights has 0 values, which are no rows of 0 modules",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_name_the_module_that_does_not_fit_the_model(models, wrong):
    place, _ = models
    source, text = WRONG[wrong]
    prompt = prompts(3)[2]
    loop = engine(place / "engine")
    bad = GenerateRequest(
        1,
        prompt,
        SamplingParams(max_tokens=4),
        adapter=9,
        adapter_name="LoRA task 9",
        adapter_source=source,
    )
    answers = run_all(
        loop, [bad, request(place, 2, "", prompt, 4), request(place, 3, "mlp", prompt, 4)]
    )
    assert answers.reasons == {1: "error", 2: "length", 3: "length"}
    assert answers.errors[1].startswith(f"LoRA task 9: {text}")
    assert_merged(models, ["", "mlp"], [prompt, prompt], {0: answers[2], 1: answers[3]})


def damage(folder, kind: str) -> None:
    import json

    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    settings = json.loads(config.read_text())
    if kind == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "no header":
        weights.write_bytes(b"\xff" * 50)
    elif kind == "no config":
        config.unlink()
    elif kind == "no weights":
        weights.unlink()
    elif kind == "another model's":
        base = random_model(config_of("llama", hidden_size=32, num_attention_heads=2))
        shutil.rmtree(folder)
        save_adapter(base, folder)
    else:
        config.write_text(json.dumps(settings | {"use_dora": True} if kind == "dora" else settings))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("cut short", "incomplete metadata, file not fully covered"),
        ("no header", ""),
        ("no config", "adapter_config.json"),
        ("no weights", "no adapter_model.safetensors in it"),
        ("dora", "use_dora true of its adapter_config.json is not"),
        (
            "another model's",
            "layer 0, attn_q: A [8, 32] and B [32, 8] do not fit the model, which takes [8, 64] and [64, 8]",
        ),
    ],
)
def test_a_damaged_folder_fails_only_its_own_requests(models, tmp_path, kind, text):
    place, _ = models
    shutil.copytree(place / "attention", tmp_path / "bad")
    damage(tmp_path / "bad", kind)
    prompt = prompts(3)[2]
    loop = engine(place / "engine")
    bad = [
        GenerateRequest(
            n,
            prompt,
            SamplingParams(max_tokens=4),
            adapter=9,
            adapter_name="adapter 'bad'",
            adapter_source=AdapterSource(folder=str(tmp_path / "bad")),
        )
        for n in (1, 2)
    ]
    answers = run_all(loop, [*bad, request(place, 3, "mlp", prompt, 4)])
    assert answers.reasons == {1: "error", 2: "error", 3: "length"}
    assert text in answers.errors[1]
    assert answers.errors[1].startswith("adapter 'bad': ")
    shutil.rmtree(tmp_path / "bad")
    shutil.copytree(place / "attention", tmp_path / "bad")  # repaired: the next request tries again
    again = run_all(loop, [bad[0]])
    assert_merged(models, ["attention"], [prompt], {0: again[1]})


@pytest.mark.parametrize("tensor", ["model.embed_tokens", "lm_head"])
def test_an_adapted_tensor_unknown_to_the_model_is_an_error(models, tmp_path, tensor):
    from safetensors.torch import load_file, save_file

    place, _ = models
    shutil.copytree(place / "attention", tmp_path / "more")
    tensors = load_file(tmp_path / "more" / "adapter_model.safetensors")
    tensors[f"base_model.model.{tensor}.lora_A.weight"] = torch.zeros(8, 64)
    save_file(tensors, tmp_path / "more" / "adapter_model.safetensors")
    source = AdapterSource(folder=str(tmp_path / "more"))
    asked = GenerateRequest(1, [5], SamplingParams(max_tokens=4), adapter=9, adapter_source=source)
    assert (
        f"{tensor}.lora_A.weight cannot be adapted here"
        in run_all(engine(place / "engine"), [asked]).errors[1]
    )


def test_an_adapter_larger_than_the_host_cache_is_an_error(models):
    place, _ = models
    loop = engine(place / "engine", adapter_host_bytes=1000)
    answers = run_all(
        loop, [request(place, 1, "attention", [5, 6], 4), request(place, 2, "", [5, 6], 4)]
    )
    assert answers.errors == {
        1: "adapter 'attention': it takes 20480 bytes, the adapter cache of the host has 1000 "
        "(lora_cache_host_memory_bytes)"
    }
    assert answers.reasons[2] == "length"


def test_a_failed_step_holds_no_adapter_pages(models, monkeypatch):
    place, _ = models
    # pages for one adapter
    loop = engine(place / "engine", adapter_page_rank=64, adapter_host_bytes=150_000)
    launch, prompt = loop.runner.launch, prompts(3)[2]

    def fail_once(plan):
        monkeypatch.setattr(loop.runner, "launch", launch)
        raise StepFailed("out of memory")

    loop.submit(request(place, 0, "attention", prompt))
    while not loop.scheduler.stats().adapters:
        loop.adapters.wait(1)
        loop.adapters.collect()
    monkeypatch.setattr(loop.runner, "launch", fail_once)
    answers = run_all(loop, [request(place, 1, "mlp", prompt)])
    assert answers.errors == {0: "out of memory"}
    assert_merged(models, ["mlp"], [prompt], {0: answers[1]})


def test_without_memory_for_pages_only_requests_with_adapters_fail(models, monkeypatch):
    def no_room(*args):
        raise torch.OutOfMemoryError("none left")

    place, _ = models
    loop, prompt = engine(place / "engine"), prompts(3)[2]
    with monkeypatch.context() as short:
        short.setattr("slipstream.kernels.adapters.AdapterPages", no_room)
        answers = run_all(loop, [request(place, 0, "mlp", prompt), request(place, 1, "", prompt)])
    assert "too little memory left for adapters" in answers.errors.pop(0)
    assert not answers.errors
    assert_merged(models, [""], [prompt], {0: answers[1]})
    loop.check_integrity()
    # now there is memory
    assert_merged(models, ["mlp"], [prompt], run_all(loop, [request(place, 0, "mlp", prompt)]))


# --- soak ---


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_cancels_release_every_adapter_and_page(models, count):
    place, _ = models
    chance = random.Random(8)
    loop = engine(
        place / "engine",
        cache_tokens=2048,
        policy="max_utilization",
        block_tokens=8,
        adapter_page_rank=16,
        adapter_host_bytes=150_000,
    )
    cache = loop.adapters.cache
    live: list[int] = []
    for number in range(count):
        name = chance.choice(["", *KINDS])
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 40))]
        width = chance.choice([1, 1, 1, 3])
        loop.submit(request(place, number, name, prompt, chance.randrange(1, 30), beam_width=width))
        live.append(number)
        while len(live) > 12:
            loop.cancel([live.pop(chance.randrange(len(live)))])
        if chance.random() < 0.3:
            loop.step()
        if number % 100 == 0:
            loop.check_integrity()
    loop.cancel(live)
    while loop.has_work():
        loop.step()
    loop.adapters.wait(10)
    loop.adapters.collect()
    loop.check_integrity()
    stats = loop.stats()
    assert (stats.free_blocks, stats.finished) == (stats.total_blocks, count)
    assert stats.free_adapter_pages == loop.adapters.cache.total_pages
    assert stats.adapter_bytes == sum(loop.adapters._bytes.values()) <= cache.host_bytes
    assert stats.adapter_loads > len(KINDS), "the host cache was never too small"
    cache.host_bytes = 0  # no request holds any of them
    loop.adapters.collect()
    loop.check_integrity()
    assert (cache.used_bytes, loop.adapters._bytes, cache.on_host) == (0, {}, 0)

"""Adapters on a GPU: mixed batches equal merged weights, with and without graphs, and every page
is released.

    pytest -m gpu tests/engine/test_gpu_adapters.py tests/kernels/test_adapter_references.py
"""

import random

import pytest
import torch
from run_engine import greedy_choices, run_all
from tiny_adapters import ALL_MODULES, save_adapter
from tiny_models import VOCABULARY, config_of, expected_tensors, random_model

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.model.families.registry import find_family
from slipstream.weights.lora import read_adapter_folder

pytestmark = pytest.mark.gpu
LENGTH = 320
KINDS = {
    "attention": {"rank": 8},
    "everything": {"rank": 20, "modules": ALL_MODULES},
    "mlp": {"rank": 3, "modules": ["up_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapters")
    base = random_model(config_of("llama", max_position_embeddings=LENGTH)).eval()
    merged = {"": base}
    for seed, (name, options) in enumerate(KINDS.items()):
        merged[name] = save_adapter(base, place / name, seed=seed, **options)
    return place, merged


def gpu_engine(models, **settings):
    base = models[1][""]
    config = base.config.to_dict() | {"architectures": [type(base).__name__]}
    values = {"max_rows": 16, "cache_tokens": 16384, **settings}
    tensors = {name: tensor.clone() for name, tensor in expected_tensors(base).items()}
    settings = EngineSettings(dtype="float32", device="cuda", **values)
    return create_engine(
        find_family(config).spec(config),
        tensors,
        settings,
        LENGTH,
        read_adapter=read_adapter_folder,
    )


def requests(place, names, tokens=40):
    draw = random.Random(4)
    found = []
    for number, name in enumerate(names):
        prompt = [draw.randrange(VOCABULARY) for _ in range(1 + 31 * number % 150)]
        source = AdapterSource(folder=str(place / name)) if name else None
        adapter = 1 + list(KINDS).index(name) if name else 0
        found.append(
            GenerateRequest(
                number,
                prompt,
                SamplingParams(max_tokens=tokens),
                adapter=adapter,
                adapter_source=source,
            )
        )
    return found


def assert_merged(models, names, asked, answers):
    for name, request in zip(names, asked, strict=True):
        answer = answers[request.request_id]
        choices = greedy_choices(models[1][name], [request.prompt + answer])[0]
        assert answer == choices[len(request.prompt) - 1 : -1], (
            f"request {request.request_id}, adapter {name!r}"
        )


@pytest.mark.parametrize(
    "way", [{}, {"step_tokens": 48}, {"max_rows": 3}, {"adapter_page_rank": 32}], ids=str
)
def test_a_mixed_batch_equals_each_adapter_merged(models, way):
    names = ["", "attention", "everything", "mlp"] * 3
    loop = gpu_engine(models, **way)
    asked = requests(models[0], names)
    assert_merged(models, names, asked, run_all(loop, asked))
    assert loop.runner.graphs._adapter_graphs, "no step with adapters was captured"
    # the base model alone, with its own graphs
    assert_merged(models, names[:1], asked[:1], run_all(loop, asked[:1]))
    again = [names[1], names[3], names[2], names[0]]  # the same graphs serve another mix
    asked = requests(models[0], again)
    assert_merged(models, again, asked, run_all(loop, asked))


def test_tokens_are_the_same_without_graphs(models):
    names = ["everything", "", "mlp", "attention"]
    asked = requests(models[0], names)
    loop = gpu_engine(models)
    loop.runner.graphs._graphs.clear()  # every step runs eagerly
    assert_merged(models, names, asked, run_all(loop, asked))
    assert not loop.runner.graphs._adapter_graphs


def test_a_cache_of_one_adapter_with_cancels_releases_every_page(models):
    place, _ = models
    chance = random.Random(3)
    loop = gpu_engine(
        models,
        cache_tokens=4096,
        policy="max_utilization",
        adapter_page_rank=32,
        adapter_max_rank=32,
        adapter_memory_fraction=1e-9,
        adapter_host_bytes=160_000,
    )
    assert loop.adapters.cache.total_pages == 1
    live: list[int] = []
    before = 0
    for number in range(3000):
        (request,) = requests(place, [chance.choice(["", *KINDS])], chance.randrange(1, 30))
        loop.submit(
            GenerateRequest(
                number,
                [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 60))],
                request.sampling,
                adapter=request.adapter,
                adapter_source=request.adapter_source,
            )
        )
        live.append(number)
        while len(live) > 20:
            loop.cancel([live.pop(chance.randrange(len(live)))])
        if chance.random() < 0.3:
            loop.step()
        if number == 1000:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    loop.cancel(live)
    while loop.has_work():
        loop.step()
    loop.adapters.wait(10)
    loop.adapters.collect()
    loop.check_integrity()
    stats = loop.stats()
    assert (stats.free_blocks, stats.finished) == (stats.total_blocks, 3000)
    assert (stats.free_adapter_pages, stats.adapter_bytes <= 160_000) == (1, True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
    names = ["everything", "mlp", "attention"]
    asked = requests(place, names)
    assert_merged(models, names, asked, run_all(loop, asked))

"""With `deterministic`, a request gets the same tokens and log-probabilities, to the last bit, in
bfloat16, whatever else is in the batch.
"""

import pytest
import torch
from run_engine import engine, run_all
from tiny_models import VOCABULARY, config_of, positions_of, random_model

from slipstream.engine import sampler
from slipstream.engine.plan import RowStart
from slipstream.engine.request import GenerateRequest
from slipstream.engine.rows import Rows
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.kernels.options import KernelOptions
from slipstream.weights.build import build_engine

WAYS = {
    "together": {},
    "in steps of 16 tokens": {"step_tokens": 16},
    "whole prompts": {"chunked": False},
    "without reuse": {"reuse": False},
    "with drafts": {"lookup_tokens": 3},
    "preempted": {
        "policy": "max_utilization",
        "cache_tokens": 192,
        "block_tokens": 16,
        "max_rows": 8,
    },
}
# of every second request; the others are greedy
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.1}
CHOSEN = (0, 3, 6, 9)  # the prompts that also run alone
# dense, mixture of experts, windows and soft caps, layer norms with learned positions
FAMILIES = ["llama", "mixtral", "gemma2", "opt"]


def build(folder, family: str, **quantisation):
    options = positions_of(family, 256)
    random_model(config_of(family, **options)).save_pretrained(folder / "hf")
    return build_engine(folder / "hf", folder / "engine", dtype="bfloat16", **quantisation)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: build(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def some_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(0, VOCABULARY, (37,), generator=generator).tolist()
    return [
        shared + torch.randint(0, VOCABULARY, (1 + 7 * i,), generator=generator).tolist()
        for i in range(count)
    ]


def request(number: int, prompt: list[int]) -> GenerateRequest:
    sampling = SAMPLED if number % 2 else {}
    return GenerateRequest(
        number, prompt, SamplingParams(max_tokens=24, log_probs=True, **sampling)
    )


def answers(folder, numbers, **settings):
    """Return the tokens and log-probabilities of some prompts, run together."""
    prompts = some_prompts(10)
    loop = engine(folder, deterministic=True, dtype="bfloat16", **settings)
    found = run_all(loop, [request(number, prompts[number]) for number in numbers])
    return {number: (found[number], found.log_probs[number]) for number in numbers}, loop.stats()


def answers_alone(folder):
    """Return the answers to the chosen prompts, each from an engine that has seen no other."""
    return {number: answers(folder, [number])[0][number] for number in CHOSEN}


@pytest.fixture(scope="module")
def alone(folders):
    return {family: answers_alone(folder) for family, folder in folders.items()}


CASES = [("llama", way) for way in WAYS] + [
    (family, way) for family in FAMILIES[1:] for way in ("in steps of 16 tokens", "with drafts")
]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_other_requests_change_no_bit(folders, alone, family, way):
    together, stats = answers(folders[family], range(10), **WAYS[way])
    assert {number: together[number] for number in CHOSEN} == alone[family]
    if way == "preempted":
        assert stats.preemptions > 0


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_weights_are_deterministic_too(tmp_path, precision):
    folder = build(tmp_path, "llama", weight_only=precision)
    together, _ = answers(folder, range(10), step_tokens=64)
    assert {number: together[number] for number in CHOSEN} == answers_alone(folder)


def sample_first_row(logits: torch.Tensor, seed: int) -> int:
    """Return the token that the first row draws, with the other rows beside it."""
    rows = range(len(logits))
    state = Rows(2, 64, 4)
    for row in rows:
        sampling = SamplingParams(temperature=1.0, top_p=0.5, seed=seed)
        state._start(RowStart(row, [], 4, [], sampling))
    drawn = sampler.sample(logits.clone().numpy(), list(rows), [9] * len(logits), state)
    return int(drawn.tokens[0])


def test_equal_logits_are_cut_alike_beside_a_row_that_sorts_the_vocabulary():
    logits = torch.zeros(2, 4096)
    chosen = torch.randperm(4096, generator=torch.Generator().manual_seed(0))[:600]
    logits[0, chosen] = 6.0  # top-p keeps some of these
    for seed in range(20):
        assert sample_first_row(logits, seed) == sample_first_row(logits[:1], seed)


def test_kernels_that_are_chosen_by_the_number_of_tokens_are_off():
    assert EngineSettings(deterministic=True).kernel_options == KernelOptions(
        compressed_weights=False,
        compressed_kv_cache=False,
        fused_gemv=False,
        mixed_graphs=False,
        deterministic=True,
    )
    assert not EngineSettings().kernel_options.deterministic

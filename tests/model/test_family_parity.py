"""The families of `family_variants` against transformers, in float32: logits of prompts in steps of
several tokens, and of tokens that follow one by one.
"""

import re
from dataclasses import replace

import pytest
import torch
from family_variants import VARIANTS
from parity_table import DOCUMENT, short_names, variants_by_family
from run_engine import logits_in_steps, logits_of
from thread_ranks import ThreadRanks, on_ranks
from tiny_models import VOCABULARY, folder_tensors

from slipstream.engine.cpu.support import unsupported
from slipstream.kernels.options import KernelOptions
from slipstream.model.heads import attention_slopes
from slipstream.model.query_key import check_device
from slipstream.model.spec import Alibi, Experts, LatentAttention, ModelSpec
from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.parameters import Quantisation
from slipstream.weights.shards import check_ranks, rank_spec, rank_tensors

LENGTH = 45
STEPS = (19, 20, 1, 1, 4)  # tokens of each step
TOLERANCE = 1e-5
TOKENS = torch.randint(
    3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(5)
).tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name, tmp_path):
    variant = VARIANTS[name]
    model = variant.model()
    variant.write(model, tmp_path / "hf")
    spec, tensors = folder_tensors(tmp_path / "hf")
    assert ModelSpec.from_config(spec.to_config()) == spec
    ours = logits_in_steps(spec, tensors, torch.float32, TOKENS, STEPS)
    assert (ours - variant.logits(model, TOKENS)).abs().max() < TOLERANCE


def test_the_documented_table_of_parity_lists_all_variants():
    text = DOCUMENT.read_text()
    rows = re.findall(r"^\| ([^|]+) \| (usual[^|]*) \| \d+e-\d+ \|$", text, re.MULTILINE)
    assert dict(rows) == {
        family: ", ".join(short_names(names)) for family, names in variants_by_family().items()
    }


@pytest.mark.parametrize(
    "name", ["bloom-six-heads", "deepseek3", "falcon-rw", "gptoss", "llama4", "olmo2"]
)
def test_deterministic_logits_are_the_same_in_any_steps(name, tmp_path):
    variant = VARIANTS[name]
    model = variant.model()
    variant.write(model, tmp_path / "hf")
    spec, tensors = folder_tensors(tmp_path / "hf")
    options = KernelOptions(deterministic=True)
    found = [
        logits_in_steps(spec, tensors, torch.float32, TOKENS, steps, options)
        for steps in (STEPS, (LENGTH,))
    ]
    assert torch.equal(*found)
    assert (found[0] - variant.logits(model, TOKENS)).abs().max() < TOLERANCE


# one for each option that ranks divide in a way of its own; the others are slow together
DIVIDED = (
    "bloom",
    "cohere-qk-norm",
    "dbrx",
    "deepseek2",
    "deepseek3",
    "glm4-0414",
    "gptoss",
    "granite",
    "llama4",
    "ministral3",
    "mpt-six-heads",
    "nemotron",
    "olmo2",
    "phi",
    "smollm3",
    "stablelm-12b",
    "starcoder",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DIVIDED else [pytest.mark.slow]) for name in VARIANTS],
)
def test_two_ranks_compute_the_logits_of_one(name, tmp_path):
    variant = VARIANTS[name]
    variant.write(variant.model(), tmp_path / "hf")
    folder = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32")
    engine = read_engine_folder(folder)
    (whole,) = logits_of(engine.spec, engine.tensors(), torch.float32, [TOKENS])

    def run(ranks: ThreadRanks) -> torch.Tensor:
        spec = rank_spec(engine.spec, ranks.size)
        tensors = rank_tensors(engine, ranks.rank, ranks.size)
        return logits_of(spec, tensors, torch.float32, [TOKENS], ranks)[0]

    for found in on_ranks(2, run):
        assert (found - whole).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"causal": False}, "attention goes in both directions"),
        (
            {"latent": LatentAttention(16, 16, 16, 16), "kv_heads": 1, "head_size": 32},
            "keys and values come from latent vectors",
        ),
        ({"head_size": 24}, "heads have 24 elements, not a multiple of 16 up to 256"),
        ({"heads": 129, "kv_heads": 1}, "129 query heads share a KV head"),
        (
            {"position": "alibi", "alibi": Alibi(), "attention_softcap": 2.0},
            "scores have position biases and a bound",
        ),
        (
            {"experts": Experts(4, 2, 96, groups=2)},
            "experts are chosen in groups or by corrected scores",
        ),
    ],
    ids=str,
)
def test_the_compiled_cpu_path_leaves_other_options_to_torch(options, reason):
    spec = ModelSpec("TinyForCausalLM", VOCABULARY, 64, 2, 4, 2, 16, 96, 128)
    assert unsupported(spec, "float32") == ""
    assert unsupported(replace(spec, **options), "float32") == reason


def test_a_layer_norm_over_all_heads_is_not_divided_among_ranks(tmp_path):
    VARIANTS["olmo2"].write(VARIANTS["olmo2"].model(), tmp_path)
    spec, _ = folder_tensors(tmp_path)
    check_ranks(spec, Quantisation(), 2)
    with pytest.raises(ValueError, match="it has layer norms over all queries and all keys"):
        check_ranks(replace(spec, norm="layer"), Quantisation(), 2)


@pytest.mark.parametrize(
    ("largest", "heads", "expected"),
    [
        (8.0, 8, [2.0**-n for n in range(1, 9)]),
        (16.0, 4, [2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16]),
        # of the next power of two: every second one, then the others from the first
        (8.0, 6, [2.0**-n for n in (2, 4, 6, 8, 1, 3)]),
    ],
)
def test_slopes_of_position_biases(largest, heads, expected):
    def run(ranks: ThreadRanks) -> tuple[float, ...]:
        return attention_slopes(Alibi(largest), heads // ranks.size, ranks).by_head

    assert [slope for part in on_ranks(2, run) for slope in part] == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"position": "alibi", "alibi": Alibi()}, "needs position biases"),
        ({"attention_chunk": 16}, "needs attention in chunks"),
        ({"causal": False}, "needs attention in both directions"),
        ({"sink_logits": True}, "needs sink logits"),
        (
            {"latent": LatentAttention(16, 16, 16, 16), "kv_heads": 1, "head_size": 32},
            "needs multi-head latent attention",
        ),
        ({"experts": Experts(4, 2, 96, biases=True)}, "needs experts with biases"),
    ],
)
def test_models_that_the_gpu_kernels_lack_something_for_are_refused_there(options, text):
    usual = ModelSpec("TinyForCausalLM", VOCABULARY, 64, 2, 4, 2, 16, 96, 128)
    spec = replace(usual, **options)
    with pytest.raises(ValueError, match=f"TinyForCausalLM {text}.*--device cpu"):
        check_device(spec, torch.device("cuda"))
    check_device(spec, torch.device("cpu"))

"""The engine on a GPU: the tokens of transformers, with and without graphs and overlap, and every
block is released.

    pytest -m gpu tests/engine tests/kernels
"""

import operator
import random

import pytest
import torch
from family_variants import VARIANTS
from run_engine import generate, greedy_choices, run_all
from tiny_models import (
    VOCABULARY,
    config_of,
    engine_tensors,
    folder_tensors,
    positions_of,
    random_model,
)

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.kernels import packed_cache
from slipstream.model.query_key import check_device

pytestmark = pytest.mark.gpu
LENGTH = 320
FAMILIES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {}),
    "gemma": ("gemma", {}),
    # other attention implementations may ignore the soft cap
    "gemma2": ("gemma2", {"attn_implementation": "eager"}),
    "gemma3": ("gemma3", {}),
    "phi3": (
        "phi3",
        {
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "default",
                "partial_rotary_factor": 0.75,
            }
        },
    ),
    "opt": ("opt", {}),
    "gptj": ("gptj", {}),
    "gpt_neox": ("gpt_neox", {}),
    "falcon-7b": ("falcon", {}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
}


def tiny(name):
    family, options = FAMILIES[name]
    return random_model(config_of(family, **positions_of(family, LENGTH), **options)).eval()


def gpu_engine(model, dtype="float32", depth=2, **settings):
    spec, tensors = engine_tensors(model)
    values = {"max_rows": 16, "cache_tokens": 16384, **settings}
    loop = create_engine(
        spec, tensors, EngineSettings(dtype=dtype, device="cuda", **values), LENGTH
    )
    loop.depth = depth
    return loop


def prompts(count=6):
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()
        for n in (1, 31, 32, 33, 77, 128, 5, 90, 100, 17, 64, 65)[:count]
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(name):
    model = tiny(name)
    answers = generate(gpu_engine(model), prompts(), max_tokens=128)
    sequences = [prompt + answer for prompt, answer in zip(prompts(), answers, strict=True)]
    for prompt, answer, chosen in zip(
        prompts(), answers, greedy_choices(model, sequences), strict=True
    ):
        assert len(answer) == 128
        assert answer == chosen[len(prompt) - 1 : -1]


def needs_a_cpu(spec):
    """Return whether the kernels of a GPU lack something that a model needs."""
    try:
        check_device(spec, torch.device("cuda"))
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_of_other_families_equal_transformers(name, tmp_path):
    variant = VARIANTS[name].with_positions(LENGTH)
    model = variant.model()
    variant.write(model, tmp_path / "hf")
    spec, tensors = folder_tensors(tmp_path / "hf")
    settings = EngineSettings(dtype="float32", device="cuda", max_rows=16, cache_tokens=16384)
    if needs_a_cpu(spec):
        with pytest.raises(ValueError, match="--device cpu"):
            create_engine(spec, tensors, settings, LENGTH)
        return
    loop = create_engine(spec, tensors, settings, LENGTH)
    for prompt, answer in zip(prompts(), generate(loop, prompts(), max_tokens=64), strict=True):
        assert len(answer) == 64
        logits = variant.logits(model, prompt + answer)[len(prompt) - 1 : -1]
        given = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        # two tokens of a random model may be as likely as each other, up to rounding
        assert (logits.amax(-1) - given).max() < 1e-5


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "top_k": 20, "seed": 5},
        {"temperature": 1.0, "top_p": 0.8, "seed": 9},
        {"temperature": 1.2, "seed": 3, "repetition_penalty": 1.3, "min_p": 0.05},
    ],
    ids=["greedy", "k", "p", "free"],
)
def test_graphs_overlap_chunks_and_reuse_do_not_change_tokens(sampling):
    model = tiny("llama")
    plain = gpu_engine(model, depth=1)
    plain.runner.graphs._graphs.clear()  # every step runs eagerly
    expected = generate(plain, prompts(12), max_tokens=60, **sampling)
    for way in (
        {},
        {"depth": 1},
        {"step_tokens": 48},
        {"reuse": False},
        {"max_rows": 3},
        {"policy": "max_utilization", "cache_tokens": 640},
    ):
        loop = gpu_engine(model, **way)
        assert generate(loop, prompts(12), max_tokens=60, **sampling) == expected, way
        assert generate(loop, prompts(12), max_tokens=60, **sampling) == expected, f"again, {way}"


def test_bfloat16_agrees_on_95_percent_of_a_random_models_tokens():
    model = tiny("llama")
    answers = generate(gpu_engine(model), prompts(), max_tokens=128)
    loop = gpu_engine(model, dtype="bfloat16", max_rows=64, reuse=False)
    same = total = 0
    for prompt, answer in zip(prompts(), answers, strict=True):
        cuts = range(0, 128, 8)
        given = [prompt + answer[:cut] for cut in cuts]
        for cut, (token,) in zip(cuts, generate(loop, given, max_tokens=1), strict=True):
            same, total = same + (token == answer[cut]), total + 1
    # random weights: margins are far smaller than a real model's
    assert same / total >= 0.95, f"{same} of {total}"


def test_bfloat16_of_a_single_row_agrees_on_95_percent():
    """Its GEMVs are fused with the residual addition, those of several rows are not."""
    model = tiny("llama")
    loop = gpu_engine(model, dtype="bfloat16", reuse=False)
    assert all(layer.fused_o_proj and layer.fused_down_proj for layer in loop.runner.model.layers)
    assert agreement(loop, model) >= 0.95


def test_12_bit_weights_agree_on_95_percent(monkeypatch):
    # without a GPU, tests of kernels set TRITON_INTERPRET before they import it
    from slipstream.kernels.gpu import linear as gpu_linear

    monkeypatch.setattr(gpu_linear, "_SMALL_WEIGHT", 0)
    monkeypatch.setattr(gpu_linear, "_FEW_COLUMNS", 0)
    model = wide("llama")
    loop = gpu_engine(model, dtype="bfloat16", reuse=False, cache_tokens=None)
    copied = [linear.stored for layer in loop.runner.model.layers for linear in layer.linears()]
    assert all(stored.read()[1] is not None for stored in copied)
    assert loop.info.compressed_weight_bytes == sum(
        stored.weight.numel() * 3 // 2 for stored in copied
    )
    assert agreement(loop, model) >= 0.95


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("llama", {}),
        ("llama", {"step_tokens": 48}),
        ("llama", {"block_tokens": 64, "depth": 1}),
        ("qwen3", {}),
        ("llama", {"cache_tokens": 512, "host_cache_bytes": 2**24}),
        ("gemma2", {"step_tokens": 48}),
        ("mistral", {"attention_windows": (60,), "sink_tokens": 4}),
    ],
)
def test_12_bit_keys_and_values_agree_on_95_percent(family, way):
    model = wide(family)
    loop = gpu_engine(model, dtype="bfloat16", **way)
    assert loop.runner.cache.dtype == packed_cache.DTYPE
    if "attention_windows" in way:
        other = gpu_engine(model, dtype="bfloat16", **{**way, "block_tokens": 8})
        assert other.runner.cache.dtype == torch.bfloat16
        expected = [generate(other, [prompt + prompt], max_tokens=1) for prompt in prompts(12)]
        found = [generate(loop, [prompt + prompt], max_tokens=1) for prompt in prompts(12)]
        assert sum(map(operator.eq, found, expected)) >= 11
        return
    assert agreement(loop, model) >= 0.95
    assert agreement(loop, model) >= 0.95, "again, with what is cached"


def wide(family, length=LENGTH):
    """A model with the head size of large models."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return random_model(config_of(family, **positions_of(family, length), **sizes)).eval()


def test_no_kernel_is_compiled_after_start():
    from slipstream.kernels.gpu import (
        decode_attention,
        gated_gemm,
        packed_decode,
        prefill_attention,
        rotary,
        unpacked_kv,
    )

    kernels = (
        decode_attention._decode,
        packed_decode.decode_packed,
        prefill_attention._prefill,
        unpacked_kv._unpack,
        rotary._rotate_write,
        gated_gemm._gated_gemm,
    )

    def compiled():
        """Return the number of compiled variants of each kernel, by Triton's cache."""
        return [
            sum(len(found) for found, *_ in kernel._kernel.device_caches.values())
            for kernel in kernels
        ]

    model = wide("llama", 6000)
    spec, tensors = engine_tensors(model)
    settings = EngineSettings(dtype="bfloat16", device="cuda", max_rows=64, step_tokens=2048)
    loop = create_engine(spec, tensors, settings, 6000)
    before = compiled()
    assert before[1:] == [count for count in before[1:] if count > 0]
    generator = torch.Generator().manual_seed(5)
    lengths = [5000, 3500, 2500, 1500, *(17 * n % 700 + 1 for n in range(60))]
    asked = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    generate(loop, asked, max_tokens=40)
    # much of these prompts is cached
    generate(loop, [prompt + prompt[:300] for prompt in asked[:3]], max_tokens=4)
    assert compiled() == before


def agreement(loop, model):
    """Return the share of tokens that float32 would have chosen, too, for requests one after the
    other.
    """
    same = total = 0
    for prompt in prompts():
        (answer,) = generate(loop, [prompt], max_tokens=128)
        (chosen,) = greedy_choices(model, [prompt + answer])
        same += sum(map(operator.eq, answer, chosen[len(prompt) - 1 :]))
        total += len(answer)
    return same / total


def test_10000_arrivals_and_cancels_release_every_row_and_block():
    chance = random.Random(3)
    loop = gpu_engine(tiny("llama"), policy="max_utilization", cache_tokens=4096)
    torch.cuda.synchronize()
    before = None
    live: list[int] = []
    for request_id in range(10_000):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 60))]
        loop.submit(
            GenerateRequest(request_id, prompt, SamplingParams(max_tokens=chance.randrange(1, 30)))
        )
        live.append(request_id)
        while len(live) > 20:
            loop.cancel([live.pop(chance.randrange(len(live)))])
        if chance.random() < 0.2:
            loop.step()
        if request_id == 2000:
            before = torch.cuda.memory_allocated()
    loop.cancel(live)
    while loop.has_work():
        loop.step()
    loop.check_integrity()
    stats = loop.stats()
    assert (stats.free_blocks, stats.finished) == (stats.total_blocks, 10_000)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_parameters_that_allow_no_token_fail_only_that_request():
    everything = tuple((token,) for token in range(VOCABULARY))
    loop = gpu_engine(tiny("llama"))
    prompt = prompts()[3]
    answers = run_all(
        loop,
        [
            GenerateRequest(1, prompt, SamplingParams(max_tokens=5, bad_words=everything)),
            GenerateRequest(2, prompt, SamplingParams(max_tokens=5)),
        ],
    )
    assert answers.reasons == {1: "error", 2: "length"}

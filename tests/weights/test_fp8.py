"""FP8 engines: what the build stores, and that a machine without FP8 instructions serves them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dequantised import dequantise
from run_engine import run_all
from tiny_engine import build_tiny_engine

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.model.spec import Experts, ModelSpec
from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.load import start_engine
from slipstream.weights.parameters import Quantisation, choose_quantisation, engine_layout
from slipstream.weights.quantise import quantise_fp8


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def fp8_engine(plain: Path) -> Path:
    return build_engine(
        plain.parent / "model",
        plain.parent / "fp8",
        dtype="float32",
        weight_only="fp8",
        fp8_kv_cache=True,
    )


def test_the_largest_weight_of_a_row_is_exact_and_others_within_half_a_step() -> None:
    rows = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    stored, scales = quantise_fp8(rows)
    assert stored.dtype == torch.float8_e4m3fn
    assert torch.allclose(stored.float().abs().amax(dim=1), torch.full((16,), 448.0))
    error = (dequantise(stored, scales) - rows).abs()
    assert bool((error <= rows.abs() / 16 + scales[:, None] * 2**-10 + 1e-7).all())
    assert torch.equal(dequantise(*quantise_fp8(torch.zeros(2, 8))), torch.zeros(2, 8))


def test_linears_are_stored_in_fp8_and_the_head_is_not(plain: Path, fp8_engine: Path) -> None:
    folder = read_engine_folder(fp8_engine)
    assert (folder.quantisation.algorithm, folder.quantisation.kv_cache) == ("FP8", "FP8")
    tensors, exact = folder.tensors(), read_engine_folder(plain).tensors()
    name = "transformer.layers.0.mlp.gate_up"
    stored, scales = quantise_fp8(exact[f"{name}.weight"])
    assert torch.equal(tensors[f"{name}.weight"].view(torch.uint8), stored.view(torch.uint8))
    assert torch.equal(tensors[f"{name}.scales"], scales)
    assert torch.equal(tensors["lm_head.weight"], exact["lm_head.weight"])


def fp8_names(spec: ModelSpec, quantisation: Quantisation) -> set[str]:
    layout = engine_layout(spec, "bfloat16", quantisation)
    return {
        name.removeprefix("transformer.layers.")
        for name, slot in layout.items()
        if slot.dtype == "F8_E4M3"
    }


def test_the_hidden_size_decides_which_linears_are_in_fp8(fp8_engine: Path) -> None:
    spec = read_engine_folder(fp8_engine).spec
    last = spec.layers - 1
    every = {
        f"{layer}.{part}.weight"
        for layer in range(spec.layers)
        for part in ("attention.qkv", "attention.dense", "mlp.gate_up", "mlp.proj")
    }
    wide = replace(spec, hidden_size=2048)
    assert fp8_names(wide, choose_quantisation(wide, "fp8")) == every
    narrow = replace(spec, hidden_size=2032)
    assert fp8_names(narrow, choose_quantisation(narrow, "fp8")) == {
        name
        for name in every
        if name.endswith(("dense.weight", "gate_up.weight")) and not name.startswith(f"{last}.")
    }
    assert fp8_names(spec, Quantisation("FP8")) == every, (
        "as folders hold them that were built before"
    )
    assert choose_quantisation(spec, "int8").excluded == ()


def test_expert_projections_of_a_small_model_stay_in_16_bits() -> None:
    experts = Experts(count=4, per_token=2, ffn_size=32, shared_ffn_size=32)
    spec = ModelSpec(
        architecture="Qwen2MoeForCausalLM",
        vocab_size=64,
        hidden_size=64,
        layers=2,
        heads=2,
        kv_heads=2,
        head_size=16,
        ffn_size=32,
        max_positions=64,
        experts=experts,
    )
    assert fp8_names(spec, choose_quantisation(spec, "fp8")) == {
        "0.attention.dense.weight",
        "0.mlp.experts.gate_up.weight",
        "0.mlp.shared.gate_up.weight",
    }


def test_the_config_lists_the_linears_left_in_16_bits(fp8_engine: Path) -> None:
    config = json.loads((fp8_engine / "config.json").read_text())
    folder = read_engine_folder(fp8_engine)
    excluded = ["*.attention.qkv", "*.mlp.*proj", f"*.layers.{folder.spec.layers - 1}.*"]
    assert config["pretrained_config"]["quantization"]["exclude_modules"] == excluded
    assert folder.quantisation.excluded == tuple(excluded)


def test_a_cpu_engine_computes_with_the_dequantised_weights(plain: Path, fp8_engine: Path) -> None:
    """The engine gives the same tokens as one whose weights are rounded.

    The type of the KV cache has no effect on a CPU.
    """
    settings = EngineSettings(dtype="float32", cache_tokens=512, max_rows=2)
    request = GenerateRequest(0, [5, 9, 17, 30], SamplingParams(max_tokens=24, log_probs=True))
    loop = start_engine(fp8_engine, settings)
    assert loop.runner.cache.dtype == torch.float32
    answers = run_all(loop, [request])
    rounded = start_engine(plain, settings)
    exact = read_engine_folder(plain).tensors()
    for index, layer in enumerate(rounded.runner.model.layers[:-1]):  # type: ignore[attr-defined]
        for attribute, part in (("o_proj", "attention.dense"), ("up_proj", "mlp.gate_up")):
            weight = dequantise(*quantise_fp8(exact[f"transformer.layers.{index}.{part}.weight"]))
            setattr(
                layer, attribute, lambda x, weight=weight: torch.nn.functional.linear(x, weight)
            )
    expected = run_all(rounded, [request])
    assert answers[0] == expected[0]
    assert answers.log_probs[0] == pytest.approx(expected.log_probs[0], abs=1e-5)

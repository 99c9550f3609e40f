"""Checkpoints as the makers of gpt-oss and DeepSeek publish them: experts in MXFP4, matrices in FP8
with a scale per block, and layers of multi-token prediction behind the last layer.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from family_variants import VARIANTS
from run_engine import engine, generate, logits_in_steps
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, folder_tensors

from slipstream.weights.build import build_engine
from slipstream.weights.checkpoint import CheckpointSource, write_checkpoint
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.sources.hf_folder import HuggingFaceFolder

State = dict[str, torch.Tensor]
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TOKENS = torch.randint(3, VOCABULARY, (45,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCK = 16  # rows and columns of an FP8 block


def write_model(name: str, folder: Path) -> tuple[Any, State]:
    """Write a variant. Return its model and the tensors of its file."""
    model = VARIANTS[name].model()
    VARIANTS[name].write(model, folder)
    return model, load_file(folder / "model.safetensors")


def rewrite(folder: Path, state: State, **config: Any) -> None:
    save_file({key: one.contiguous() for key, one in state.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def mxfp4(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[experts, out, in] → blocks, scales, and the matrices that they stand for"""
    groups = matrices.unflatten(2, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(3))) - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    numbers = (scaled.abs()[..., None] - LEVELS).abs().argmin(-1)
    codes = (numbers + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., ::2] | (codes[..., 1::2] << 4)
    signs = torch.where(scaled < 0, -1.0, 1.0)
    meant = signs * LEVELS[numbers] * torch.exp2(exponents)[..., None]
    return blocks, (exponents + 127).to(torch.uint8), meant.flatten(2)


def fp8_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[out, in] → e4m3 numbers, a scale for each block, and the matrix that they stand for"""
    rows, columns = matrix.shape
    tall, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.nn.functional.pad(matrix, (0, wide * BLOCK - columns, 0, tall * BLOCK - rows))
    largest = padded.abs().view(tall, BLOCK, wide, BLOCK).amax((1, 3))
    scales = largest / 448.0
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    numbers = (matrix / spread).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * spread


def test_gpt_oss_with_mxfp4_experts_has_the_matrices_that_they_stand_for(tmp_path: Path) -> None:
    model, state = write_model("gptoss", tmp_path)
    parameters = dict(model.named_parameters())
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, meant = mxfp4(state.pop(name).transpose(1, 2))
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameters[name].data.copy_(meant.transpose(1, 2))
    rewrite(tmp_path, state, quantization_config={"quant_method": "mxfp4"})
    spec, tensors = folder_tensors(tmp_path)
    ours = logits_in_steps(spec, tensors, torch.float32, TOKENS, (40, 1, 4))
    assert (ours - VARIANTS["gptoss"].logits(model, TOKENS)).abs().max() < 1e-5


def test_a_bfloat16_gpt_oss_answers_as_one_step_does(tmp_path: Path) -> None:
    _, state = write_model("gptoss", tmp_path / "hf")
    rewrite(tmp_path / "hf", {name: tensor.bfloat16() for name, tensor in state.items()})
    folder = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="auto")
    opened = read_engine_folder(folder)
    assert opened.dtype == "bfloat16"
    stored = opened.tensors()["transformer.layers.0.mlp.experts.gate_up.weight"]
    ffn = 2 * opened.spec.experts.ffn_size
    gate = state["model.layers.0.mlp.experts.gate_up_proj"].bfloat16()[1, :, 0::2]
    assert torch.equal(stored[ffn : ffn + ffn // 2], gate.t())
    (answer,) = generate(engine(folder, dtype="bfloat16"), [TOKENS], max_tokens=8)
    (cut,) = generate(engine(folder, dtype="float32", step_tokens=24), [TOKENS], max_tokens=1)
    assert len(answer) == 8
    assert answer[:1] == cut


def test_deepseek_with_fp8_blocks_has_the_matrices_that_they_stand_for(tmp_path: Path) -> None:
    model, state = write_model("deepseek3", tmp_path)
    meant_state = dict(state)
    for name in [name for name in state if "_proj" in name and name.endswith(".weight")]:
        numbers, scales, meant_state[name] = fp8_blocks(state[name])
        state |= {name: numbers, f"{name}_scale_inv": scales}
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    rewrite(tmp_path, state, quantization_config=settings)
    spec, tensors = folder_tensors(tmp_path)
    (tmp_path / "meant").mkdir()
    (tmp_path / "meant" / "config.json").write_text(json.dumps(model.config.to_dict()))
    rewrite(tmp_path / "meant", meant_state)
    _, meant = folder_tensors(tmp_path / "meant")
    assert tensors.keys() == meant.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.float(), meant[name].float(), rtol=0, atol=1e-6)
    assert spec.latent is not None


def test_layers_of_multi_token_prediction_are_left_out_and_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, state = write_model("deepseek3", tmp_path)
    layer = {
        name.replace("layers.1.", "layers.2."): tensor + 1.0
        for name, tensor in state.items()
        if ".layers.1." in name
    }
    own = {"enorm.weight": torch.ones(64), "eh_proj.weight": torch.ones(64, 128)}
    extra = {f"model.layers.2.{name}": tensor for name, tensor in own.items()}
    spec, before = folder_tensors(tmp_path)
    rewrite(tmp_path, {**state, **layer, **extra}, num_nextn_predict_layers=1)
    with caplog.at_level(logging.INFO, logger="slipstream"):
        after_spec, after = folder_tensors(tmp_path)
    assert after_spec == spec
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert "its layers of multi-token prediction are not read" in caplog.text


def test_router_corrections_stay_in_float32(tmp_path: Path) -> None:
    write_model("deepseek3", tmp_path / "hf")
    source = HuggingFaceFolder(tmp_path / "hf", "tiny")
    name = "transformer.layers.1.mlp.router_correction.weight"
    given = load_file(tmp_path / "hf" / "model.safetensors")[
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ]
    checkpoint = write_checkpoint(source, tmp_path / "checkpoint", dtype="bfloat16")
    converted = CheckpointSource(checkpoint, "tiny")
    for number, built in enumerate((source, converted)):
        folder = build_engine(built, tmp_path / f"engine{number}", dtype="bfloat16")
        stored = read_engine_folder(folder).tensors()
        assert torch.equal(stored[name], given)
        assert stored["transformer.layers.1.mlp.router.weight"].dtype == torch.bfloat16


def test_the_cache_holds_one_vector_per_token(tmp_path: Path) -> None:
    write_model("deepseek2", tmp_path / "hf")
    folder = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32")
    loop = engine(folder)
    spec = read_engine_folder(folder).spec
    assert spec.latent is not None
    layers, vectors, kv_heads, _, size = loop.runner.cache.shape
    assert (layers, vectors, kv_heads, size) == (2, 1, 1, 24 + 8)
    assert loop.runner.model.cached_bytes == 2 * (24 + 8) * 4

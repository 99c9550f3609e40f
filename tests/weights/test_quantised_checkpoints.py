"""Quantised checkpoints, written here by the published layouts: an engine has the matrices that the
quantised values stand for.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_engine import logits_of
from safetensors.torch import load_file, save_file
from tiny_models import config_of, folder_tensors, random_model

from slipstream.weights.build import build_engine
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.sources.mapped_tensors import MappedTensors
from slipstream.weights.sources.quantised.mxfp4 import expand_mxfp4
from slipstream.weights.sources.quantised.scaled import tile_of
from slipstream.weights.sources.quantised.settings import QuantisationSettings, Scheme
from slipstream.weights.sources.quantised_tensors import QuantisedTensors
from slipstream.weights.sources.source import SourceError

GROUP = 16
TOKENS = [[3, 1, 41, 59, 26, 5, 35]]
State = dict[str, torch.Tensor]
# the tensors of a linear layer, without its name, and the matrix that they stand for
Written = tuple[State, torch.Tensor]


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, columns] → int32 [rows, columns * bits / 32], the first column in the lowest bits"""
    words = torch.zeros(len(values), values.shape[1] * bits // 32, dtype=torch.int64)
    for index in range(32 // bits):
        words |= values[:, index :: 32 // bits].long() << (bits * index)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def grouped(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Return values [out, in], zeros and scales [out, groups], of groups with both."""
    groups = weight.unflatten(1, (-1, GROUP))
    smallest = groups.amin(2)
    scales = ((groups.amax(2) - smallest) / (2**bits - 1)).half().float()
    zeros = (-smallest / scales).round().clamp(1, 2**bits - 1)
    values = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return values.flatten(1), zeros, scales


def matrix(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    groups = values.unflatten(1, (-1, GROUP))
    return ((groups - zeros[..., None]) * scales[..., None]).flatten(1)


def gptq(weight: torch.Tensor, bits: int = 4, ordered: bool = False, offset: int = 1) -> Written:
    order = torch.arange(weight.shape[1])
    if ordered:  # columns of a group are not neighbours
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(1))
    values, zeros, scales = grouped(weight[:, order], bits)
    back = order.argsort()
    tensors = {
        "qweight": pack(values[:, back], bits).t(),
        "qzeros": pack(zeros.t() - offset, bits),
        "scales": scales.t().half(),
        "g_idx": (back // GROUP).int(),
    }
    return tensors, matrix(values, zeros, scales)[:, back]


def awq(weight: torch.Tensor) -> Written:
    values, zeros, scales = grouped(weight, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": pack(values.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4),
        "qzeros": pack(zeros.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4),
        "scales": scales.t().half(),
    }
    return tensors, matrix(values, zeros, scales)


def packed(weight: torch.Tensor, symmetric: bool = False) -> Written:
    values, zeros, scales = grouped(weight, 4)
    if symmetric:
        groups = weight.unflatten(1, (-1, GROUP))
        scales = groups.abs().amax(2) / 7
        zeros = torch.full_like(scales, 8)
        values = ((groups / scales[..., None]).round() + 8).flatten(1)
    tensors = {
        "weight_packed": pack(values, 4),
        "weight_scale": scales.bfloat16().float(),
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": pack(zeros.t(), 4).t(),
    }
    if symmetric:
        del tensors["weight_zero_point"]
    return tensors, matrix(values, zeros, tensors["weight_scale"])


def packed_as_int8(weight: torch.Tensor) -> Written:
    """Zero points are not packed: they are signed, as numbers are before they are packed."""
    tensors, meant = packed(weight)
    _, zeros, _ = grouped(weight, 4)
    tensors["weight_zero_point"] = (zeros - 8).to(torch.int8)
    return tensors, meant


def packed_in_8_bits(weight: torch.Tensor) -> Written:
    """One scale for each row, in 8 bits."""
    scales = weight.abs().amax(1, True) / 127
    values = (weight / scales).round()
    tensors = {
        "weight_packed": pack(values + 128, 8),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, values * scales


def scaled_groups(weight: torch.Tensor, dtype: torch.dtype, zeros: bool = False) -> Written:
    """8-bit numbers with a scale, and a zero point if wanted, for each group."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(2) / (120 if dtype is torch.int8 else 448)
    values = groups / scales[..., None]
    points = torch.arange(scales.numel()).view(scales.shape) % 7 - 3
    if dtype is torch.int8:
        values = values.round() + (points[..., None] if zeros else 0)
    stored = values.to(dtype)
    tensors = {"weight": stored.flatten(1), "weight_scale": scales}
    meant = stored.float()
    if zeros:
        tensors["weight_zero_point"] = points.to(torch.int8)
        meant = meant - points[..., None]
    return tensors, (meant * scales[..., None]).flatten(1)


def ragged_blocks(weight: torch.Tensor) -> Written:
    """Blocks of 40 x 56, which do not divide the matrix."""
    rows, columns = weight.shape
    row = torch.arange(rows)[:, None] // 40
    column = torch.arange(columns)[None] // 56
    scales = (torch.arange((row.max() + 1) * (column.max() + 1)) + 1.0) / 500
    scales = scales.view(int(row.max()) + 1, -1)
    stored = (weight / scales[row, column]).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scales}, stored.float() * scales[row, column]


def fp8(weight: torch.Tensor, scales: torch.Tensor, name: str = "weight_scale") -> Written:
    """scales: one, [out, 1], or one per block of 16 × 32"""
    spread = scales
    if scales.dim() == 2 and scales.shape[1] > 1:
        spread = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": stored, name: scales, "input_scale": torch.ones(1)}, stored.float() * spread


def int8(weight: torch.Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scales).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scales}, stored * scales


def llm_int8(weight: torch.Tensor) -> Written:
    largest = weight.abs().amax(1)
    stored = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {
        "weight": stored,
        "SCB": largest,
        "weight_format": torch.zeros((), dtype=torch.uint8),
    }
    return tensors, stored * largest[:, None] / 127


def nf4(weight: torch.Tensor, nested: bool = False) -> Written:
    levels = torch.linspace(-1, 1, 16) ** 3
    flat = weight.flatten().view(-1, 32)
    largest = flat.abs().amax(1)
    state: dict[str, Any] = {"shape": list(weight.shape), "blocksize": 32, "quant_type": "nf4"}
    tensors: State = {"weight.absmax": largest, "weight.quant_map": levels}
    if nested:
        offset = largest.mean()
        code = torch.linspace(-1, 1, 256)
        blocks = (largest - offset).view(-1, 16)
        scales = blocks.abs().amax(1)
        closest = (blocks / scales[:, None])[..., None] - code
        indices = closest.abs().argmin(-1)
        largest = (code[indices] * scales[:, None]).flatten() + offset
        state |= {"nested_blocksize": 16, "nested_offset": float(offset)}
        tensors["weight.absmax"] = indices.flatten().to(torch.uint8)
        tensors["weight.nested_absmax"] = scales
        tensors["weight.nested_quant_map"] = code
    closest = (flat / largest[:, None])[..., None] - levels
    indices = closest.abs().argmin(-1)
    pairs = indices.view(-1, 2)
    tensors["weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = text
    return tensors, (levels[indices] * largest[:, None]).view(weight.shape)


def per_block(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.unflatten(0, (-1, 16)).unflatten(2, (-1, 32))
    return blocks.abs().amax((1, 3)) / 448


def config_groups(**weights: Any) -> dict[str, Any]:
    return targets((["Linear"], weights))


def targets(*groups: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    """Return a config with several groups: (targets, settings of the weights)."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            f"group_{number}": {"targets": names, "weights": weights}
            for number, (names, weights) in enumerate(groups)
        },
    }


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Written]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, lambda w: gptq(w, 8)),
    "gptq-ordered": ({"quant_method": "gptq", "bits": 4}, lambda w: gptq(w, ordered=True)),
    "gptq-2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, offset=0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4}, awq),
    "w4a16": (config_groups(num_bits=4), packed),
    "w4a16-symmetric": (config_groups(num_bits=4), lambda w: packed(w, symmetric=True)),
    "w4a16-int8-zeros": (config_groups(num_bits=4, group_size=GROUP), packed_as_int8),
    "w8a16": (config_groups(num_bits=8, strategy="channel"), packed_in_8_bits),
    "w8a8": (config_groups(num_bits=8), int8),
    "w8a8-group": (
        config_groups(num_bits=8, strategy="group", group_size=GROUP),
        lambda w: scaled_groups(w, torch.int8),
    ),
    "w8a8-group-zeros": (
        config_groups(num_bits=8, strategy="group", group_size=GROUP),
        lambda w: scaled_groups(w, torch.int8, zeros=True),
    ),
    "fp8-group": (
        config_groups(num_bits=8, strategy="group", group_size=GROUP),
        lambda w: scaled_groups(w, torch.float8_e4m3fn),
    ),
    "fp8-ragged": (
        config_groups(num_bits=8, strategy="block", block_structure=[40, 56]),
        ragged_blocks,
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, lambda w: fp8(w, w.abs().amax(1, True) / 448)),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"},
        gptq,
    ),
    "auto-round-awq": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
        awq,
    ),
    "fp8-channel": (config_groups(num_bits=8), lambda w: fp8(w, w.abs().amax(1, True) / 448)),
    "fp8-tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda w: fp8(w, w.max())),
    "modelopt-small-letters": (
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"},
        lambda w: fp8(w, w.max()),  # one block, as the matrices are small
    ),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        lambda w: fp8(w, per_block(w), "weight_scale_inv"),
    ),
    "llm-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
    "nf4-nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda w: nf4(w, nested=True),
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    # down_proj is [64, 512], so that its blocks of 16 x 32 are as many as its rows
    random_model(config_of("qwen2", intermediate_size=512)).save_pretrained(folder)
    return folder


def write(plain: Path, folder: Path, name: str) -> Path:
    settings, quantise = FORMATS[name]
    return write_as(plain, folder, settings, lambda stem: quantise)


def write_as(
    plain: Path,
    folder: Path,
    settings: dict[str, Any],
    quantise_of: Callable[[str], Callable[[torch.Tensor], Written]],
) -> Path:
    """Write the quantised model to `quantised`, and what it stands for to `meant`."""
    state = load_file(plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    quantised: State = {}
    meant: State = {}
    for tensor_name, tensor in state.items():
        if not tensor_name.endswith("_proj.weight"):
            quantised[tensor_name] = meant[tensor_name] = tensor
            continue
        stem = tensor_name.removesuffix(".weight")
        tensors, meant[tensor_name] = quantise_of(stem)(tensor)
        quantised |= {f"{stem}.{kind}": value for kind, value in tensors.items()}
    save(folder / "meant", config, meant)
    save(folder / "quantised", {**config, "quantization_config": settings}, quantised)
    return folder / "quantised"


def save(folder: Path, config: dict[str, Any], state: State) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_an_engine_has_the_matrices_that_the_quantised_ones_stand_for(plain, tmp_path, name):
    spec, tensors = folder_tensors(write(plain, tmp_path, name))
    _, meant = folder_tensors(tmp_path / "meant")
    _, before = folder_tensors(plain)
    assert tensors.keys() == meant.keys()
    for parameter, tensor in tensors.items():
        torch.testing.assert_close(tensor, meant[parameter], rtol=1e-6, atol=1e-7)
    weight = "transformer.layers.1.mlp.proj.weight"
    rounding = (tensors[weight] - before[weight]).abs().max()
    assert 0 < rounding < 0.1  # the largest weights are about 0.4
    (ours,) = logits_of(spec, tensors, torch.float32, TOKENS)
    (expected,) = logits_of(spec, meant, torch.float32, TOKENS)
    assert (ours - expected).abs().max() < 1e-5


def assert_same(quantised: Path, meant: Path) -> None:
    _, tensors = folder_tensors(quantised)
    _, expected = folder_tensors(meant)
    assert tensors.keys() == expected.keys()
    for parameter, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[parameter], rtol=1e-6, atol=1e-7)


def test_each_layer_has_the_bits_of_the_group_that_names_it(plain, tmp_path):
    layer = "model.layers.1.self_attn.o_proj"
    settings = targets(
        (["re:.*mlp.*"], {"num_bits": 4, "group_size": GROUP, "strategy": "group"}),
        (["Linear"], {"num_bits": 8, "strategy": "channel"}),
        ([layer], {"num_bits": 4}),
    )
    folder = write_as(
        plain,
        tmp_path,
        settings,
        lambda stem: packed if "mlp" in stem or stem == layer else packed_in_8_bits,
    )
    assert_same(folder, tmp_path / "meant")


def test_gptq_layers_have_the_bits_of_their_own_tensors(plain, tmp_path):
    settings = {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}
    folder = write_as(
        plain,
        tmp_path,
        settings,
        lambda stem: lambda w: gptq(w, 8 if "down" in stem else 4),
    )
    assert_same(folder, tmp_path / "meant")


@pytest.mark.parametrize(
    ("name", "file", "settings"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": GROUP, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": GROUP, "version": "GEMM"}),
        ("awq", "quantize_config.json", {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    ],
)
def test_settings_in_a_file_of_the_library_are_read(plain, tmp_path, name, file, settings):
    folder = write(plain, tmp_path, name)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps(settings))
    assert_same(folder, tmp_path / "meant")


def test_the_only_file_of_a_folder_has_any_name(plain, tmp_path):
    folder = write(plain, tmp_path, "gptq")
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.safetensors")
    assert_same(folder, tmp_path / "meant")


@pytest.mark.parametrize("name", ["gptq", "awq", "llm-int8", "nf4"])
def test_layers_that_store_inputs_by_outputs_are_read(tmp_path, name):
    """GPT-2's layers are [in, out]. All libraries store [out, in] once they are quantised."""
    plain = tmp_path / "plain"
    random_model(config_of("gpt2")).save_pretrained(plain)
    settings, quantise = FORMATS[name]
    quantised: State = {}
    meant: State = {}
    for tensor_name, tensor in load_file(plain / "model.safetensors").items():
        layer = ".attn.c_" in tensor_name or ".mlp.c_" in tensor_name
        if not layer or not tensor_name.endswith(".weight"):
            quantised[tensor_name] = meant[tensor_name] = tensor
            continue
        stem = tensor_name.removesuffix(".weight")
        tensors, matrix_meant = quantise(tensor.t().contiguous())
        meant[tensor_name] = matrix_meant.t()
        quantised |= {f"{stem}.{kind}": value for kind, value in tensors.items()}
    config = json.loads((plain / "config.json").read_text())
    save(tmp_path / "meant", config, meant)
    save(tmp_path / "quantised", {**config, "quantization_config": settings}, quantised)
    assert_same(tmp_path / "quantised", tmp_path / "meant")


@pytest.mark.parametrize(
    ("weight", "scales", "scheme", "tile"),
    [
        ((7168, 16384), (56, 128), Scheme(block=(128, 128)), (128, 128)),
        ((576, 7168), (5, 56), Scheme(block=(128, 128)), (128, 128)),
        ((64, 512), (4, 16), Scheme(block=(16, 32)), (16, 32)),  # as many scales as rows
        ((64, 512), (64, 1), Scheme(block=(16, 32)), (1, 512)),
        ((64, 512), (64,), Scheme(), (1, 512)),
        ((64, 512), (), Scheme(), (64, 512)),
        ((64, 512), (1,), Scheme(strategy="tensor"), (64, 512)),
        ((64, 512), (64, 4), Scheme(strategy="group", group_size=128), (1, 128)),
        ((64, 512), (64, 4), Scheme(), (1, 128)),
        ((256, 512), (2, 1, 4, 1), Scheme(block=(128, 128)), (128, 128)),
        # what does not tile the matrix, or is not what the folder declares
        ((64, 512), (4, 16), Scheme(), None),
        ((64, 512), (16, 4), Scheme(block=(16, 32)), None),
        ((64, 512), (64, 4), Scheme(strategy="group", group_size=64), None),
        ((64, 512), (64, 5), Scheme(strategy="group"), None),
        ((64, 512), (1, 1), Scheme(strategy="channel"), None),
        ((64, 512), (64, 1), Scheme(strategy="tensor"), None),
        ((64, 512), (64, 1), Scheme(strategy="block"), None),
        ((64, 512), (64, 1), Scheme(strategy="attn_head"), None),
    ],
)
def test_the_weights_that_share_a_scale(weight, scales, scheme, tile):
    assert tile_of(weight, scales, scheme) == tile


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("fp8-block", (16, 4), r"weight_scale_inv has shape \[16, 4\], where weight has shape "
            r"\[64, 512\] with blocks of 16 x 32"),
        ("w8a8-group", (64, 16), r"weight_scale has shape \[64, 16\], where weight has shape "
            r"\[64, 512\] for the strategy 'group' with groups of 16"),
    ],
)  # fmt: skip
def test_scales_that_do_not_tile_the_matrix_are_refused(plain, tmp_path, name, shape, text):
    folder = write(plain, tmp_path, name)
    stem = "model.layers.1.mlp.down_proj"
    kind = "weight_scale_inv" if name == "fp8-block" else "weight_scale"
    change(folder, lambda state: state.update({f"{stem}.{kind}": torch.ones(shape)}))
    with pytest.raises(SourceError, match=f"{stem}: its .* tensors do not fit together: {text}"):
        HuggingFaceFolder(folder, "tiny")


def test_zero_points_that_do_not_fit_the_scales_are_refused(plain, tmp_path):
    folder = write(plain, tmp_path, "w4a16-int8-zeros")
    full = "model.layers.0.mlp.down_proj.weight_zero_point"
    change(folder, lambda state: state.update({full: state[full][:, :2].contiguous()}))
    with pytest.raises(SourceError, match=r"weight_zero_point has shape \[64, 2\]"):
        HuggingFaceFolder(folder, "tiny")


def test_a_weight_with_other_bits_than_declared_is_refused(plain, tmp_path):
    settings = {"quant_method": "gptq", "bits": 8}
    folder = write_as(plain, tmp_path, settings, lambda stem: gptq)
    with pytest.raises(SourceError, match=r"qweight has shape .* where 8 bits a weight are decl"):
        HuggingFaceFolder(folder, "tiny")


def test_experts_in_mxfp4_are_what_transformers_expands_them_to():
    reference = importlib.import_module("transformers.integrations.mxfp4")
    draw = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 8, 4, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(110, 132, (3, 8, 4), generator=draw, dtype=torch.uint8)
    expected = reference.convert_moe_packed_tensors(blocks, scales)  # [experts, in, out]
    torch.testing.assert_close(
        expand_mxfp4(blocks, scales).transpose(1, 2), expected, rtol=0, atol=0
    )


def test_experts_in_mxfp4_have_the_dimensions_of_the_unquantised_model(tmp_path):
    draw = torch.Generator().manual_seed(1)
    stem = "model.layers.0.mlp.experts.down_proj"
    blocks = torch.randint(0, 256, (3, 8, 4, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(110, 132, (3, 8, 4), generator=draw, dtype=torch.uint8)
    bias = torch.ones(3, 8)
    state = {f"{stem}_blocks": blocks, f"{stem}_scales": scales, f"{stem}_bias": bias}
    save_file(state, tmp_path / "model.safetensors")
    settings = QuantisationSettings({"quant_method": "mxfp4"})
    stored = MappedTensors([tmp_path / "model.safetensors"], lambda name: name)
    tensors = QuantisedTensors(stored, settings, "tiny")
    assert {name: slot.shape for name, slot in tensors.slots.items()} == {
        f"{stem}.weight": (3, 128, 8),
        f"{stem}_bias": (3, 8),
    }
    read = torch.cat(list(tensors.read_rows(f"{stem}.weight")))
    torch.testing.assert_close(read, expand_mxfp4(blocks, scales).transpose(1, 2), rtol=0, atol=0)
    assert float(read.float().abs().max()) > 0.1


def test_a_build_says_that_it_expands_the_weights(plain, tmp_path):
    folder = write(plain, tmp_path, "awq")
    phases: list[str] = []
    build_engine(
        folder, tmp_path / "engine", progress=lambda phase, done, total: phases.append(phase)
    )
    assert set(phases) == {"weights, expanded from awq"}


def change(folder: Path, edit: Callable[[State], object]) -> None:
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gptq", "scales"),
        ("awq", "qzeros"),
        ("w4a16", "weight_scale"),
        ("w8a8", "weight_scale"),
        ("nf4", "weight.absmax"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4"),
    ],
)
def test_a_missing_tensor_is_named(plain, tmp_path, name, kind):
    folder = write(plain, tmp_path, name)
    stem = "model.layers.1.self_attn.q_proj"
    change(folder, lambda state: state.pop(f"{stem}.{kind}"))
    shown = kind.partition(".bitsandbytes")[0]
    with pytest.raises(SourceError, match=rf"{stem} is quantised.*has no {shown}; download"):
        HuggingFaceFolder(folder, "tiny")


@pytest.mark.parametrize(("name", "kind"), [("gptq", "scales"), ("nf4", "weight.absmax")])
def test_tensors_that_do_not_fit_together_are_refused(plain, tmp_path, name, kind):
    folder = write(plain, tmp_path, name)
    stem = "model.layers.1.self_attn.q_proj"
    full = f"{stem}.{kind}"
    change(folder, lambda state: state.update({full: state[full].flatten()[:3].contiguous()}))
    with pytest.raises(SourceError, match=rf"{stem}: its \w+ tensors do not fit together"):
        folder_tensors(folder)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "hqq"}, r"quantised \(hqq\), which is not read"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"},
            r"\(auto-round, packed as auto_round:gptqmodel\)",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            r"\(gptq, packed as marlin\)",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            r"\(compressed-tensors, marlin-24\)",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            r"quantised \(modelopt, NVFP4\), which is not read",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"\(awq for the kernel gemv\)"),
        ({"quant_method": "gptq", "bits": 3}, r"\(gptq, 3 bits\), which is not read"),
    ],
)
def test_a_layout_that_is_not_read_is_named_with_what_to_do(plain, tmp_path, settings, text):
    folder = write(plain, tmp_path, "gptq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(SourceError, match=f"{text}.*--use_weight_only"):
        HuggingFaceFolder(folder, "tiny")


def test_a_quantised_config_with_plain_tensors_is_refused(plain, tmp_path):
    folder = write(plain, tmp_path, "gptq")
    save_file(load_file(tmp_path / "meant" / "model.safetensors"), folder / "model.safetensors")
    with pytest.raises(SourceError, match=r"quantised \(gptq\), but no tensor is"):
        HuggingFaceFolder(folder, "tiny")

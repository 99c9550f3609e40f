"""Write tiny checkpoints with the libraries that quantise models.

    write_quantised.py PLAIN OUTPUT LIBRARY

PLAIN is an unquantised folder. For each format of the library, OUTPUT/FORMAT/quantised is what the
library writes, and OUTPUT/FORMAT/meant the model with the weights as the library expands them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

GROUP = 32
Weights = dict[str, torch.Tensor]


def load(plain: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, **options
    ).eval()


def save_meant(plain: Path, folder: Path, weights: Weights) -> None:
    """Write the plain model with these weights in place of its own, by module."""
    model = load(plain)
    for name, weight in weights.items():
        module = model.get_submodule(name)
        by_inputs = type(module).__name__ == "Conv1D"
        module.weight.data.copy_(weight.t() if by_inputs else weight)
    assert weights, "the library has quantised no layer"
    model.save_pretrained(folder)


# --- compressed-tensors

INT8_TOKENS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "symmetric": True,
    "dynamic": True,
}
FP8_TOKENS = {**INT8_TOKENS, "type": "float"}


def arguments(bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **others}


COMPRESSED: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": (arguments(4, "group", group_size=GROUP), None),
    "w4a16-zeros": (arguments(4, "group", group_size=GROUP, symmetric=False), None),
    "w4a16-channel": (arguments(4, "channel"), None),
    "w8a16": (arguments(8, "group", group_size=GROUP), None),
    "w8a8": (arguments(8, "channel"), INT8_TOKENS),
    "w8a8-zeros": (arguments(8, "channel", symmetric=False), INT8_TOKENS),
    "w8a8-group": (arguments(8, "group", group_size=GROUP), INT8_TOKENS),
    "fp8-tensor": (arguments(8, "tensor", type="float"), FP8_TOKENS),
    "fp8-channel": (arguments(8, "channel", type="float"), FP8_TOKENS),
    "fp8-group": (arguments(8, "group", group_size=GROUP, type="float"), FP8_TOKENS),
    "fp8-block": (arguments(8, "block", block_structure=[64, 32], type="float"), FP8_TOKENS),
}


def bounds(weight: torch.Tensor, settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest weights that share a scale."""
    strategy = str(getattr(settings.strategy, "value", settings.strategy))
    if strategy == "tensor":
        return weight.min(), weight.max()
    if strategy == "channel":
        return weight.amin(1, True), weight.amax(1, True)
    if strategy == "group":
        groups = weight.unflatten(1, (-1, settings.group_size))
        return groups.amin(2), groups.amax(2)
    tall, wide = settings.block_structure
    blocks = weight.unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def write_compressed(plain: Path, output: Path, name: str) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weights, activations = COMPRESSED[name]
    given = {"targets": ["Linear"], "weights": QuantizationArgs(**weights)}
    if activations:
        given["input_activations"] = QuantizationArgs(**activations)
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(**given)},
        ignore=["lm_head"],
        quantization_status="initialized",
    )
    model = load(plain)
    apply_quantization_config(model, config)
    meant: Weights = {}
    for module_name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        weight = module.weight.data
        scale, zero = calculate_qparams(*bounds(weight, scheme.weights), scheme.weights)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
        meant[module_name] = fake_quantize(
            weight,
            module.weight_scale.data,
            getattr(module, "weight_zero_point", None),
            scheme.weights,
        )
    save_meant(plain, output / "meant", meant)
    config.quantization_status = "frozen"
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(output / "quantised")
    compressor.update_config(output / "quantised")


# --- bitsandbytes

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {**FOUR_BITS, "bnb_4bit_quant_type": "nf4"},
    "fp4": {**FOUR_BITS, "bnb_4bit_quant_type": "fp4"},
    "nf4-nested": {
        **FOUR_BITS,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
}


def write_bitsandbytes(plain: Path, output: Path, name: str) -> None:
    import bitsandbytes

    config = transformers.BitsAndBytesConfig(**BITSANDBYTES[name])
    model = load(plain, quantization_config=config, device_map="cpu")
    meant: Weights = {}
    for module_name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            meant[module_name] = bitsandbytes.functional.dequantize_4bit(
                module.weight.data, module.weight.quant_state
            )
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            meant[module_name] = module.weight.data.float() * module.weight.SCB[:, None] / 127
    save_meant(plain, output / "meant", meant)
    model.save_pretrained(output / "quantised")


# --- AutoAWQ: its own module packs the weights, without the search for the best ones


def grouped(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points, [out, groups], of 4 bits."""
    groups = weight.unflatten(1, (-1, GROUP))
    smallest = groups.amin(2).clamp(max=0)
    scales = ((groups.amax(2) - smallest) / 15).half().float()
    return scales, (-smallest / scales).round().clamp(1, 15)


def write_packed(
    plain: Path,
    output: Path,
    settings: dict[str, Any],
    make: Callable[[torch.nn.Linear], tuple[Weights, torch.Tensor]],
) -> None:
    """Quantise all linear layers but the head. make: returns tensors and the expanded weight"""
    model = load(plain)
    state = load_file(plain / "model.safetensors")
    meant: Weights = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        tensors, meant[name] = make(module)
        del state[f"{name}.weight"]
        state |= {f"{name}.{kind}": tensor.contiguous() for kind, tensor in tensors.items()}
    save_meant(plain, output / "meant", meant)
    folder = output / "quantised"
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file(state, folder / "model.safetensors")


def write_autoawq(plain: Path, output: Path, name: str) -> None:
    # its own __init__ imports what calibration needs; only the module that packs is used here
    spec = importlib.util.find_spec("awq")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    for package in ("awq", "awq.modules", "awq.modules.linear"):
        module = types.ModuleType(package)
        module.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
        sys.modules[package] = module
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def make(linear: torch.nn.Linear) -> tuple[Weights, torch.Tensor]:
        scales, zeros = grouped(linear.weight.data)
        scales = scales.t().contiguous()
        zeros = zeros.t().contiguous()
        # the module assumes that no weight is outside of the levels of its group
        packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales, zeros=zeros)
        expanded = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP)
        tensors = {kind: getattr(packed, kind) for kind in ("qweight", "qzeros", "scales")}
        return tensors, expanded.t().float()

    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    }
    write_packed(plain, output, settings, make)


# --- ModelOpt

# without scales of blocks: an export rounds queries, keys and values again, to scales they share
MODELOPT = {
    "modelopt-fp8": "FP8_DEFAULT_CFG",
    "modelopt-fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
}


def write_modelopt(plain: Path, output: Path, name: str) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def run(model: Any) -> None:
        model(torch.arange(3, 60)[None])

    model = load(plain)
    mtq.quantize(model, getattr(mtq, MODELOPT[name]), run)
    meant: Weights = {}
    for module_name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is not None and quantizer.is_enabled:
            meant[module_name] = quantizer(module.weight.data)
    save_meant(plain, output / "meant", meant)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=output / "quantised")


# --- AutoRound, without its search: it packs to the layout of GPTQ

AUTOROUND = {"autoround": True, "autoround-zeros": False}


def write_autoround(plain: Path, output: Path, name: str) -> None:
    from auto_round import AutoRound

    options = {"bits": 4, "group_size": GROUP, "sym": AUTOROUND[name]}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))
    )
    rounding = AutoRound(
        load(plain), tokenizer, iters=0, disable_opt_rtn=True, device_map="cpu", **options
    )
    model, _ = rounding.quantize()
    meant = {
        module_name: module.weight.data.clone()
        for module_name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module_name != "lm_head"
    }
    save_meant(plain, output / "meant", meant)
    rounding.save_quantized(output / "quantised", format="auto_round:auto_gptq")


# --- transformers' fp8: it quantises whole models on a GPU only, single weights anywhere

FINE_GRAINED = {"hf-fp8-block": (32, 64), "hf-fp8-tensor": None}


def write_fine_grained(plain: Path, output: Path, name: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = transformers.FineGrainedFP8Config(weight_block_size=FINE_GRAINED[name])
    holder = types.SimpleNamespace(quantization_config=config)

    def make(linear: torch.nn.Linear) -> tuple[Weights, torch.Tensor]:
        found = Fp8Quantize(holder).convert({"layer.weight": linear.weight.data})
        given = {name: [tensor] for name, tensor in found.items()}
        expanded = Fp8Dequantize(holder).convert(given, full_layer_name="layer.weight")
        tensors = {name.removeprefix("layer."): tensor for name, tensor in found.items()}
        return tensors, expanded["layer.weight"][0].float()

    settings = {
        key: value
        for key, value in config.to_dict().items()
        if key in ("quant_method", "activation_scheme", "weight_block_size")
    }
    write_packed(plain, output, settings, make)


WRITERS: dict[str, tuple[Callable[[Path, Path, str], None], tuple[str, ...]]] = {
    "compressed-tensors": (write_compressed, tuple(COMPRESSED)),
    "bitsandbytes": (write_bitsandbytes, tuple(BITSANDBYTES)),
    "autoawq": (write_autoawq, ("usual",)),
    "modelopt": (write_modelopt, tuple(MODELOPT)),
    "autoround": (write_autoround, tuple(AUTOROUND)),
    "transformers": (write_fine_grained, tuple(FINE_GRAINED)),
}


if __name__ == "__main__":
    plain_folder, output_folder, library = sys.argv[1:]
    write, names = WRITERS[library]
    for one in names:
        target = Path(output_folder) / one
        target.mkdir(parents=True)
        write(Path(plain_folder), target, one)
        print(one)

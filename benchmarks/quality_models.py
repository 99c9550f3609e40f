"""Models for quality.py, made of the default model's GGUF file, that compute the same function."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from slipstream.model.spec import ModelSpec
from slipstream.weights.checkpoint import write_checkpoint
from slipstream.weights.sources.open_source import open_source

_BY_INPUTS = ("attention.qkv.weight", "mlp.fc.weight", "mlp.gate.weight")
_BY_OUTPUTS = ("attention.dense.weight", "mlp.proj.weight")


def shuffled_checkpoint(model: str, folder: Path) -> Path:
    """Write a Llama-like model as a checkpoint with its channels in another order.

    The default model's weights are 16 levels in groups of 32, on which rounding to 16 levels in
    groups of 32 changes nothing. In the new order, which no result depends on, each group holds
    columns of 32 others: its weights are as those of a model that was never quantised.
    """
    source = open_source(model)
    write_checkpoint(source, folder, dtype="float32")
    file = folder / "rank0.safetensors"
    tensors = load_file(file)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randperm(source.spec.hidden_size, generator=random)
    for name, tensor in tensors.items():
        if name.endswith(_BY_OUTPUTS) or tensor.dim() == 1:
            tensors[name] = tensor[hidden]
        elif name.endswith((*_BY_INPUTS, "embedding.weight", "lm_head.weight")):
            tensors[name] = tensor[:, hidden]
    for layer in range(source.spec.layers):
        _shuffle_layer(source.spec, f"transformer.layers.{layer}.", tensors, random)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return folder


def _shuffle_layer(
    spec: ModelSpec, prefix: str, tensors: dict[str, torch.Tensor], random: torch.Generator
) -> None:
    """Shuffle the middle of the MLP and the elements of each value head."""
    middle = torch.randperm(spec.ffn_size, generator=random)
    for name in ("fc", "gate"):
        tensors[f"{prefix}mlp.{name}.weight"] = tensors[f"{prefix}mlp.{name}.weight"][middle]
    proj = f"{prefix}mlp.proj.weight"
    tensors[proj] = tensors[proj][:, middle]
    orders = [torch.randperm(spec.head_size, generator=random) for _ in range(spec.kv_heads)]
    first = spec.q_size + spec.kv_size
    values = [first + head * spec.head_size + order for head, order in enumerate(orders)]
    qkv = f"{prefix}attention.qkv.weight"
    tensors[qkv] = tensors[qkv][torch.cat([torch.arange(first), *values])]
    shared = spec.heads // spec.kv_heads
    columns = [head * spec.head_size + orders[head // shared] for head in range(spec.heads)]
    dense = f"{prefix}attention.dense.weight"
    tensors[dense] = tensors[dense][:, torch.cat(columns)]


def q8_0_file(model: Path, target: Path) -> Path:
    """Write a GGUF file with the matrices of another one as Q8_0."""
    reader = GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kinds = field.types
        writer.add_key_value(
            field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None
        )
    form = GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        rows = quantize(dequantize(tensor.data, tensor.tensor_type), form)
        writer.add_tensor(tensor.name, rows, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target

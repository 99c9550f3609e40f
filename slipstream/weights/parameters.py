"""Which parameters a model has, in a checkpoint and in an engine, with their shapes. No torch here.

A checkpoint holds the names of `model/spec.py`. An engine holds the same with `mlp.fc` and
`mlp.gate` fused into `mlp.gate_up`, and with the linears quantised on request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from slipstream.model.spec import Experts, ModelSpec

Shape = tuple[int, ...]
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
DTYPE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_LINEARS = (
    ".attention.qkv.weight",
    ".attention.dense.weight",
    ".mlp.gate_up.weight",
    ".mlp.fc.weight",
    ".mlp.proj.weight",
    ".mlp.experts.gate_up.weight",
    ".mlp.experts.proj.weight",
    ".mlp.shared.gate_up.weight",
    ".mlp.shared.proj.weight",
)
_GROUP_SIZE = 32  # of int4: what keeps a small model itself; larger groups lose more than they save
_EMBEDDING = "transformer.vocab_embedding.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Quantisation:
    """`algorithm`: None, "W8A16" (a scale a row), "W4A16" (scale and offset a group of `group_size`
    inputs) or "FP8" (e4m3 with a scale a row; products then take e4m3 activations with a scale a
    token).
    """

    algorithm: str | None = None
    group_size: int = 0
    kv_cache: str | None = None  # "FP8": keys and values are kept in e4m3, where the device can
    excluded: tuple[str, ...] = ()  # patterns of the linears that are stored as they are

    @property
    def bits(self) -> int:
        return {None: 0, "W8A16": 8, "W4A16": 4, "FP8": 8}[self.algorithm]


@dataclass(frozen=True)
class TensorSlot:
    """The place of one tensor in a file: its type by the safetensors code, and its shape."""

    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class EngineParameter:
    """One parameter of an engine and the checkpoint parameters whose rows it joins."""

    name: str
    parts: tuple[str, ...]
    shape: Shape
    bits: int  # of a weight-only quantised linear; 0: stored as it is


def choose_quantisation(
    spec: ModelSpec, weight_only: str | None, fp8_kv_cache: bool = False
) -> Quantisation:
    """`weight_only`: None, "int8", "int4" or "fp8". The group of int4 must divide the inputs of
    every linear.
    """
    kv_cache = "FP8" if fp8_kv_cache else None
    if weight_only is None:
        return Quantisation(kv_cache=kv_cache)
    if weight_only == "int8":
        return Quantisation("W8A16", kv_cache=kv_cache)
    if weight_only == "fp8":
        return Quantisation("FP8", kv_cache=kv_cache, excluded=_not_in_fp8(spec))
    if weight_only != "int4":
        raise ValueError(f"precision {weight_only!r} of the weights is not one of int8, int4, fp8")
    inputs = (spec.hidden_size, spec.q_size, spec.embedding_width, *spec.ffn_sizes)
    if all(count % _GROUP_SIZE == 0 for count in inputs):
        return Quantisation("W4A16", _GROUP_SIZE, kv_cache)
    raise ValueError(
        f"int4 needs sizes that are multiples of {_GROUP_SIZE}; this model's linears take "
        f"{', '.join(map(str, sorted(set(inputs))))} inputs: use int8"
    )


def _not_in_fp8(spec: ModelSpec) -> tuple[str, ...]:
    """In a narrow model, the linears whose rounding costs most for their size.

    The last layer takes back large parts of the residual stream: its error is large beside what is
    left.
    """
    return (
        ("*.attention.qkv", "*.mlp.*proj", f"*.layers.{spec.layers - 1}.*")
        if spec.fp8_sensitive
        else ()
    )


def checkpoint_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every parameter of the model under its checkpoint name, in the order files hold them."""
    shapes: dict[str, Shape] = {_EMBEDDING: (spec.vocab_size, spec.embedding_width)}
    if spec.embedding_size:
        shapes["transformer.project_in.weight"] = (spec.hidden_size, spec.embedding_size)
        shapes["transformer.project_out.weight"] = (spec.embedding_size, spec.hidden_size)
    if spec.position == "learned":
        shapes["transformer.position_embedding.weight"] = (spec.max_positions, spec.hidden_size)
    for layer in range(spec.layers):
        shapes.update(_layer_shapes(spec, layer, f"transformer.layers.{layer}."))
    if spec.final_norm:
        shapes.update(_norm("transformer.ln_f", spec))
    if not spec.tied_embeddings:
        shapes[_HEAD] = (spec.vocab_size, spec.embedding_width)
    if spec.head_bias:
        shapes["lm_head.bias"] = (spec.vocab_size,)
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int, prefix: str) -> Iterator[tuple[str, Shape]]:
    yield from _norm(f"{prefix}input_layernorm", spec)
    yield from _linear(f"{prefix}attention.qkv", spec.qkv_size, spec.hidden_size, spec.qkv_bias)
    if spec.qk_norm:
        yield f"{prefix}attention.q_layernorm.weight", (spec.head_size,)
        yield f"{prefix}attention.k_layernorm.weight", (spec.head_size,)
    yield from _linear(f"{prefix}attention.dense", spec.hidden_size, spec.q_size, spec.o_proj_bias)
    if not spec.shared_norm:
        yield from _norm(f"{prefix}post_layernorm", spec)
    if spec.output_norms:
        yield from _norm(f"{prefix}pre_feedforward_layernorm", spec)
    experts = spec.experts_of_layer(layer)
    if experts is None:
        yield from _feed_forward_shapes(spec, f"{prefix}mlp.")
    else:
        yield from _expert_shapes(experts, spec.hidden_size, f"{prefix}mlp.")
    if spec.output_norms:
        yield from _norm(f"{prefix}post_feedforward_layernorm", spec)


def _feed_forward_shapes(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{prefix}fc", spec.ffn_size, spec.hidden_size, spec.mlp_bias)
    if spec.gated_mlp:
        yield from _linear(f"{prefix}gate", spec.ffn_size, spec.hidden_size, spec.mlp_bias)
    yield from _linear(f"{prefix}proj", spec.hidden_size, spec.ffn_size, spec.mlp_bias)


def _expert_shapes(experts: Experts, hidden_size: int, prefix: str) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}router.weight", (experts.count, hidden_size)
    yield f"{prefix}experts.gate_up.weight", (experts.count * 2 * experts.ffn_size, hidden_size)
    yield f"{prefix}experts.proj.weight", (experts.count * hidden_size, experts.ffn_size)
    if experts.shared_ffn_size:
        yield f"{prefix}shared.gate_up.weight", (2 * experts.shared_ffn_size, hidden_size)
        yield f"{prefix}shared.proj.weight", (hidden_size, experts.shared_ffn_size)
        yield f"{prefix}shared_share.weight", (1, hidden_size)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (spec.hidden_size,)
    if spec.norm == "layer":
        yield f"{name}.bias", (spec.hidden_size,)


def engine_parameters(spec: ModelSpec, quantisation: Quantisation) -> list[EngineParameter]:
    """The parameters of an engine, in file order."""
    shapes = checkpoint_shapes(spec)
    head_bits = 0 if quantisation.algorithm == "FP8" else quantisation.bits  # as upstream leaves it
    parameters = []
    for name, shape in shapes.items():
        parts: tuple[str, ...] = (name,)
        if spec.gated_mlp and ".mlp.gate." in name:
            continue  # joined to the fc before it
        if spec.gated_mlp and ".mlp.fc." in name:
            parts = (name, name.replace(".mlp.fc.", ".mlp.gate."))
            name = name.replace(".mlp.fc.", ".mlp.gate_up.")
            shape = (2 * shape[0], *shape[1:])
        bits = head_bits if name == _HEAD else quantisation.bits if name.endswith(_LINEARS) else 0
        if any(
            fnmatchcase(name.removesuffix(".weight"), pattern) for pattern in quantisation.excluded
        ):
            bits = 0
        parameters.append(EngineParameter(name, parts, shape, bits))
    if head_bits and spec.tied_embeddings:
        # the head is read whole every step, the embedding a row a token: only the head gains from
        # few bits
        parameters.append(EngineParameter(_HEAD, (_EMBEDDING,), shapes[_EMBEDDING], head_bits))
    return parameters


def engine_layout(spec: ModelSpec, dtype: str, quantisation: Quantisation) -> dict[str, TensorSlot]:
    """Every tensor of an engine file, in file order; `dtype` as in "bfloat16"."""
    layout: dict[str, TensorSlot] = {}
    for parameter in engine_parameters(spec, quantisation):
        if parameter.bits:
            layout.update(_quantised_slots(parameter, quantisation))
        else:
            layout[parameter.name] = TensorSlot(DTYPE_CODES[dtype], parameter.shape)
    return layout


def scales_name(weight: str) -> str:
    return weight.removesuffix(".weight") + ".scales"


def _quantised_slots(
    parameter: EngineParameter, quantisation: Quantisation
) -> dict[str, TensorSlot]:
    rows, columns = parameter.shape
    scales = scales_name(parameter.name)
    if parameter.bits == 8:
        code = "F8_E4M3" if quantisation.algorithm == "FP8" else "I8"
        return {
            parameter.name: TensorSlot(code, (rows, columns)),
            scales: TensorSlot("F32", (rows,)),
        }
    groups = columns // quantisation.group_size
    return {
        parameter.name: TensorSlot("U8", (rows, columns // 2)),
        scales: TensorSlot("F32", (rows, groups, 2)),
    }

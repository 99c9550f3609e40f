"""The parameters of a model, in a checkpoint and in an engine, with their shapes. Needs no torch.

A checkpoint uses the names of `model/spec.py`. An engine uses the same names, with `mlp.fc` and
`mlp.gate` fused into `mlp.gate_up` and with the linears quantised on request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from slipstream.kernels.block_sizes import BLOCK_SIZES
from slipstream.model.spec import Experts, LatentAttention, ModelSpec

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
DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}
PLAIN_FORMS = frozenset(DTYPE_CODES.values())  # forms of stored rows that are no blocks
# Rows of e4m3 numbers, each followed by its float32 scale: a source has them in this form, an
# engine as two tensors.
E4M3_FORM = "F8_E4M3"
_LINEARS = (
    ".attention.qkv.weight",
    ".attention.dense.weight",
    ".attention.q_a.weight",
    ".attention.q_b.weight",
    ".attention.kv_a.weight",
    ".mlp.gate_up.weight",
    ".mlp.fc.weight",
    ".mlp.proj.weight",
    ".mlp.experts.gate_up.weight",
    ".mlp.experts.proj.weight",
    ".mlp.shared.gate_up.weight",
    ".mlp.shared.proj.weight",
)
# 16 bits would round scores that differ by little, and other experts would be chosen
_CORRECTION = ".mlp.router_correction.weight"
_GROUP_SIZE = 32  # group of int4; larger groups lose more accuracy than the bytes they save
_EMBEDDING = "transformer.vocab_embedding.weight"
_HEAD = "lm_head.weight"


class StoredRows(NamedTuple):
    """Consecutive rows of a matrix that keep the form of the model's file."""

    form: str  # a name of BLOCK_SIZES; or one of PLAIN_FORMS, for all rows of the matrix
    rows: int


@dataclass(frozen=True)
class Quantisation:
    """How the linears and the KV cache are stored. The values of `algorithm`:

    None     not quantised
    "GGUF"   matrices as in the GGUF file, by name in `stored`; vectors in float32
    "W8A16"  int8 with one scale per row
    "W4A16"  int4 with one scale and one offset per group of `group_size` inputs
    "FP8"    e4m3 with one scale per row; activations are e4m3 with one scale per token

    and of a checkpoint, whose build quantises: "W4A16_AWQ" and "W4A16_GPTQ"
    """

    algorithm: str | None = None
    group_size: int = 0
    kv_cache: str | None = None  # "FP8" for e4m3 on devices that support it
    excluded: tuple[str, ...] = ()  # patterns of the linears that are not quantised
    # parameter → its parts, in order; a fused matrix may have parts of different forms
    stored: Mapping[str, tuple[StoredRows, ...]] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        """Return the bits of a quantised weight, 0 if nothing is quantised. Of a GGUF file, those
        of most of its formats: 4, or 8 if all have as many.
        """
        if self.algorithm == "GGUF":
            forms = {part.form for parts in self.stored.values() for part in parts}
            return 8 if forms & BLOCK_SIZES.keys() <= {"Q8_0"} else 4
        return {None: 0, "W8A16": 8, "W4A16": 4, "FP8": 8}[self.algorithm]


@dataclass(frozen=True)
class TensorSlot:
    """One tensor of a file: its type as a safetensors code, and its shape."""

    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class EngineParameter:
    """One parameter of an engine, and the checkpoint parameters whose rows it concatenates."""

    name: str
    parts: tuple[str, ...]
    shape: Shape
    bits: int  # bits per weight of a linear that a build quantises; 0 if it is not quantised


def choose_quantisation(
    spec: ModelSpec, weight_only: str | None, fp8_kv_cache: bool = False
) -> Quantisation:
    """Return the quantisation for `weight_only`: None, "int8", "int4" or "fp8".

    Raises ValueError for int4 if the inputs of a linear are not whole groups.
    """
    kv_cache = "FP8" if fp8_kv_cache else None
    if weight_only is None:
        return Quantisation(kv_cache=kv_cache)
    if weight_only == "int8":
        return Quantisation("W8A16", kv_cache=kv_cache)
    if weight_only == "fp8":
        return Quantisation("FP8", kv_cache=kv_cache, excluded=_exclude_from_fp8(spec))
    if weight_only != "int4":
        raise ValueError(f"precision {weight_only!r} of the weights is not one of int8, int4, fp8")
    inputs = [spec.hidden_size, spec.attended_size, spec.embedding_width, *spec.ffn_sizes]
    if spec.latent is not None and spec.latent.query_rank:
        inputs.append(spec.latent.query_rank)
    if all(count % _GROUP_SIZE == 0 for count in inputs):
        return Quantisation("W4A16", _GROUP_SIZE, kv_cache)
    raise ValueError(
        f"int4 needs sizes that are multiples of {_GROUP_SIZE}; this model's linears take "
        f"{', '.join(map(str, sorted(set(inputs))))} inputs: use int8"
    )


def _exclude_from_fp8(spec: ModelSpec) -> tuple[str, ...]:
    """Return patterns of the linears that lose most accuracy for their size in FP8.

    They are excluded in models with a small hidden size only. The last layer is one of them: it
    cancels large parts of the residual stream, so its rounding error is large in comparison with
    the result.
    """
    if not spec.fp8_sensitive:
        return ()
    return ("*.attention.qkv", "*.mlp.*proj", f"*.layers.{spec.layers - 1}.*")


def checkpoint_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of every parameter by its checkpoint name, in file order."""
    shapes: dict[str, Shape] = {_EMBEDDING: (spec.vocab_size, spec.embedding_width)}
    if spec.embedding_size:
        shapes["transformer.project_in.weight"] = (spec.hidden_size, spec.embedding_size)
        shapes["transformer.project_out.weight"] = (spec.embedding_size, spec.hidden_size)
    if spec.position == "learned":
        shapes["transformer.position_embedding.weight"] = (spec.max_positions, spec.hidden_size)
    if spec.token_types:
        shapes["transformer.type_embedding.weight"] = (spec.token_types, spec.hidden_size)
    if spec.embedding_norm:
        shapes.update(_norm("transformer.ln_embed", spec))
    for layer in range(spec.layers):
        shapes.update(_layer_shapes(spec, layer, f"transformer.layers.{layer}."))
    if spec.final_norm:
        shapes.update(_norm("transformer.ln_f", spec))
    if not spec.tied_embeddings:
        shapes[_HEAD] = (spec.vocab_size, spec.embedding_width)
    if spec.head_bias:
        shapes["lm_head.bias"] = (spec.vocab_size,)
    if spec.labels:
        shapes["score.weight"] = (spec.labels, spec.hidden_size)
    if spec.labels and spec.score_dense:
        shapes["score.bias"] = (spec.labels,)
        shapes.update(_linear("score_dense", spec.hidden_size, spec.hidden_size, True))
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int, prefix: str) -> Iterator[tuple[str, Shape]]:
    if spec.input_norms:
        yield from _norm(f"{prefix}input_layernorm", spec)
    if spec.latent is None:
        yield from _linear(f"{prefix}attention.qkv", spec.qkv_size, spec.hidden_size, spec.qkv_bias)
    else:
        yield from _latent_shapes(spec, spec.latent, f"{prefix}attention.")
    if spec.normalises_qk(layer) and spec.qk_norm_kind != "plain":
        yield from _qk_norms(spec, f"{prefix}attention.")
    if spec.sink_logits:
        yield f"{prefix}attention.sinks.weight", (spec.heads,)
    dense = f"{prefix}attention.dense"
    yield from _linear(dense, spec.hidden_size, spec.attended_size, spec.o_proj_bias)
    if not spec.shared_norm:
        yield from _norm(f"{prefix}post_layernorm", spec)
    if spec.output_norms and spec.input_norms:
        yield from _norm(f"{prefix}pre_feedforward_layernorm", spec)
    experts = spec.experts_of_layer(layer)
    if experts is None:
        yield from _feed_forward_shapes(spec, f"{prefix}mlp.")
    else:
        yield from _expert_shapes(experts, spec.hidden_size, f"{prefix}mlp.")
    if spec.output_norms:
        yield from _norm(f"{prefix}post_feedforward_layernorm", spec)


def _latent_shapes(
    spec: ModelSpec, latent: LatentAttention, prefix: str
) -> Iterator[tuple[str, Shape]]:
    queries = spec.heads * latent.query_size
    if latent.query_rank:
        yield from _linear(f"{prefix}q_a", latent.query_rank, spec.hidden_size, spec.qkv_bias)
        yield f"{prefix}q_a_layernorm.weight", (latent.query_rank,)
    yield f"{prefix}q_b.weight", (queries, latent.query_rank or spec.hidden_size)
    yield from _linear(f"{prefix}kv_a", latent.cached_size, spec.hidden_size, spec.qkv_bias)
    yield f"{prefix}kv_a_layernorm.weight", (latent.kv_rank,)
    rows = spec.heads * (latent.plain_size + latent.value_size)
    yield f"{prefix}kv_b.weight", (rows, latent.kv_rank)


def _feed_forward_shapes(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{prefix}fc", spec.ffn_size, spec.hidden_size, spec.mlp_bias)
    if spec.gated_mlp:
        yield from _linear(f"{prefix}gate", spec.ffn_size, spec.hidden_size, spec.mlp_bias)
    yield from _linear(f"{prefix}proj", spec.hidden_size, spec.ffn_size, spec.mlp_bias)


def _expert_shapes(experts: Experts, hidden_size: int, prefix: str) -> Iterator[tuple[str, Shape]]:
    biases = experts.biases
    up_rows = experts.count * 2 * experts.ffn_size
    down_rows = experts.count * hidden_size
    yield from _linear(f"{prefix}router", experts.count, hidden_size, biases)
    if experts.corrected:
        yield f"{prefix}router_correction.weight", (experts.count,)
    yield from _linear(f"{prefix}experts.gate_up", up_rows, hidden_size, biases)
    yield from _linear(f"{prefix}experts.proj", down_rows, experts.ffn_size, biases)
    if experts.shared_ffn_size:
        yield f"{prefix}shared.gate_up.weight", (2 * experts.shared_ffn_size, hidden_size)
        yield f"{prefix}shared.proj.weight", (hidden_size, experts.shared_ffn_size)
    if experts.shared_ffn_size and experts.shared_router:
        yield f"{prefix}shared_share.weight", (1, hidden_size)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _qk_norms(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Shape]]:
    q_size, k_size = spec.qk_norm_sizes
    for name, size in (("q_layernorm", q_size), ("k_layernorm", k_size)):
        yield f"{prefix}{name}.weight", (size,)
        if spec.qk_norm_bias:
            yield f"{prefix}{name}.bias", (size,)


def _norm(name: str, spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    if not spec.norm_weights:
        return
    yield f"{name}.weight", (spec.hidden_size,)
    if spec.norm == "layer" and spec.norm_bias:
        yield f"{name}.bias", (spec.hidden_size,)


def engine_parameters(spec: ModelSpec, quantisation: Quantisation) -> list[EngineParameter]:
    """Return the parameters of an engine, in file order."""
    shapes = checkpoint_shapes(spec)
    parameters = []
    for name, shape in shapes.items():
        parts: tuple[str, ...] = (name,)
        if spec.gated_mlp and ".mlp.gate." in name:
            continue  # fused with the fc before it
        if spec.gated_mlp and ".mlp.fc." in name:
            parts = (name, name.replace(".mlp.fc.", ".mlp.gate."))
            name = name.replace(".mlp.fc.", ".mlp.gate_up.")
            shape = (2 * shape[0], *shape[1:])
        parameters.append(EngineParameter(name, parts, shape, _stored_bits(name, quantisation)))
    head_bits = _head_bits(quantisation)
    if head_bits and spec.tied_embeddings:
        # A step reads the whole head but only one row of the embedding per token, so only the head
        # gains from fewer bits.
        parameters.append(EngineParameter(_HEAD, (_EMBEDDING,), shapes[_EMBEDDING], head_bits))
    return parameters


def _head_bits(quantisation: Quantisation) -> int:
    """Return the bits of the output head. FP8 leaves the head unquantised, as upstream does."""
    return quantisation.bits if quantisation.algorithm in ("W8A16", "W4A16") else 0


def _stored_bits(name: str, quantisation: Quantisation) -> int:
    """Return the bits per weight of a parameter, or 0 if it is not quantised."""
    linear = name.removesuffix(".weight")
    if quantisation.algorithm == "GGUF":
        return 0
    if any(fnmatchcase(linear, pattern) for pattern in quantisation.excluded):
        return 0
    if name == _HEAD:
        return _head_bits(quantisation)
    return quantisation.bits if name.endswith(_LINEARS) else 0


def engine_layout(spec: ModelSpec, dtype: str, quantisation: Quantisation) -> dict[str, TensorSlot]:
    """Return every tensor of an engine file, in file order. `dtype` is a name like "bfloat16"."""
    layout: dict[str, TensorSlot] = {}
    for parameter in engine_parameters(spec, quantisation):
        if parameter.bits:
            layout.update(_quantised_slots(parameter, quantisation))
        elif parameter.name in quantisation.stored:
            layout.update(_stored_slots(parameter, quantisation.stored[parameter.name]))
        else:
            vector = len(parameter.shape) == 1
            code = plain_code(parameter.name, dtype)
            code = "F32" if vector and quantisation.algorithm == "GGUF" else code
            layout[parameter.name] = TensorSlot(code, parameter.shape)
    if not quantisation.stored:
        return layout
    # Blocks have any number of bytes: tensors of larger items come first, so that all are aligned.
    return dict(sorted(layout.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]))


def plain_code(parameter: str, dtype: str) -> str:
    """Return the type of a parameter that is not quantised, in files whose type is `dtype`."""
    return "F32" if parameter.endswith(_CORRECTION) else DTYPE_CODES[dtype]


def scales_name(weight: str) -> str:
    return weight.removesuffix(".weight") + ".scales"


def part_name(parameter: str, index: int) -> str:
    """Return the name of the tensor that holds a part of a stored matrix."""
    return f"{parameter}.{index}"


def _stored_slots(
    parameter: EngineParameter, parts: tuple[StoredRows, ...]
) -> dict[str, TensorSlot]:
    rows, columns = parameter.shape
    if sum(part.rows for part in parts) != rows:
        raise ValueError(f"{parameter.name}: its parts {parts} are not {rows} rows")
    if parts[0].form in PLAIN_FORMS:
        return {parameter.name: TensorSlot(parts[0].form, parameter.shape)}
    return {
        part_name(parameter.name, index): TensorSlot(
            "U8", (part.rows, BLOCK_SIZES[part.form].row_bytes(columns))
        )
        for index, part in enumerate(parts)
    }


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

"""The operations of a step: records that compiled code interprets.

A program is an array of records of 64-bit fields: a header, then the fields of the operation's
class in their order. Sizes and addresses are fields, so that one compiled object serves every
model. Addresses are those of numpy arrays that the caller keeps alive.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

RECORD_FIELDS = 32
_HEADER_FIELDS = 4


class Rows(IntEnum):
    """The rows of a step that an operation computes."""

    TOKENS = 0
    SAMPLES = 1  # tokens whose final states are computed
    LOGITS = 2  # the first samples, whose logits are computed


class Format(IntEnum):
    """The storage of rows of activations. The width of a row is a multiple of 32."""

    F32 = 0
    BF16 = 1
    # Bytes with sign, then five arrays. For each 32 bytes: scale, scale × sum (float32),
    # -128 × sum (int32). For each 16 bytes: scale × sum, -128 × sum.
    INT8 = 2


_ROW_BYTES = {Format.F32: 128, Format.BF16: 64, Format.INT8: 60}  # of 32 elements


def row_bytes(kind: Format, width: int) -> int:
    """Return the bytes of a row of activations; `width` is a multiple of 32."""
    return width // 32 * _ROW_BYTES[kind]


class WeightFormat(IntEnum):
    """The packed layout of the weights of 32 outputs; see pack.py and pack_levels.py."""

    F32 = 0
    BF16 = 1
    INT4 = 2  # scale × level + offset for 32 inputs
    INT4_HALVES = 3  # the same for 16 inputs
    INT8 = 4  # scale × level for 32 inputs
    INT8_OFFSET = 5  # scale × level + offset for 32 inputs
    INT8_HALVES = 6  # scale × level for 16 inputs


class TableFormat(IntEnum):
    """The storage of embeddings: as packed weights of these formats, or row by row."""

    F32 = WeightFormat.F32
    BF16 = WeightFormat.BF16
    INT4 = WeightFormat.INT4
    INT4_HALVES = WeightFormat.INT4_HALVES
    INT8 = WeightFormat.INT8
    INT8_OFFSET = WeightFormat.INT8_OFFSET
    INT8_HALVES = WeightFormat.INT8_HALVES
    F32_ROWS = 8
    BF16_ROWS = 9
    NONE = 10  # the rows are there already


class Epilogue(IntEnum):
    """The operation on the result of a linear layer."""

    STORE = 0
    ADD = 1  # to the float32 target
    GATE = 2  # activation(first 16 outputs of a block) × last 16
    ACTIVATE = 3
    SPLIT = 4  # first 16 outputs of a block to the target, last 16 to `second`
    ADD_SCALED = 5  # as ADD, times `scale`
    # x × sigmoid(scale × x) × (y + 1) of the halves of GATE: x at most `limit`, y from -limit on
    CLAMPED_GATE = 6


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")


@dataclass(frozen=True)
class Operation:
    """Base of the operations. `float` fields are stored as float32."""

    def encoded(self) -> list[int]:
        return [
            _float_bits(getattr(self, field.name))
            if field.type == "float"
            else int(getattr(self, field.name))
            for field in fields(self)
        ]


@dataclass(frozen=True)
class Embed(Operation):
    """Write the embeddings of tokens, float32."""

    target: int
    target_stride: int
    table: int
    table_format: int  # a TableFormat
    size: int
    block_bytes: int  # of 32 packed outputs, or of a row
    scale: float
    positions: int  # address of learned positions, float32 [positions, size]; 0: none
    takes_given: int = 1  # 1: given embeddings replace those of the table


@dataclass(frozen=True)
class Norm(Operation):
    """Normalise rows: RMS norm or layer norm."""

    source: int
    source_stride: int
    gather: int  # 1: row i is that of sample token i
    target: int
    target_stride: int
    target_own: int  # distance between the targets of threads in a private step
    format: int
    adds: int  # 1: add the result to the float32 target
    weight: int
    bias: int  # 0: none
    size: int
    width: int  # of a row, with padding
    epsilon: float
    layer: int  # 1: layer norm


@dataclass(frozen=True)
class Copy(Operation):
    """Copy rows into another format, or gather them."""

    source: int
    source_stride: int
    gather: int
    target: int
    target_stride: int
    target_own: int
    format: int
    width: int


@dataclass(frozen=True)
class Linear(Operation):
    weights: int
    weight_format: int
    block_bytes: int  # of 32 outputs
    blocks: int
    inputs: int  # with padding
    x: int
    x_stride: int
    x_own: int  # distance between the inputs of threads in a private step
    target: int
    target_stride: int
    epilogue: int
    bias: int  # float32 [blocks × 32]; 0: none
    format: int  # of the target, for GATE and ACTIVATE: F32 or BF16
    activation: int
    second: int
    exact: int = 0  # 1: quantised weights take activations of bfloat16, not of 8 bits
    scale: float = 1.0  # of ADD_SCALED and CLAMPED_GATE
    limit: float = 0.0  # of CLAMPED_GATE


@dataclass(frozen=True)
class Heads(Operation):
    """Change queries, keys and values in place before RoPE: bounds, norms that RoPE does not have,
    and scales that depend on the position.
    """

    source: int  # float32 [tokens, heads + 2 kv_heads, head_size]
    source_stride: int
    heads: int
    kv_heads: int
    head_size: int
    clip: float  # bound of all numbers; 0: none
    q_weight: int  # float32 [heads × head_size]; 0: no norms
    q_bias: int  # 0: none
    k_weight: int
    k_bias: int
    layer: int  # 1: layer norms
    together: int  # 1: one norm over all heads
    epsilon: float
    scales: int  # factors of the queries, float32 [positions]; 0: none


@dataclass(frozen=True)
class Rope(Operation):
    """Normalise and rotate queries and keys, and write keys and values to the cache."""

    source: int  # float32 [tokens, heads + 2 kv_heads, head_size]
    source_stride: int
    queries: int
    query_stride: int
    format: int
    keys: int
    values: int
    head_stride: int  # bytes of a KV head in the cache
    heads: int
    kv_heads: int
    head_size: int
    cosine: int  # float32 [positions, half]; 0: no RoPE
    sine: int
    half: int  # pairs that are rotated
    q_norm: int  # float32 [head_size]; 0: none
    k_norm: int
    epsilon: float


@dataclass(frozen=True)
class Attention(Operation):
    queries: int
    query_stride: int
    format: int
    keys: int
    values: int
    head_stride: int
    heads: int
    kv_heads: int
    head_size: int
    target: int  # float32 [tokens, heads × head_size]
    target_stride: int
    scale: float
    softcap: float
    window: int  # larger than any position: none
    sinks: int
    chunk: int = 0  # positions: tokens attend within chunks of this length; 0: no chunks
    # A score falls by the slope of the head with each position. float32 [heads]; 0: it does not
    slopes: int = 0
    slope_scale: float = 1.0
    slopes_rounded: int = 0  # 1: slope × position is rounded to bfloat16
    sink_logits: int = 0  # float32 [heads], beside the scores of a head; 0: none


@dataclass(frozen=True)
class Merge(Operation):
    """Merge what attention computed for chunks of positions."""

    source: int
    source_stride: int
    gather: int
    target: int
    target_stride: int
    target_own: int
    format: int
    width: int
    heads: int
    head_size: int
    sink_logits: int = 0


@dataclass(frozen=True)
class Refine(Operation):
    """Compute the largest logits again from weights that are not quantised."""

    stride: int
    vocabulary: int
    states: int  # float32 [rows, size]
    states_stride: int
    table: int
    table_format: int  # F32_ROWS or BF16_ROWS
    row_bytes: int
    size: int
    bias: int  # 0: none
    margin: float  # logits from the largest one minus this are computed


@dataclass(frozen=True)
class Softcap(Operation):
    """Scale numbers, and then bound them."""

    source: int  # 0: the logits
    stride: int
    width: int
    cap: float  # 0: no bound
    scale: float = 1.0


@dataclass(frozen=True)
class Likeliest(Operation):
    """Find the largest logit of each row in each of some parts of the vocabulary."""

    stride: int
    vocabulary: int
    part: int  # tokens of a part, a multiple of 16
    parts: int
    tokens: int  # int64 [rows, parts]
    logits: int  # float32 [rows, parts]: nan if one of the part is


@dataclass(frozen=True)
class Candidates(Operation):
    """Find the tokens that a draw may take, among all of the vocabulary.

    A row of `found` has two of float32, the largest scaled logit and the sum of
    exp(scaled logit - largest), and an int32: the number of candidates, -1 if there are too many.
    """

    logits: int  # float32 [rows, vocabulary]
    stride: int
    vocabulary: int
    draws: int  # of each row: see Draw
    most: int  # candidates
    tokens: int  # int32 [rows, most]
    scaled: int  # float32 [rows, most]: logits divided by the temperature
    found: int  # float32 [rows, 4]


@dataclass(frozen=True)
class Route(Operation):
    """Choose the experts of each token, and weigh them."""

    logits: int  # float32 [tokens, padded experts], overwritten
    stride: int
    experts: int
    per_token: int
    sigmoid: int  # 1: weights are sigmoids of the chosen logits; 0: softmax over all
    normalised: int  # 1: the softmax is over the chosen ones
    scale: float  # of the weights
    chosen: int  # int64 [tokens, per_token]
    weights: int  # float32 [tokens, per_token]


@dataclass(frozen=True)
class Group(Operation):
    """Sort the pairs of a token and one of its experts by expert: one unit."""

    chosen: int
    per_token: int
    first: int  # the first expert that this rank holds
    held: int  # their number; pairs of others are left out
    counts: int  # int64 [held], for its own use
    # int64: how many of the experts have tokens; then of each: expert, first row, rows
    work: int
    tokens: int  # int64 [pairs]: of each row, its pair
    places: int  # int64 [pairs]: of each pair, its row; -1: none


@dataclass(frozen=True)
class Gather(Operation):
    """Write the rows that experts take: one for each pair."""

    source: int  # float32 [tokens, width]
    source_stride: int
    target: int
    target_stride: int
    format: int
    width: int
    per_token: int
    tokens: int  # of Group; 0: row i is that of the source
    weights: int  # factors of the rows, of Route; 0: none


@dataclass(frozen=True)
class ExpertLinear(Linear):
    """The linear layers of experts. `weights`, its format, and `block_bytes` are unused."""

    table: int = 0  # int64 [held, 3]: of each expert, address, format and block_bytes
    work: int = 0  # of Group


@dataclass(frozen=True)
class Combine(Operation):
    """Sum what experts computed for each token."""

    source: int  # float32 [pairs, width]
    source_stride: int
    per_token: int
    places: int  # of Group
    weights: int  # of Route; 0: none
    shared: int  # float32 [tokens, width] of the expert that all tokens take; 0: none
    shared_stride: int
    shared_logits: int  # float32 [tokens, ...]: weighs it by its sigmoid; 0: not weighed
    shared_logits_stride: int
    target: int
    target_stride: int
    width: int
    adds: int  # 1: add the sum to the target
    scale: float


KINDS: tuple[type[Operation], ...] = (
    Embed,
    Norm,
    Copy,
    Linear,
    Heads,
    Rope,
    Attention,
    Merge,
    Softcap,
    Likeliest,
    Refine,
    Candidates,
    Route,
    Group,
    Gather,
    ExpertLinear,
    Combine,
)


def field_index(operation: type[Operation], name: str) -> int:
    """Return the place of a field in a record."""
    return _HEADER_FIELDS + [field.name for field in fields(operation)].index(name)


def is_float_field(operation: type[Operation], name: str) -> bool:
    return next(field.type for field in fields(operation) if field.name == name) == "float"


@dataclass(frozen=True)
class Entry:
    """An operation in a program."""

    operation: Operation
    rows: Rows = Rows.TOKENS
    barrier: bool = True
    alone: bool = False  # in a private step each thread computes it for itself


def encode(entries: Sequence[Entry]) -> np.ndarray:
    """Return the records of a program: int64 [entries, RECORD_FIELDS]."""
    records = np.zeros((len(entries), RECORD_FIELDS), dtype=np.int64)
    for record, entry in zip(records, entries, strict=True):
        barrier = 2 if entry.alone else 1
        header = [KINDS.index(type(entry.operation)), barrier * entry.barrier]
        header += [int(entry.alone), int(entry.rows)]
        values = [*header, *entry.operation.encoded()]
        record[: len(values)] = values
    return records


def _float_bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def check(entries: Iterable[Entry]) -> None:
    """Raise ValueError if an operation has more fields than a record."""
    for entry in entries:
        if len(fields(entry.operation)) + _HEADER_FIELDS > RECORD_FIELDS:
            raise ValueError(f"{type(entry.operation).__name__} has too many fields")

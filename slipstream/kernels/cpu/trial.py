"""Run the code of an instruction level in this process, which a fault then ends.

    python -P -m slipstream.kernels.cpu.trial LEVEL FOLDER

The caller reads the exit code. If FOLDER has no code of the level, it is compiled and written to
the standard output, for the caller to keep.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.kernels.cpu.compiler.instruction_levels import BY_NAME
from slipstream.kernels.cpu.layout import GROUP, LANES
from slipstream.kernels.cpu.memory import aligned, aligned_rows
from slipstream.kernels.cpu.objects import Code, install_code, read_or_compile
from slipstream.kernels.cpu.operations import (
    ACTIVATIONS,
    Attention,
    Copy,
    Entry,
    Epilogue,
    Format,
    Linear,
    Rope,
    encode,
    row_bytes,
)
from slipstream.kernels.cpu.pack import Packed, pack
from slipstream.kernels.cpu.pack_levels import QuantisedRows, pack_levels
from slipstream.kernels.cpu.quantised_layouts import LAYOUTS, LevelLayout
from slipstream.kernels.cpu.records import Context
from slipstream.kernels.cpu.team import Team

_INPUTS = 64
_OUTPUTS = 40
_ROWS = 7
_TOKENS = 20
_HEADS = 4
_KV_HEADS = 2
_HEAD_SIZE = 32
_TABLE = np.zeros(LANES, dtype=np.int32)  # of blocks: the first one
_ROUNDING = {Format.F32: 1e-4, Format.BF16: 0.05}
_ELEMENTS = {Format.F32: np.float32, Format.BF16: np.uint16, Format.INT8: np.uint8}


def run_trial(code: Code) -> None:
    """Compute linear layers in every format, RoPE and attention; raise ValueError if a result is
    wrong.
    """
    team = Team(code, 2, 4096)
    for kind in (Format.F32, Format.BF16):
        _try_linear(team, kind)
        for tiled in (False, True):
            _try_attention(team, kind, tiled)
    for layout in LAYOUTS:
        _try_quantised(team, layout)
    team.close()


def _run(team: Team, operations: Sequence[object], tokens: int, **fields: int | np.ndarray) -> None:
    program = encode([Entry(operation) for operation in operations])  # type: ignore[arg-type]
    context = aligned(8 * Context.SIZE).view(np.int64)
    context[Context.PROGRAM] = program.ctypes.data
    context[Context.OPERATIONS] = len(program)
    context[Context.TOKENS] = tokens
    for name, value in fields.items():
        number = value if isinstance(value, int) else int(value.ctypes.data)
        context[Context[name]] = number
    team.run(int(context.ctypes.data))


def _check(team: Team, what: str, found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    # a difference that is not a number is no small one
    if not (np.abs(found - expected) <= bound).all():
        raise ValueError(f"{team.code.level.name}: {what} is wrong")


def _in_format(team: Team, numbers: np.ndarray, kind: Format) -> np.ndarray:
    """Return float32 rows in another format."""
    rows, width = numbers.shape
    item = np.dtype(_ELEMENTS[kind]).itemsize
    target = aligned_rows(rows, row_bytes(kind, width) // item, _ELEMENTS[kind])
    source = aligned_rows(rows, width, np.float32)
    source[:] = numbers
    copy = Copy(_address(source), width * 4, 0, _address(target), target.strides[0], 0, kind, width)
    _run(team, [copy], rows)
    return target


def _multiply(team: Team, packed: Packed, x: np.ndarray, exact: bool = False) -> np.ndarray:
    target = aligned_rows(_ROWS, packed.outputs, np.float32)
    operation = Linear(
        weights=packed.address,
        weight_format=packed.format,
        block_bytes=packed.block_bytes,
        blocks=packed.blocks,
        inputs=packed.inputs,
        x=_address(x),
        x_stride=x.strides[0],
        x_own=0,
        target=_address(target),
        target_stride=target.strides[0],
        epilogue=Epilogue.STORE,
        bias=0,
        format=Format.F32,
        activation=ACTIVATIONS.index("silu"),
        second=0,
        exact=exact,
    )
    _run(team, [operation], _ROWS)
    return target[:, :_OUTPUTS]


def _try_linear(team: Team, kind: Format) -> None:
    weight = np.arange(_OUTPUTS * _INPUTS, dtype=np.float32).reshape(_OUTPUTS, _INPUTS) % 8
    x = np.arange(_ROWS * _INPUTS, dtype=np.float32).reshape(_ROWS, _INPUTS) % 5
    packed = pack(_in_format(team, weight, kind))
    found = _multiply(team, packed, _in_format(team, x, kind))
    _check(team, f"a linear layer with {kind.name}", found, x @ weight.T, 0.0)


def _try_quantised(team: Team, layout: LevelLayout) -> None:
    """Compute with numbers that 8 bits hold exactly: each group has one of 127, so that its scale
    is 1.
    """
    chance = np.random.default_rng(0)
    top = 2**layout.bits // 2
    levels = chance.integers(-top, top, (_OUTPUTS, _INPUTS)).astype(np.int8)
    groups = (_OUTPUTS, _INPUTS // GROUP * layout.parts)
    scales = 2.0 ** chance.integers(-2, 2, groups).astype(np.float32)
    offsets = chance.integers(-4, 4, groups).astype(np.float32) if layout.has_offsets else None
    packed = pack_levels(QuantisedRows(levels, scales, offsets))
    if packed is None or packed.format is not layout.format:
        raise ValueError(f"the trial has no weights of {layout.format.name}")
    size = GROUP // layout.parts
    weight = levels * np.repeat(scales, size, axis=1)
    if offsets is not None:
        weight += np.repeat(offsets, size, axis=1)
    x = chance.integers(-127, 128, (_ROWS, _INPUTS)).astype(np.float32)
    x[:, ::GROUP] = 127
    for kind in (Format.INT8, Format.BF16):
        found = _multiply(team, packed, _in_format(team, x, kind), kind is Format.BF16)
        what = f"a linear layer with {layout.format.name} and {kind.name}"
        _check(team, what, found, x @ weight.T, 1.0)


def _try_attention(team: Team, kind: Format, tiled: bool) -> None:
    chance = np.random.default_rng(1)
    heads = _HEADS + 2 * _KV_HEADS
    given = aligned_rows(_TOKENS, heads * _HEAD_SIZE, np.float32)
    given[:] = chance.standard_normal(given.shape)
    angles = chance.uniform(0, 6, (_TOKENS, _HEAD_SIZE // 2)).astype(np.float32)
    found = _compute_attention(team, kind, tiled, given, angles)
    expected = _attend(given.reshape(_TOKENS, heads, _HEAD_SIZE), angles)
    what = f"attention with {kind.name}, {'tiles' if tiled else 'single tokens'}"
    _check(team, what, found, expected, _ROUNDING[kind])


def _compute_attention(
    team: Team, kind: Format, tiled: bool, given: np.ndarray, angles: np.ndarray
) -> np.ndarray:
    cosine = np.cos(angles)
    sine = np.sin(angles)
    cache = aligned_rows(2 * _KV_HEADS * _TOKENS, _HEAD_SIZE, _ELEMENTS[kind])
    queries = aligned_rows(_TOKENS, _HEADS * _HEAD_SIZE, _ELEMENTS[kind])
    target = aligned_rows(_TOKENS, _HEADS * _HEAD_SIZE, np.float32)
    head_bytes = cache.nbytes // (2 * _KV_HEADS)
    places = {
        "queries": _address(queries),
        "query_stride": queries.strides[0],
        "format": kind,
        "keys": _address(cache),
        "values": _address(cache) + _KV_HEADS * head_bytes,
        "head_stride": head_bytes,
        "heads": _HEADS,
        "kv_heads": _KV_HEADS,
        "head_size": _HEAD_SIZE,
    }
    rope = Rope(
        source=_address(given),
        source_stride=given.strides[0],
        cosine=_address(cosine),
        sine=_address(sine),
        half=_HEAD_SIZE // 2,
        q_norm=0,
        k_norm=0,
        epsilon=0.0,
        **places,
    )
    attention = Attention(
        target=_address(target),
        target_stride=target.strides[0],
        scale=_HEAD_SIZE**-0.5,
        softcap=0.0,
        window=2**30,
        sinks=0,
        **places,
    )
    _run(team, [rope, attention], _TOKENS, **_attention_work(tiled))
    return target


def _attention_work(tiled: bool) -> dict[str, int | np.ndarray]:
    """Return the fields of a step for one sequence, whose cache is one block."""
    positions = np.arange(_TOKENS)
    each = [(token, token + 1, _address(_TABLE)) for token in range(_TOKENS)]
    return {
        "POSITIONS": positions,
        "SLOTS": positions,
        "SINGLES": 0 if tiled else _TOKENS,
        "SINGLE_LIST": np.array(each, dtype=np.int64),
        "TILES": int(tiled),
        "TILE_LIST": np.array([(0, _TOKENS, 0, _address(_TABLE))], dtype=np.int64),
        "BLOCK_TOKENS": _TOKENS,
    }


def _attend(given: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Return what RoPE and attention compute. given: [tokens, heads + 2 kv_heads, head_size]"""
    first, second = np.split(given[:, : _HEADS + _KV_HEADS], 2, axis=2)
    cosine = np.cos(angles)[:, None]
    sine = np.sin(angles)[:, None]
    rotated = np.concatenate(
        (first * cosine - second * sine, second * cosine + first * sine), axis=2
    )
    repeats = _HEADS // _KV_HEADS
    keys = np.repeat(rotated[:, _HEADS:], repeats, axis=1)
    values = np.repeat(given[:, _HEADS + _KV_HEADS :], repeats, axis=1)
    scores = np.einsum("qhe,khe->hqk", rotated[:, :_HEADS], keys) * _HEAD_SIZE**-0.5
    scores[:, ~np.tri(_TOKENS, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    found: np.ndarray = np.einsum("hqk,khe->qhe", weights, values).reshape(_TOKENS, -1)
    return found


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def main() -> None:
    level = BY_NAME[sys.argv[1]]
    data, is_new = read_or_compile(level, Path(sys.argv[2]))
    if is_new:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    run_trial(install_code(level, data))


if __name__ == "__main__":
    main()

"""Compiled linear layers with quantised weights, against the numbers that they stand for."""

import numpy as np
import pytest
from cpu_steps import address, run

from slipstream.kernels.cpu.layout import GROUP
from slipstream.kernels.cpu.memory import aligned_rows
from slipstream.kernels.cpu.operations import (
    ACTIVATIONS,
    Copy,
    Embed,
    Entry,
    Epilogue,
    Format,
    Linear,
    TableFormat,
    WeightFormat,
    row_bytes,
)
from slipstream.kernels.cpu.pack_levels import QuantisedRows, choose_format, pack_levels

KINDS = {  # format → bits, inputs of a group, lowest level, offsets
    "Q4_0": (4, 32, -8, False),
    "Q4_1": (4, 32, 0, True),
    "Q8_0": (8, 32, -128, False),
    "Q5_1": (5, 32, 0, True),
    "Q2_K": (2, 16, 0, True),
    "Q6_K": (6, 16, -32, False),
    "rows": (8, 128, -128, False),
}
FORMATS = {
    "Q4_0": WeightFormat.INT4,
    "Q4_1": WeightFormat.INT4,
    "Q8_0": WeightFormat.INT8,
    "Q5_1": WeightFormat.INT8_OFFSET,
    "Q2_K": WeightFormat.INT4_HALVES,
    "Q6_K": WeightFormat.INT8_HALVES,
    "rows": WeightFormat.INT8,
}


def random_rows(kind, outputs, inputs, seed=0):
    bits, group, lowest, offsets = KINDS[kind]
    chance = np.random.default_rng(seed)
    levels = chance.integers(lowest, lowest + 2**bits, (outputs, inputs)).astype(np.int8)
    shape = (outputs, inputs // group)
    # as float16 holds them, and of very different sizes
    sizes = 10.0 ** chance.uniform(-4, 0, (outputs, 1))
    scales = (chance.standard_normal(shape) * sizes).astype(np.float16).astype(np.float32)
    if not offsets:
        return QuantisedRows(levels, scales, None)
    added = (chance.standard_normal(shape) * sizes).astype(np.float16).astype(np.float32)
    return QuantisedRows(levels, scales, added)


def weights_of(rows):
    repeats = rows.group
    found = rows.levels * np.repeat(rows.scales, repeats, axis=1).astype(np.float64)
    if rows.offsets is not None:
        found += np.repeat(rows.offsets, repeats, axis=1)
    return found


def quantised(team, numbers):
    """Return rows in Format.INT8 and the numbers that they stand for."""
    count, width = numbers.shape
    stored = np.zeros((count, row_bytes(Format.INT8, width)), dtype=np.uint8)
    strides = (numbers.strides[0], stored.strides[0])
    copy = Copy(address(numbers), strides[0], 0, address(stored), strides[1], 0, Format.INT8, width)
    run(team, [Entry(copy)], count)
    levels = np.ascontiguousarray(stored[:, :width]).view(np.int8)
    scales = np.ascontiguousarray(stored[:, width : width + width // 8]).view(np.float32)
    return stored, levels * np.repeat(scales, GROUP, axis=1).astype(np.float64)


def linear(team, packed, x, rows):
    target = aligned_rows(rows, packed.outputs, np.float32)
    operation = Linear(
        weights=packed.address,
        weight_format=packed.format,
        block_bytes=packed.block_bytes,
        blocks=packed.blocks,
        inputs=packed.inputs,
        x=address(x),
        x_stride=x.strides[0],
        x_own=0,
        target=address(target),
        target_stride=target.strides[0],
        epilogue=Epilogue.STORE,
        bias=0,
        format=Format.F32,
        activation=ACTIVATIONS.index("silu"),
        second=0,
    )
    run(team, [Entry(operation)], rows)
    return target


def test_activations_are_rounded_to_the_nearest_level(pair):
    numbers = np.random.default_rng(1).standard_normal((9, 96)).astype(np.float32)
    numbers[3, 32:64] = 0.0
    _, found = quantised(pair, numbers)
    largest = np.abs(numbers).reshape(9, 3, 32).max(axis=2).repeat(32, axis=1)
    assert (np.abs(found - numbers) <= largest / 254 + 1e-6).all()
    assert (found[3, 32:64] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(32, 128), (50, 256), (7, 640)])
def test_every_number_of_rows(team, kind, shape):
    rows = random_rows(kind, *shape)
    packed = pack_levels(rows)
    assert packed.format is FORMATS[kind] is choose_format(rows)
    weight = weights_of(rows)
    numbers = np.random.default_rng(2).standard_normal((64, shape[1])).astype(np.float32)
    stored, exact = quantised(team, numbers)
    expected = exact @ weight.T
    sizes = np.abs(exact) @ np.abs(weight.T)
    for count in [*range(1, 10), 23, 64]:
        target = linear(team, packed, stored, count)
        found = target[:, : shape[0]]
        # float16 rounds what the offset of signed levels becomes
        assert (np.abs(found - expected[:count]) <= 4e-4 * sizes[:count] + 1e-6).all()
        assert (target[:, shape[0] :] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_among_any_others(pair, kind):
    packed = pack_levels(random_rows(kind, 64, 256))
    numbers = np.random.default_rng(2).standard_normal((40, 256)).astype(np.float32)
    stored, _ = quantised(pair, numbers)
    whole = linear(pair, packed, stored, 40)
    for rows in (1, 2, 3, 5, 17):
        assert np.array_equal(linear(pair, packed, stored[8:], rows), whole[8 : 8 + rows])


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_read_from_packed_weights(pair, kind):
    rows = random_rows(kind, 50, 256)
    packed = pack_levels(rows)
    tokens = np.array([0, 49, 17, 31, 32], dtype=np.int64)
    target = aligned_rows(5, 256, np.float32)
    embed = Embed(
        target=address(target),
        target_stride=target.strides[0],
        table=packed.address,
        table_format=TableFormat(packed.format),
        size=256,
        block_bytes=packed.block_bytes,
        scale=1.0,
        positions=0,
    )
    run(pair, [Entry(embed)], 5, token_ids=tokens)
    expected = weights_of(rows)[tokens]
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(target - expected) <= 1e-3 * largest).all()
    if kind in ("Q4_1", "Q8_0", "Q5_1", "rows"):
        assert np.allclose(target, expected, rtol=1e-6, atol=1e-6 * largest)


def test_groups_that_no_format_has_are_refused():
    levels = np.zeros((4, 48), dtype=np.int8)
    assert pack_levels(QuantisedRows(levels, np.ones((4, 2), np.float32), None)) is None
    wide = np.arange(-128, 128, dtype=np.int8).repeat(2).reshape(4, 128)
    halves = np.ones((4, 8), dtype=np.float32)
    assert pack_levels(QuantisedRows(wide, halves, halves)) is None

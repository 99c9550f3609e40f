"""Compiled linear layers against torch, on odd shapes and every number of rows."""

import numpy as np
import pytest
import torch
from cpu_steps import address, as_bf16, from_bf16, run

from slipstream.kernels.activation import ACTIVATIONS
from slipstream.kernels.cpu import operations
from slipstream.kernels.cpu.memory import aligned_rows, round_up
from slipstream.kernels.cpu.operations import Entry, Epilogue, Format, Linear
from slipstream.kernels.cpu.pack import interleave_halves, pack, padded_floats

SHAPES = [(32, 32), (33, 30), (96, 64), (100, 130), (7, 576)]


def rows_of(numbers, kind, columns):
    """Return rows in a format, padded with zeros."""
    padded = np.zeros((len(numbers), columns), dtype=np.float32)
    padded[:, : numbers.shape[1]] = numbers
    return padded if kind is Format.F32 else as_bf16(padded)


class Case:
    """A linear layer with random numbers, and what torch makes of it."""

    def __init__(self, outputs, inputs, rows, kind, gated=False):
        chance = np.random.default_rng(outputs * 1000 + inputs + rows)
        weight = chance.standard_normal((outputs, inputs), dtype=np.float32)
        x = chance.standard_normal((rows, inputs), dtype=np.float32)
        self.bias = chance.standard_normal(outputs, dtype=np.float32)
        if kind is Format.BF16:
            weight = as_bf16(weight)
        self.packed = pack(weight, gated)
        self.x = rows_of(x, kind, self.packed.inputs)
        self.rows = rows
        self.kind = kind
        exact_weight = from_bf16(weight) if kind is Format.BF16 else weight
        exact_x = from_bf16(self.x) if kind is Format.BF16 else self.x
        self.expected = exact_x[:, :inputs].astype(np.float64) @ exact_weight.T.astype(np.float64)

    def run(self, team, target, epilogue, bias=None, activation="silu", second=None):
        operation = Linear(
            weights=self.packed.address,
            weight_format=self.packed.format,
            block_bytes=self.packed.block_bytes,
            blocks=self.packed.blocks,
            inputs=self.packed.inputs,
            x=address(self.x),
            x_stride=self.x.strides[0],
            x_own=0,
            target=address(target),
            target_stride=target.strides[0],
            epilogue=epilogue,
            bias=address(bias),
            format=self.kind,
            activation=operations.ACTIVATIONS.index(activation),
            second=address(second),
        )
        run(team, [Entry(operation)], self.rows)


@pytest.mark.parametrize("kind", [Format.F32, Format.BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_of_rows(team, shape, kind):
    outputs, inputs = shape
    for rows in [*range(1, 14), 23, 40, 64]:
        case = Case(outputs, inputs, rows, kind)
        target = aligned_rows(rows, case.packed.outputs, np.float32)
        case.run(team, target, Epilogue.STORE)
        assert np.abs(target[:, :outputs] - case.expected).max() < 1e-4 * inputs**0.5
        assert (target[:, outputs:] == 0).all()


@pytest.mark.parametrize("kind", [Format.F32, Format.BF16])
def test_a_row_has_the_same_bits_among_any_others(pair, kind):
    case = Case(96, 130, 64, kind)
    target = aligned_rows(64, case.packed.outputs, np.float32)
    case.run(pair, target, Epilogue.STORE)
    whole_x = case.x
    for rows in (1, 2, 3, 5, 12, 13, 31):
        part = aligned_rows(rows, case.packed.outputs, np.float32)
        case.x = whole_x[10 : 10 + rows]
        case.rows = rows
        case.run(pair, part, Epilogue.STORE)
        assert np.array_equal(part, target[10 : 10 + rows])


def test_bias_and_addition(pair):
    case = Case(33, 30, 5, Format.F32)
    target = aligned_rows(5, case.packed.outputs, np.float32)
    target[:] = 2.0
    case.run(pair, target, Epilogue.ADD, padded_floats(case.bias, case.packed.outputs))
    assert np.abs(target[:, :33] - case.expected - case.bias - 2.0).max() < 1e-4


@pytest.mark.parametrize("activation", operations.ACTIVATIONS)
@pytest.mark.parametrize("kind", [Format.F32, Format.BF16])
def test_gates(pair, activation, kind):
    case = Case(2 * 40, 64, 7, kind, gated=True)
    bias = padded_floats(interleave_halves(case.bias), case.packed.outputs)
    width = round_up(40, 32)
    target = rows_of(np.zeros((7, width)), kind, width)
    case.run(pair, target, Epilogue.GATE, bias, activation)
    found = from_bf16(target) if kind is Format.BF16 else target
    whole = torch.from_numpy(case.expected + case.bias)
    expected = ACTIVATIONS[activation](whole[:, :40]) * whole[:, 40:]
    tolerance = 1e-4 if kind is Format.F32 else 0.02
    assert torch.allclose(torch.from_numpy(found[:, :40]).double(), expected, tolerance, tolerance)
    assert (found[:, 48:] == 0).all()


@pytest.mark.parametrize("activation", operations.ACTIVATIONS)
def test_activations_without_a_gate(pair, activation):
    case = Case(70, 64, 9, Format.F32)
    target = aligned_rows(9, case.packed.outputs, np.float32)
    case.run(pair, target, Epilogue.ACTIVATE, activation=activation)
    expected = ACTIVATIONS[activation](torch.from_numpy(case.expected)).numpy()
    # squares are as large as their rounding
    np.testing.assert_allclose(target[:, :70], expected, rtol=1e-5, atol=1e-4)


def test_halves_are_stored_apart(pair):
    case = Case(2 * 40, 64, 3, Format.F32, gated=True)
    target = aligned_rows(3, 96, np.float32)
    case.run(pair, target, Epilogue.SPLIT, second=target[:, 48:])
    assert np.abs(target[:, :40] - case.expected[:, :40]).max() < 1e-4
    assert np.abs(target[:, 48:88] - case.expected[:, 40:]).max() < 1e-4

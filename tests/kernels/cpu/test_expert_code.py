"""Compiled code of experts, and of the changes of heads before RoPE, against torch."""

import numpy as np
import pytest
import torch
from cpu_steps import address, run

from slipstream.kernels.cpu.layout import BLOCK
from slipstream.kernels.cpu.memory import aligned_rows, round_up
from slipstream.kernels.cpu.operations import (
    ACTIVATIONS,
    Combine,
    Entry,
    Epilogue,
    ExpertLinear,
    Format,
    Gather,
    Group,
    Heads,
    Route,
)
from slipstream.kernels.cpu.pack import pack
from slipstream.kernels.experts import exact_sigmoid, mixture, route, route_by_sigmoid
from slipstream.kernels.ranks import ALONE
from slipstream.model.heads import query_scales
from slipstream.model.options import QueryScaling
from slipstream.model.query_key import HeadNorm, PreparedHeads


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def padded(numbers):
    found = aligned_rows(len(numbers), round_up(numbers.shape[1], BLOCK), np.float32)
    found[:, : numbers.shape[1]] = numbers
    return found


class Routed:
    """The result of routing."""

    def __init__(self, team, logits, per_token, sigmoid=False, normalised=True, scale=1.0):
        rows, count = logits.shape
        stored = padded(logits)
        self.chosen = np.zeros((rows, per_token), dtype=np.int64)
        self.weights = np.zeros((rows, per_token), dtype=np.float32)
        operation = Route(
            logits=address(stored),
            stride=stored.strides[0],
            experts=count,
            per_token=per_token,
            sigmoid=sigmoid,
            normalised=normalised,
            scale=scale,
            chosen=address(self.chosen),
            weights=address(self.weights),
        )
        run(team, [Entry(operation)], rows)


@pytest.mark.parametrize(("count", "per_token"), [(2, 1), (5, 3), (16, 2), (60, 4), (130, 8)])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_experts_are_chosen_as_by_torch(team, count, per_token, rows):
    logits = random(rows, count) * 3
    given = torch.from_numpy(logits)
    for normalised in (False, True):
        found = Routed(team, logits, per_token, normalised=normalised, scale=1.5)
        chosen, weights = route(given, per_token, normalised)
        assert np.array_equal(found.chosen, chosen.numpy())
        assert np.allclose(found.weights, weights.numpy() * 1.5, atol=1e-6)
    found = Routed(team, logits, per_token, sigmoid=True)
    chosen, weights = route_by_sigmoid(given, per_token)
    assert np.array_equal(found.chosen, chosen.numpy())
    assert np.allclose(found.weights, weights.numpy(), atol=1e-6)


def test_the_first_of_equal_experts_is_chosen_and_nan_stays(pair):
    logits = np.array([[1.0, 2.0, 2.0, 0.0], [np.nan] * 4], dtype=np.float32)
    found = Routed(pair, logits, 2)
    assert found.chosen[0].tolist() == [1, 2]
    assert np.isnan(found.weights[1]).all()
    assert (found.chosen < 4).all()


class Layer:
    """Experts of random weights, and the memory of a step."""

    def __init__(self, rows, count, per_token, hidden, ffn, held=None):
        self.rows = rows
        self.held = range(count) if held is None else held
        self.x = padded(random(rows, hidden))
        self.hidden = hidden
        self.ffn = ffn
        self.per_token = per_token
        up = random(count, 2 * ffn, hidden, seed=1) * 0.2
        down = random(count, hidden, ffn, seed=2) * 0.2
        self.biases = padded(random(count, hidden, seed=3))
        self.weights = [(up[expert], down[expert]) for expert in self.held]
        self.ups = [pack(matrix, gated=True) for matrix, _ in self.weights]
        self.downs = [pack(matrix) for _, matrix in self.weights]
        draw = np.random.default_rng(5)
        chosen = [draw.permutation(count)[:per_token] for _ in range(rows)]
        self.chosen = np.array(chosen, dtype=np.int64)
        self.shares = np.abs(random(rows, per_token, seed=4))
        self.shared = padded(random(rows, hidden, seed=6))
        self.shared_logits = random(rows, 1, seed=7)

    def expected(self):
        """Return the sum of the experts: [rows, hidden]."""

        def run_expert(up, down, bias):
            gate_up, proj, added = map(torch.from_numpy, (up, down, bias[: self.hidden]))

            def run(x):
                first, second = (x @ gate_up.T).chunk(2, dim=-1)
                return (torch.nn.functional.silu(first) * second) @ proj.T + added

            return run

        own = zip(self.weights, self.biases[self.held.start :], strict=False)
        experts = [run_expert(up, down, bias) for (up, down), bias in own]
        x = torch.from_numpy(self.x[:, : self.hidden].copy())
        given = (torch.from_numpy(self.chosen), torch.from_numpy(self.shares))
        mixed = mixture(x, *given, experts, self.held.start)
        share = exact_sigmoid(torch.from_numpy(self.shared_logits))
        return (mixed + share * torch.from_numpy(self.shared[:, : self.hidden])).numpy()

    def run(self, team, target, scale):
        pairs = self.rows * self.per_token
        held = len(self.held)
        memory = [np.zeros(size, dtype=np.int64) for size in (held, 1 + 3 * held, pairs, pairs)]
        counts, work, tokens, places = memory
        rows = aligned_rows(pairs, self.x.shape[1], np.float32)
        middle = aligned_rows(pairs, self.downs[0].inputs, np.float32)
        outputs = aligned_rows(pairs, self.x.shape[1], np.float32)
        tables = [
            np.array([(one.address, one.format, one.block_bytes) for one in packed], dtype=np.int64)
            for packed in (self.ups, self.downs)
        ]
        group = Group(
            chosen=address(self.chosen),
            per_token=self.per_token,
            first=self.held.start,
            held=held,
            counts=address(counts),
            work=address(work),
            tokens=address(tokens),
            places=address(places),
        )
        gather = Gather(
            source=address(self.x),
            source_stride=self.x.strides[0],
            target=address(rows),
            target_stride=rows.strides[0],
            format=Format.F32,
            width=self.x.shape[1],
            per_token=self.per_token,
            tokens=address(tokens),
            weights=0,
        )
        biases = np.ascontiguousarray(self.biases[self.held.start : self.held.stop])
        up = linear(self.ups, tables[0], rows, middle, Epilogue.GATE, work, None)
        down = linear(self.downs, tables[1], middle, outputs, Epilogue.STORE, work, biases)
        combine = Combine(
            source=address(outputs),
            source_stride=outputs.strides[0],
            per_token=self.per_token,
            places=address(places),
            weights=address(self.shares),
            shared=address(self.shared),
            shared_stride=self.shared.strides[0],
            shared_logits=address(self.shared_logits),
            shared_logits_stride=self.shared_logits.strides[0],
            target=address(target),
            target_stride=target.strides[0],
            width=self.x.shape[1],
            adds=1,
            scale=scale,
        )
        operations = (group, gather, up, down, combine)
        run(team, [Entry(operation) for operation in operations], self.rows)


def linear(packed, table, x, target, epilogue, work, biases):
    return ExpertLinear(
        weights=0,
        weight_format=0,
        block_bytes=0,
        blocks=packed[0].blocks,
        inputs=packed[0].inputs,
        x=address(x),
        x_stride=x.strides[0],
        x_own=0,
        target=address(target),
        target_stride=target.strides[0],
        epilogue=epilogue,
        bias=address(biases),
        format=Format.F32,
        activation=ACTIVATIONS.index("silu"),
        second=0,
        table=address(table),
        work=address(work),
    )


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize(
    ("count", "per_token", "hidden", "ffn", "held"),
    [
        (4, 2, 64, 96, None),
        (5, 5, 33, 40, None),
        (70, 6, 96, 48, None),
        (8, 3, 64, 64, range(4, 8)),  # those of a rank: pairs of others add nothing
    ],
)
def test_experts_are_those_of_torch(team, rows, count, per_token, hidden, ffn, held):
    layer = Layer(rows, count, per_token, hidden, ffn, held)
    target = padded(np.ones((rows, hidden), dtype=np.float32))
    layer.run(team, target, 0.5)
    assert np.abs(target[:, :hidden] - 1.0 - layer.expected() * 0.5).max() < 1e-4


def test_a_tokens_result_does_not_depend_on_the_others(team):
    layer = Layer(40, 6, 2, 64, 96)
    whole = padded(np.zeros((40, 64), dtype=np.float32))
    layer.run(team, whole, 1.0)
    alone = Layer(40, 6, 2, 64, 96)
    alone.rows = 1
    for name in ("x", "chosen", "shares", "shared", "shared_logits"):
        setattr(alone, name, np.ascontiguousarray(getattr(layer, name)[17:18]))
    found = padded(np.zeros((1, 64), dtype=np.float32))
    alone.run(team, found, 1.0)
    assert np.array_equal(found[0], whole[17])


@pytest.mark.parametrize("tokens", [1, 5, 30])
@pytest.mark.parametrize("size", [16, 48, 128])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_changes_of_heads(team, tokens, size, centred, together, clip):
    heads, kv_heads = 6, 2
    x = random(tokens, heads + 2 * kv_heads, size)
    weights = [random(count, size, seed=count) for count in (heads, kv_heads)]
    biases = [random(count, size, seed=9 + count) for count in (heads, kv_heads)]
    norms = [
        HeadNorm(torch.from_numpy(weight), torch.from_numpy(bias), centred, together, 1e-5)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    scaling = QueryScaling(0.3, 4, offset=1)
    positions = np.random.default_rng(1).integers(0, 50, tokens)
    prepare = PreparedHeads(heads, kv_heads, clip, *norms, scaling, ALONE)
    expected = prepare(torch.from_numpy(x.copy()), torch.from_numpy(positions)).numpy()
    scales = query_scales(scaling, 50)
    operation = Heads(
        source=address(x),
        source_stride=x.strides[0],
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        clip=clip,
        q_weight=address(weights[0]),
        q_bias=address(biases[0]),
        k_weight=address(weights[1]),
        k_bias=address(biases[1]),
        layer=centred,
        together=together,
        epsilon=1e-5,
        scales=address(scales),
    )
    run(team, [Entry(operation)], tokens, positions=positions)
    assert np.abs(x - expected).max() < 1e-4

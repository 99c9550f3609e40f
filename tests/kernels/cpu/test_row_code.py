"""Compiled norms, RoPE, embeddings and the likeliest token against torch."""

import numpy as np
import pytest
import torch
from cpu_steps import address, as_bf16, from_bf16, run

from slipstream.kernels import rotary
from slipstream.kernels.cpu.memory import aligned_rows, round_up
from slipstream.kernels.cpu.operations import (
    Copy,
    Embed,
    Entry,
    Format,
    Likeliest,
    Norm,
    Rope,
    Rows,
    Softcap,
)
from slipstream.kernels.cpu.pack import pack, padded_floats


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def padded(numbers, columns):
    found = aligned_rows(len(numbers), columns, np.float32)
    found[:, : numbers.shape[1]] = numbers
    return found


def norm_of(source, target, weight, bias, size, **changes):
    fields = {
        "source": address(source),
        "source_stride": source.strides[0],
        "gather": 0,
        "target": address(target),
        "target_stride": target.strides[0],
        "target_own": 0,
        "format": Format.F32,
        "adds": 0,
        "weight": address(weight),
        "bias": address(bias),
        "size": size,
        "width": source.shape[1],
        "epsilon": 1e-5,
        "layer": int(bias is not None),
    }
    return Norm(**{**fields, **changes})


@pytest.mark.parametrize("size", [32, 33, 64, 100, 576])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_norms(team, size, rows):
    width = round_up(size, 32)
    x = random(rows, size) + 0.5
    source = padded(x, width)
    weight = padded_floats(random(size, seed=1), width)
    bias = padded_floats(random(size, seed=2), width)
    target = aligned_rows(rows, width, np.float32)
    run(team, [Entry(norm_of(source, target, weight, None, size))], rows)
    given = torch.from_numpy(x)
    expected = torch.rms_norm(given, (size,), torch.from_numpy(weight[:size]), 1e-5)
    assert torch.allclose(torch.from_numpy(target[:, :size]), expected, atol=1e-5)
    run(team, [Entry(norm_of(source, target, weight, bias, size))], rows)
    parameters = (torch.from_numpy(weight[:size]), torch.from_numpy(bias[:size]))
    expected = torch.layer_norm(given, (size,), *parameters, 1e-5)
    assert torch.allclose(torch.from_numpy(target[:, :size]), expected, atol=1e-5)
    assert (target[:, size:] == 0).all()


def test_a_norm_adds_its_result_or_rounds_it(pair):
    source = random(5, 64)
    weight = padded_floats(random(64, seed=1), 64)
    target = np.ones((5, 64), dtype=np.float32)
    run(pair, [Entry(norm_of(source, target, weight, None, 64, adds=1))], 5)
    expected = torch.rms_norm(
        torch.from_numpy(source), (64,), torch.from_numpy(weight.copy()), 1e-5
    ).numpy()
    assert np.abs(target - 1.0 - expected).max() < 1e-5
    rounded = np.zeros((5, 64), dtype=np.uint16)
    changes = {"format": Format.BF16, "target_stride": 128}
    run(pair, [Entry(norm_of(source, rounded, weight, None, 64, **changes))], 5)
    assert np.abs(from_bf16(rounded) - expected).max() < 0.02


def test_rows_of_samples_are_gathered(pair):
    source = random(9, 32)
    target = np.zeros((3, 32), dtype=np.float32)
    copy = Copy(address(source), 128, 1, address(target), 128, 0, Format.F32, 32)
    chosen = np.array([8, 0, 3], dtype=np.int64)
    run(pair, [Entry(copy, Rows.SAMPLES)], 9, 3, sample_tokens=chosen)
    assert np.array_equal(target, source[chosen])


def test_rounding_to_bfloat16_is_that_of_torch(pair):
    source = random(4, 64) * 10.0 ** np.arange(-8, 8).repeat(4).astype(np.float32)
    target = np.zeros((4, 64), dtype=np.uint16)
    copy = Copy(address(source), 256, 0, address(target), 128, 0, Format.BF16, 64)
    run(pair, [Entry(copy)], 4)
    assert np.array_equal(target, as_bf16(source))


@pytest.mark.parametrize("kind", [Format.F32, Format.BF16])
@pytest.mark.parametrize("shape", [(96, 64), (50, 33)])
def test_embeddings(team, kind, shape):
    vocabulary, size = shape
    table = random(vocabulary, size)
    stored = table if kind is Format.F32 else as_bf16(table)
    exact = table if kind is Format.F32 else from_bf16(stored)
    packed = pack(stored)
    tokens = np.array([3, 0, vocabulary - 1, 17, 5], dtype=np.int64)
    positions = np.array([4, 0, 2, 1, 3], dtype=np.int64)
    learned = random(6, size, seed=3)
    given = random(1, size, seed=4)
    places = np.array([0, 0, 0, address(given), 0], dtype=np.int64)
    width = round_up(size, 32)
    target = aligned_rows(5, width, np.float32)
    embed = Embed(
        target=address(target),
        target_stride=target.strides[0],
        table=packed.address,
        table_format=packed.format,
        size=size,
        block_bytes=packed.block_bytes,
        scale=1.5,
        positions=address(learned),
    )
    run(team, [Entry(embed)], 5, token_ids=tokens, positions=positions, embeddings=places)
    looked_up = exact[tokens]
    looked_up[3] = given[0]
    expected = looked_up * np.float32(1.5) + learned[positions]
    assert np.array_equal(target[:, :size], expected)
    assert (target[:, size:] == 0).all()


@pytest.mark.parametrize("tokens", [1, 3, 30])
@pytest.mark.parametrize("kind", [Format.F32, Format.BF16])
@pytest.mark.parametrize(("size", "rotated"), [(32, 32), (64, 64), (80, 20), (16, 8), (48, 48)])
@pytest.mark.parametrize("normalised", [False, True])
def test_rope(team, size, rotated, kind, tokens, normalised):
    heads, kv_heads, slots = 4, 2, 40
    x = random(tokens, heads + 2 * kv_heads, size)
    angles = random(50, rotated // 2, seed=1)
    cosine = np.ascontiguousarray(np.cos(angles))
    sine = np.ascontiguousarray(np.sin(angles))
    norms = [padded_floats(random(size, seed=seed), size) for seed in (2, 3)]
    dtype = np.float32 if kind is Format.F32 else np.uint16
    queries = np.zeros((tokens, heads * size), dtype=dtype)
    cache = np.zeros((2, kv_heads, slots, size), dtype=dtype)
    chance = np.random.default_rng(7)
    positions = chance.integers(0, 50, tokens)
    places = chance.permutation(slots)[:tokens].astype(np.int64)
    rope = Rope(
        source=address(x),
        source_stride=x.strides[0],
        queries=address(queries),
        query_stride=queries.strides[0],
        format=kind,
        keys=address(cache),
        values=address(cache) + cache.strides[0],
        head_stride=cache.strides[1],
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        cosine=address(cosine),
        sine=address(sine),
        half=rotated // 2,
        q_norm=address(norms[0]) if normalised else 0,
        k_norm=address(norms[1]) if normalised else 0,
        epsilon=1e-6,
    )
    run(team, [Entry(rope)], tokens, positions=positions, slots=places)
    keys = torch.zeros(kv_heads, slots, size)
    values = torch.zeros(kv_heads, slots, size)
    tables = [np.concatenate(halves, axis=1) for halves in ((cosine, cosine), (-sine, sine))]
    at = rotary.rope_at(*map(torch.from_numpy, tables), torch.from_numpy(positions), torch.float32)
    weights = [torch.from_numpy(norm) for norm in norms] if normalised else [None, None]
    expected = rotary.rotate_write(
        torch.from_numpy(x),
        torch.from_numpy(positions),
        torch.from_numpy(places),
        at,
        *weights,
        1e-6,
        keys,
        values,
    )
    exact = (lambda found: found) if kind is Format.F32 else from_bf16
    tolerance = 1e-5 if kind is Format.F32 else 0.04
    found = exact(queries).reshape(tokens, heads, size)
    assert np.abs(found - expected.numpy()).max() < tolerance
    assert np.abs(exact(cache)[0] - keys.numpy()).max() < tolerance
    assert np.abs(exact(cache)[1] - values.numpy()).max() < tolerance


def likeliest(team, logits, vocabulary, part=32):
    parts = -(-vocabulary // part)
    tokens = np.zeros((len(logits), parts), dtype=np.int64)
    best = np.zeros((len(logits), parts), dtype=np.float32)
    stride = logits.strides[0]
    operation = Likeliest(stride, vocabulary, part, parts, address(tokens), address(best))
    run(team, [Entry(operation, Rows.LOGITS)], len(logits), logit_target=logits)
    chosen = best.argmax(axis=1)
    rows = np.arange(len(logits))
    return tokens[rows, chosen], best[rows, chosen]


@pytest.mark.parametrize("vocabulary", [1, 31, 96, 100])
def test_the_likeliest_token(team, vocabulary):
    logits = padded(random(9, vocabulary), 128)
    logits[:, vocabulary:] = 100.0  # padding
    tokens, best = likeliest(team, logits, vocabulary)
    assert np.array_equal(tokens, logits[:, :vocabulary].argmax(axis=1))
    assert np.array_equal(best, logits[:, :vocabulary].max(axis=1))


def test_of_equal_logits_the_first_token_is_taken(pair):
    logits = padded(np.zeros((2, 100), dtype=np.float32), 128)
    logits[1, [33, 47, 90]] = 3.0
    tokens, best = likeliest(pair, logits, 100)
    assert tokens.tolist() == [0, 33]
    assert best.tolist() == [0.0, 3.0]


@pytest.mark.parametrize("place", [0, 40, 99])
def test_logits_that_are_not_numbers_are_reported(pair, place):
    logits = padded(random(2, 100), 128)
    logits[1, place] = np.nan
    _, best = likeliest(pair, logits, 100)
    assert np.isfinite(best[0])
    assert np.isnan(best[1])


def test_soft_caps(pair):
    logits = random(3, 64) * 50
    expected = np.tanh(logits / 20) * 20
    run(pair, [Entry(Softcap(address(logits), 256, 64, 20.0))], 3)
    assert np.abs(logits - expected).max() < 1e-4

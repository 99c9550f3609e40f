"""The 12-bit KV cache: the same numbers, and the same attention.

Without a GPU the kernels run in Triton's interpreter, which has no bfloat16: float32 tensors hold
bfloat16 numbers there.
"""

import math

import numpy as np
import pytest
import torch
from attention_steps import DEVICE, GPU, MIXES, gpu_plan, slots_of, tables_of, tl, triton

from slipstream.kernels import packed_cache
from slipstream.kernels.attention import plan_attention
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.gpu.packed_cache import _place
from slipstream.kernels.gpu.rotary import rotate_write
from slipstream.kernels.gpu.unpacked_kv import UnpackedKv, plan_unpacking, unpacking_pays

BLOCK = 32
DTYPE = torch.bfloat16 if GPU else torch.float32
TOLERANCE = 1e-2 if GPU else 2e-5
# Plain, with a window, with sinks and a cap.
RULES = [AttentionRule(0.1), AttentionRule(0.1, 24), AttentionRule(0.2, 24, 5, 2.0)]


def new_cache(slots, kv_heads, size):
    return torch.zeros(
        (2, kv_heads, slots, packed_cache.words(size)), dtype=packed_cache.DTYPE, device=DEVICE
    )


def write(cache, heads, slots):
    """Write keys and values [2, kv_heads, tokens, size] to slots [tokens] with the kernel, not
    rotated.
    """
    size = heads.shape[-1]
    step = (
        torch.cat((heads[0, :1], heads.flatten(0, 1)))
        .transpose(0, 1)
        .to(DTYPE)
        .contiguous()
        .to(DEVICE)
    )
    rope = (torch.ones(1, size, device=DEVICE), torch.zeros(1, size, device=DEVICE))
    positions = torch.zeros(len(slots), dtype=torch.int64, device=DEVICE)
    rotate_write(step, positions, slots.to(DEVICE), rope, None, None, 1e-6, *cache)


def pack(heads):
    """Pack a whole cache by the format's definition: [2, kv_heads, slots, size] → int16 [2,
    kv_heads, slots, words]
    """
    run = heads.shape[-1] // 4
    tokens = packed_cache.TOKENS
    heads = heads.to(DEVICE)
    least = (torch.frexp(heads.abs().amax(-1, keepdim=True))[1] + 126 - 15).clamp(min=0)
    # in units of the last place of subnormal numbers
    units = heads.double().abs() * torch.exp2(133.0 - least.double())
    above = (torch.frexp(units)[1] - 8).clamp(min=0)
    bits = (units / torch.exp2(above.double())).round().long() + (above << 7) | (
        heads < 0
    ).long() << 15
    halves = bits.unflatten(-1, (2, run, 2))
    first, second, third, fourth = (halves[..., half, :, odd] for half in (0, 1) for odd in (0, 1))
    words = torch.stack(
        (
            first | (fourth & 15) << 11,
            second | (fourth >> 4 & 15) << 11,
            # each run of all tokens
            third | (fourth >> 8 & 7) << 11 | fourth >> 15 << 14,
        ),
        2,
    )
    lines = words.unflatten(3, (-1, tokens)).transpose(2, 3).flatten(3)
    scales = (least[..., 0] + 63 << 7).unflatten(2, (-1, tokens))
    found = torch.cat((lines, scales, torch.zeros_like(scales)), -1)
    return (found - (found >> 15 << 16)).to(torch.int16).view(*heads.shape[:3], -1)


def read(cache, size):
    """Unpack a cache by the format's definition: float64 [2, kv_heads, slots, size]."""
    run = size // 4
    tokens = packed_cache.TOKENS
    lines = (
        cache.cpu().flatten(2).unflatten(2, (-1, tokens * packed_cache.words(size))).long() & 0xFFFF
    )
    words, scales, empty = lines.split((tokens * 3 * run, tokens, tokens), -1)
    assert not empty.any(), "nothing is written behind the scales"
    scales = (scales << 16).to(torch.int32).view(torch.float32).double() * 2.0**64
    first, second, third = words.unflatten(-1, (3, tokens, run)).unbind(-3)
    rest = [word >> 11 & 15 for word in (first, second, third)]
    fourth = rest[0] | rest[1] << 4 | (rest[2] & 7) << 8 | rest[2] >> 3 << 15
    numbers = [number(word) for word in (first & 0x87FF, second & 0x87FF, third & 0x87FF, fourth)]
    halves = (torch.stack(numbers[:2], -1).flatten(-2), torch.stack(numbers[2:], -1).flatten(-2))
    return (torch.cat(halves, -1) * scales[..., None]).flatten(2, 3)


def number(word):
    """Return the number of a sign, four bits of exponent and seven of mantissa."""
    exponent = word >> 7 & 15
    mantissa = (word & 127).double()
    size = (
        torch.where(exponent > 0, (mantissa + 128) * 2.0 ** (exponent.double() - 1), mantissa)
        * 2.0**-133
    )
    return torch.where(word >= 0x8000, -size, size)


def seen_slots(lengths, tables):
    return [
        tables[row, i // BLOCK] * BLOCK + i % BLOCK
        for row, length in enumerate(lengths)
        for i in range(length)
    ]


def spoil(cache, slots):
    """Make slots infinite that no row may read."""
    tokens = packed_cache.TOKENS
    words = cache.shape[-1]
    lines = torch.from_numpy(slots // tokens)
    places = torch.from_numpy(slots % tokens)
    cache.view(*cache.shape[:2], -1, tokens * words)[:, :, lines, tokens * (words - 2) + places] = (
        0x7F80
    )


def random_heads(kv_heads, tokens, size):
    """Return bfloat16 numbers as float32, whose magnitudes differ between tokens and within some."""
    torch.manual_seed(0)
    heads = torch.randn(2, kv_heads, tokens, size) * torch.exp2(
        torch.randint(-40, 40, (tokens, 1)).float()
    )
    heads[:, :, 1] *= torch.exp2(-30 * torch.rand(size))
    heads[:, :, 2, ::3] = 0.0
    heads[:, :, 3] = 0.0
    heads[:, :, 4] = torch.randn(size) * 2.0**-125  # some are subnormal
    return heads.bfloat16().float()


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 64), (3, 64), (2, 128), (1, 256)])
def test_kernel_writes_the_format_that_the_definition_reads(kv_heads, size):
    tokens, slots = 40, 64
    heads, places = random_heads(kv_heads, tokens, size), torch.randperm(slots)[:tokens]
    cache = new_cache(slots, kv_heads, size)
    write(cache, heads, places)
    found = read(cache, size)
    untouched = [slot for slot in range(slots) if slot not in places.tolist()]
    assert not found[:, :, untouched].any(), "nothing is written beside the slots"
    largest = heads.double().abs().amax(-1, keepdim=True)
    error = (found[:, :, places] - heads.double()).abs()
    assert (error[(heads.abs() >= largest * 2.0**-14)] == 0).all()
    assert (error <= largest * 2.0**-22).all()
    assert (error > 0).any(), "the smallest of one token lose bits, or this shows nothing"
    everywhere = torch.zeros(2, kv_heads, slots, size)
    everywhere[:, :, places] = heads
    assert torch.equal(read(pack(everywhere), size), found)


@pytest.mark.parametrize("odd", [math.inf, math.nan, 2.0**80])
def test_infinity_nan_and_huge_numbers_become_infinite_or_nan(odd):
    """Neighbouring tokens and other heads keep their numbers."""
    heads = random_heads(2, BLOCK, 64)
    heads[0, 1, 7, 5] = odd
    heads[0, 1, 8, 5] = 1.9921875 * 2.0**79  # the largest number that can be packed
    cache = new_cache(BLOCK, 2, 64)
    write(cache, heads, torch.arange(BLOCK))
    found = read(cache, 64)
    assert not found[0, 1, 7, 5].isfinite()
    assert found[0, 0].isfinite().all()
    assert found[0, 1, 6].isfinite().all()
    assert found[0, 1, 8, 5] == 1.9921875 * 2.0**79


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(4, 2, 64)]
    if not GPU
    else [
        (4, 2, 64),
        (8, 2, 128),
        (4, 4, 128),
        (20, 1, 128),
        (4, 1, 256),
        (64, 1, 128),
        (71, 1, 64),
    ],
)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("rule", RULES)
def test_attention_over_packed_keys_and_values(heads, kv_heads, size, mix, rule):
    torch.manual_seed(0)
    positions, counts = (np.array(column) for column in zip(*MIXES[mix], strict=True))
    tables = tables_of(positions, counts, BLOCK)
    slots = (int(tables.max()) + 1) * BLOCK
    plain = torch.randn(2, kv_heads, slots, size).bfloat16().float()
    beside = np.setdiff1d(np.arange(slots), seen_slots(positions + counts, tables))
    order, plan = gpu_plan(tables, positions, counts, BLOCK, kv_heads, DTYPE, size, packed=True)
    step = torch.randn(int(counts.sum()), heads + 2 * kv_heads, size).bfloat16()
    own = slots_of(order, positions, counts, tables, BLOCK)
    plain[:, :, own] = step[:, heads:].float().unflatten(1, (2, kv_heads)).permute(1, 2, 0, 3)
    cache = pack(plain)
    spoil(cache, beside)
    got = plan.attend(step.to(DTYPE).to(DEVICE), *cache, rule)
    reference = plan_attention(tables[order], positions[order], counts[order], BLOCK, plain[None])
    expected = reference.attend(step[:, :heads].float(), *plain, rule)
    assert (got.float().cpu() - expected).norm() < TOLERANCE * expected.norm()


@pytest.mark.parametrize(
    "size", [128] if not GPU else [64, 128, 256]
)  # tiles of the two paths differ
@pytest.mark.parametrize(
    "mix", [name for name, rows in MIXES.items() if any(p > 0 and c > 1 for p, c in rows)]
)
@pytest.mark.parametrize("rule", RULES[:2])
def test_attention_is_the_same_with_kv_unpacked_in_advance(size, mix, rule):
    torch.manual_seed(0)
    positions, counts = (np.array(column) for column in zip(*MIXES[mix], strict=True))
    tables = tables_of(positions, counts, BLOCK)
    cache = pack(torch.randn(2, 2, (int(tables.max()) + 1) * BLOCK, size).bfloat16().float())
    order, plan = gpu_plan(tables, positions, counts, BLOCK, 2, DTYPE, size, packed=True)
    step = torch.randn(int(counts.sum()), 8, size).bfloat16().to(DTYPE).to(DEVICE)
    expected = plan.attend(step, *cache, rule)
    rows = np.array([row for row in order if counts[row] > 1])
    where, own_tables = plan_unpacking(rows, positions[rows], BLOCK, tables.shape[1])
    assert tables.ravel()[where].tolist() == [
        b for r in rows for b in tables[r][: -(-positions[r] // BLOCK)]
    ]
    keys, values = torch.full(
        (2, 2, len(where) * BLOCK, size), math.nan, dtype=DTYPE, device=DEVICE
    )
    blocks, own_tables = (
        torch.from_numpy(x).to(DEVICE) for x in (tables.ravel()[where], own_tables)
    )
    plan.unpacked = UnpackedKv(blocks, own_tables, keys, values, BLOCK)
    places = np.searchsorted(rows, plan.prefill.tile_row.cpu().numpy())
    plan.prefill.tile_row = torch.from_numpy(places.astype(np.int32)).to(DEVICE)
    assert (
        plan.attend(step, *cache, rule) - expected
    ).float().norm() < TOLERANCE * expected.float().norm()


def test_blocks_may_hold_several_groups_of_32_tokens():
    torch.manual_seed(0)
    block, size = 2 * packed_cache.TOKENS, 64
    plain = torch.randn(2, 2, 3 * block, size).bfloat16().float()
    found = torch.full((2, 2, 2 * block, size), math.nan, dtype=DTYPE, device=DEVICE)
    blocks = torch.tensor([2, 1], dtype=torch.int32, device=DEVICE)
    UnpackedKv(blocks, blocks[None], *found, block).unpack(*pack(plain))
    wanted = torch.cat((plain[:, :, 2 * block :], plain[:, :, block : 2 * block]), 2)
    assert torch.allclose(found.float().cpu(), wanted, rtol=0, atol=2.0**-19)


@triton.jit
def _places(heads, slots, out, cache_slots, RUN: tl.constexpr):
    words, scales = _place(tl.load(heads), cache_slots, tl.load(slots), RUN)
    tl.store(out, words)
    tl.store(out + 1, scales)


def test_positions_beyond_32_bits():
    out = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    head, slot = (
        torch.tensor([31], dtype=torch.int32, device=DEVICE),
        torch.tensor([33], device=DEVICE),
    )
    _places[(1,)](head, slot, out, 32 * 50_000, RUN=32)
    first = 31 * 32 * 50_000 * 98 + 32 * 98
    assert out.tolist() == [first + 32, first + 32 * 96 + 1]


@pytest.mark.parametrize(
    ("positions", "counts", "worth"),
    [
        ([8192], [8192], True),
        ([6144], [128], True),
        ([6144], [127], False),
        ([0, 0], [4000, 4000], False),
        ([0, 4000], [8000, 120], False),
        ([4000, 4000], [200, 56], True),
        ([4000, 4000], [199, 56], False),
        ([131_072], [8192], True),
        # over the limit of memory
        ([131_073], [8192], False),
        ([100_000, 50_000], [4000, 4000], False),
    ],
)
def test_unpacking_pays_with_enough_new_tokens_and_memory(positions, counts, worth):
    assert unpacking_pays(np.array(positions), np.array(counts), BLOCK, token_bytes=4096) is worth


def test_attention_over_keys_and_values_of_any_magnitude():
    """As large and as small as float32 sums allow."""
    torch.manual_seed(0)
    size, lengths = 64, np.array([40, 33])
    tables = tables_of(lengths - 1, np.ones_like(lengths), BLOCK)
    slots = (int(tables.max()) + 1) * BLOCK
    plain = torch.randn(2, 1, slots, size).bfloat16().float()
    for scale in (2.0**40, 2.0**-40):
        stored, step = plain * scale, torch.randn(2, 4, size).bfloat16().float()
        # queries that weight all tokens alike; the step's own tokens are zero
        step[:, 1:3] = 0.0
        own = slots_of(np.arange(2), lengths - 1, np.ones_like(lengths), tables, BLOCK)
        stored[:, :, own] = 0.0
        _, plan = gpu_plan(
            tables, lengths - 1, np.ones_like(lengths), BLOCK, 1, DTYPE, size, packed=True
        )
        rule = AttentionRule(0.1 / scale)
        got = plan.attend(step.to(DTYPE).to(DEVICE), *pack(stored), rule).float().cpu()
        reference = plan_attention(tables, lengths - 1, np.ones_like(lengths), BLOCK, stored[None])
        expected = reference.attend(step[:, :2], *stored, rule)
        assert (got - expected).norm() < TOLERANCE * expected.norm()


@pytest.mark.parametrize(
    ("dtype", "size", "rotated", "block", "packed"),
    [
        (torch.bfloat16, 128, 128, 32, True),
        (torch.bfloat16, 64, 64, 64, True),
        (torch.bfloat16, 128, 128, 16, False),
        (torch.bfloat16, 80, 80, 32, False),
        (torch.bfloat16, 64, 16, 32, False),
        (torch.bfloat16, 64, 0, 32, False),
        (torch.bfloat16, 256, 256, 32, True),
        (torch.bfloat16, 32, 32, 32, False),
        (torch.bfloat16, 128, 128, 48, False),
        (torch.float16, 128, 128, 32, False),
        (torch.float32, 128, 128, 32, False),
    ],
)
def test_can_pack_rotated_bfloat16_heads_of_64_128_and_256(dtype, size, rotated, block, packed):
    assert packed_cache.can_pack(dtype, size, rotated, block) is packed


def test_words_of_a_head_and_their_alignment():
    words = [packed_cache.words(size) for size in (64, 128, 256)]
    assert words == [50, 98, 194]
    assert [count * packed_cache.TOKENS % 64 for count in words] == [0, 0, 0], (
        "all lines of 128 bytes"
    )

"""The batch-invariant kernels: as their torch references, and the same bits for a token whatever
other tokens are there. Without a GPU they run in Triton's interpreter, on small shapes.
"""

import numpy as np
import pytest
import torch
from attention_steps import DEVICE, GPU, slots_of, tables_of
from dequantised import dequantise

from slipstream.kernels.attention import plan_attention
from slipstream.kernels.attention_rule import AttentionRule, cache_shape
from slipstream.kernels.gpu.invariant_attention import attend_cached
from slipstream.kernels.gpu.invariant_gemm import invariant_gemm
from slipstream.kernels.gpu.prefill_tiles import PrefillPlan, cut_tiles, single_tokens
from slipstream.kernels.inputs import quantise
from slipstream.weights.quantise import quantise_fp8, quantise_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# of both sides of each change of the tile
TOKENS = [1, 2, 33, 64, 65, 128, 129, 300] if GPU else [1, 2, 33, 65]
SHAPES = [(96, 64), (576, 1536)] if GPU else [(96, 72)]
BLOCK = 32


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = TOLERANCE[got.dtype]
    got = got.double().cpu()
    expected = expected.double().cpu()
    return bool((got - expected).norm() / expected.norm() < tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_gemm_gives_a_token_the_same_bits_among_any_others(dtype, shape, bias):
    torch.manual_seed(0)
    rows, columns = shape
    x = torch.randn(max(TOKENS), columns).to(dtype)
    weight = torch.randn(rows, columns).to(dtype)
    offset = torch.randn(rows).to(dtype) if bias else None
    on_device = weight.to(DEVICE), None, None if offset is None else offset.to(DEVICE)
    whole = invariant_gemm(x.to(DEVICE), *on_device)
    expected = torch.nn.functional.linear(x.float(), weight.float())
    assert close(whole, expected if offset is None else expected + offset.float())
    for tokens in TOKENS:
        for first in (0, len(x) - tokens):
            part = invariant_gemm(x[first : first + tokens].to(DEVICE), *on_device)
            assert torch.equal(part, whole[first : first + tokens])


@pytest.mark.parametrize("form", ["int8", "fp8", "fp8 activations"])
def test_gemm_reads_8_bit_weights(form):
    if form == "fp8 activations" and not GPU:
        pytest.skip("the interpreter has no bfloat16 dot")
    torch.manual_seed(0)
    dtype = DTYPES[1 if GPU else 0]
    plain = torch.randn(96, 64)
    weight, scales = quantise_rows(plain, 8, 0) if form == "int8" else quantise_fp8(plain)
    x = torch.randn(70, 64).to(dtype)
    expected = x.float() @ dequantise(weight, scales).float().t()
    values, by_token = x.to(DEVICE), None
    if form == "fp8 activations":
        rounded = quantise(x)
        expected = rounded.values.float() * rounded.scales @ dequantise(weight, scales).float().t()
        values, by_token = (part.to(DEVICE) for part in rounded)
    on_device = weight.to(DEVICE), scales.float().to(DEVICE), None
    whole = invariant_gemm(values, *on_device, by_token)
    assert close(whole, expected)
    alone = invariant_gemm(
        values[5:6], *on_device, None if by_token is None else by_token[5:6].contiguous()
    )
    assert torch.equal(alone, whole[5:6])


def test_gemm_writes_to_given_memory():
    x = torch.randn(3, 64, device=DEVICE)
    weight = torch.randn(40, 64, device=DEVICE)
    out = torch.full((3, 40), 7.0, device=DEVICE)
    assert invariant_gemm(x, weight, None, None, out=out) is out
    assert close(out, x @ weight.t())
    assert invariant_gemm(x[:0], weight, None, None).shape == (0, 40)


class Case:
    """A cache with the tokens of some rows, and the heads of all of their positions."""

    def __init__(self, lengths: np.ndarray, dtype: torch.dtype, heads=4, kv_heads=2, size=32):
        torch.manual_seed(1)
        self.dtype = dtype
        self.heads = heads
        self.kv_heads = kv_heads
        zeros = np.zeros_like(lengths)
        self.tables = tables_of(zeros, lengths, BLOCK)
        slots = (int(self.tables.max()) + 1) * BLOCK
        self.cache = torch.zeros(cache_shape(1, slots, kv_heads, size))[0].to(dtype)
        self.step = [
            torch.randn(length, heads + 2 * kv_heads, size).to(dtype) for length in lengths
        ]
        for row, length in enumerate(lengths):
            where = slots_of(np.array([row]), zeros, lengths, self.tables, BLOCK)
            self.cache[0][:, where] = self.step[row][:, heads : heads + kv_heads].transpose(0, 1)
            self.cache[1][:, where] = self.step[row][:, heads + kv_heads :].transpose(0, 1)
            assert len(where) == length

    def run(self, plan: PrefillPlan, rows_and_spans, rule: AttentionRule) -> torch.Tensor:
        """Attend with the tokens of some spans of rows as the step's tokens."""
        step = torch.cat([self.step[row][first:last] for row, first, last in rows_and_spans])
        out = torch.empty((len(step), self.heads, step.shape[2]), dtype=self.dtype, device=DEVICE)
        keys, values = self.cache.to(DEVICE)
        tables = torch.from_numpy(self.tables).to(DEVICE)
        attend_cached(step.to(DEVICE), keys, values, tables, plan, BLOCK, rule, out)
        return out.cpu()

    def attend(self, spans, rule: AttentionRule) -> torch.Tensor:
        rows, first, last = (np.array(column) for column in zip(*spans, strict=True))
        counts = last - first
        tiles = cut_tiles(rows, first, counts, np.cumsum(counts) - counts)
        plan = PrefillPlan(*(torch.from_numpy(array).to(DEVICE) for array in tiles))
        return self.run(plan, spans, rule)


RULES = {
    "plain": AttentionRule(0.2),
    "window": AttentionRule(0.2, window=20),
    "window with sinks": AttentionRule(0.2, window=20, sinks=3),
    "soft cap": AttentionRule(0.2, softcap=5.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_attention_matches_its_reference_and_keeps_its_bits_in_any_chunks(dtype, rule):
    lengths = np.array([70, 3, 33])
    case = Case(lengths, dtype)
    whole = case.attend([(row, 0, length) for row, length in enumerate(lengths)], rule)
    zeros = np.zeros_like(lengths)
    cpu_plan = plan_attention(case.tables, zeros, lengths, BLOCK, case.cache[None].float())
    queries = torch.cat(case.step)[:, : case.heads].float()
    assert close(whole, cpu_plan.attend(queries, *case.cache.float(), rule))
    for spans in ([(0, 5, 41)], [(2, 0, 1), (0, 41, 70), (1, 2, 3)], [(0, 69, 70), (2, 30, 33)]):
        part = case.attend(spans, rule)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        expected = [whole[starts[row] + first : starts[row] + last] for row, first, last in spans]
        assert torch.equal(part, torch.cat(expected))


def test_the_plan_of_a_decode_step_is_the_plan_of_its_single_tokens():
    lengths = np.array([70, 3, 33])
    case = Case(lengths, DTYPES[-1])
    spans = [(row, length - 1, length) for row, length in enumerate(lengths)]
    rows = torch.arange(3, dtype=torch.int32, device=DEVICE)
    positions = torch.from_numpy(lengths - 1).int().to(DEVICE)
    decoded = case.run(single_tokens(rows, positions), spans, RULES["plain"])
    assert torch.equal(decoded, case.attend(spans, RULES["plain"]))

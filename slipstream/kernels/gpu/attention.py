"""Attention of a step on the GPU: decode rows first, then rows with several new tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.gpu.decode_attention import attend_decode
from slipstream.kernels.gpu.decode_chunks import DecodePlan, ResidentCtas
from slipstream.kernels.gpu.invariant_attention import attend_cached
from slipstream.kernels.gpu.prefill_attention import attend_prefill
from slipstream.kernels.gpu.prefill_tiles import PrefillPlan
from slipstream.kernels.gpu.unpacked_kv import UnpackedKv


@dataclass(slots=True)
class GpuAttention:
    """The step's first `decodes` tokens are decode rows; `prefill` plans the rest."""

    tables: Tensor  # int32 [rows of the engine, blocks]
    block_tokens: int
    resident_ctas: ResidentCtas
    decodes: int
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    # cached tokens of the rest, unpacked in advance; `prefill` then uses its tables
    unpacked: UnpackedKv | None = None
    batch_invariant: bool = False  # `prefill` then plans all tokens

    def attend(self, heads: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Return [tokens, q_heads, head_size]. heads: [tokens, q_heads + 2 * kv_heads, head_size],
        queries and keys rotated
        """
        tokens, all_heads, size = heads.shape
        q_heads = all_heads - 2 * keys.shape[0]
        out = heads.new_empty((tokens, q_heads, size))
        if self.batch_invariant:
            assert self.prefill is not None
            attend_cached(
                heads, keys, values, self.tables, self.prefill, self.block_tokens, rule, out
            )
            return out
        if self.decode is not None:
            first = slice(0, self.decodes)
            attend_decode(
                heads[first, :q_heads],
                keys,
                values,
                self.tables,
                self.decode,
                self.block_tokens,
                self.resident_ctas,
                rule,
                out[first],
            )
        if self.prefill is not None:
            tables = self.tables
            if self.unpacked is not None:
                self.unpacked.unpack(keys, values)
                keys = self.unpacked.keys
                values = self.unpacked.values
                tables = self.unpacked.tables
            attend_prefill(heads, keys, values, tables, self.prefill, self.block_tokens, rule, out)
        return out

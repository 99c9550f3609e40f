"""The least time each case can take on a machine, from what must be read and multiplied."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.model.spec import ModelSpec

_CACHE_BYTES = 2  # of one number in the cache


@dataclass(frozen=True)
class Machine:
    bandwidth: float  # bytes read a second
    operations: float  # bf16 multiplications and additions a second


@dataclass(frozen=True)
class Work:
    """A model at a number of bits a weight."""

    weights: int  # in matrices a token passes through, the head left out
    head: int  # read once a sampled token or batch of them
    weight_bytes: float  # of one weight, its share of scales included
    cache_bytes: int  # of one token
    attention: int  # operations a pair of query and key costs, over all layers

    @classmethod
    def of(cls, spec: ModelSpec, weight_bytes: float) -> Work:
        mlp = (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.ffn_size
        layer = spec.hidden_size * (spec.qkv_size + spec.q_size) + mlp
        return cls(
            weights=spec.layers * layer,
            head=spec.vocab_size * spec.hidden_size,
            weight_bytes=weight_bytes,
            cache_bytes=2 * spec.layers * spec.kv_size * _CACHE_BYTES,
            attention=4 * spec.layers * spec.q_size,
        )

    @property
    def model_bytes(self) -> float:
        return (self.weights + self.head) * self.weight_bytes

    def prefill_seconds(self, machine: Machine, rows: int, prompt: int) -> float:
        """All prompts in one pass: at least the products, at least one read of the weights."""
        products = (
            2 * rows * (self.weights * prompt + self.head)
            + rows * self.attention * prompt * prompt / 2
        )
        return max(products / machine.operations, self.model_bytes / machine.bandwidth)

    def decode_seconds(self, machine: Machine, rows: int, context: float) -> float:
        """One step: all weights and the rows' caches are read, `rows` tokens pass through."""
        read = self.model_bytes + rows * context * self.cache_bytes
        products = rows * (2 * (self.weights + self.head) + self.attention * context)
        return max(read / machine.bandwidth, products / machine.operations)

    def decode_rate(self, machine: Machine, prompt: int, output: int) -> float:
        """Tokens a second of one stream after its first."""
        return 1 / self.decode_seconds(machine, 1, prompt + output / 2)

    def batch_rate(self, machine: Machine, rows: int, prompt: int, output: int) -> float:
        """Output tokens a second of requests that all come at once, their prompts included in the
        time.
        """
        steps = (output - 1) * self.decode_seconds(machine, rows, prompt + output / 2)
        return rows * output / (self.prefill_seconds(machine, rows, prompt) + steps)

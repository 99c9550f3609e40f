"""Lower bounds of each case's time on a machine, from bytes read and operations computed."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.model.spec import ModelSpec

_CACHE_BYTES = 2  # bytes of a cached number


@dataclass(frozen=True)
class Machine:
    bandwidth: float  # bytes read per second
    operations: float  # bf16 multiplications and additions per second


@dataclass(frozen=True)
class Work:
    """The work of a model at a number of bits per weight."""

    weights: int  # weights of a token's linear layers, without the head
    head: int  # weights of the head, read once per batch of sampled tokens
    weight_bytes: float  # bytes of one weight, with its share of scales
    cache_bytes: int  # bytes of a cached token
    attention: int  # operations per pair of query and key, over all layers

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
        """Return the time of one pass over all prompts: operations, or one read of the weights."""
        operations = (
            2 * rows * (self.weights * prompt + self.head)
            + rows * self.attention * prompt * prompt / 2
        )
        return max(operations / machine.operations, self.model_bytes / machine.bandwidth)

    def decode_seconds(self, machine: Machine, rows: int, context: float) -> float:
        """Return the time of one step, which reads all weights and the rows' cached tokens."""
        read = self.model_bytes + rows * context * self.cache_bytes
        operations = rows * (2 * (self.weights + self.head) + self.attention * context)
        return max(read / machine.bandwidth, operations / machine.operations)

    def decode_rate(self, machine: Machine, prompt: int, output: int) -> float:
        """Return the tokens per second of one stream after its first token."""
        return 1 / self.decode_seconds(machine, 1, prompt + output / 2)

    def batch_rate(self, machine: Machine, rows: int, prompt: int, output: int) -> float:
        """Return the output tokens per second of requests that all arrive at once, with the time of
        their prompts.
        """
        steps = (output - 1) * self.decode_seconds(machine, rows, prompt + output / 2)
        return rows * output / (self.prefill_seconds(machine, rows, prompt) + steps)

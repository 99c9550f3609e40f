"""The tokens that a layer's queries attend to, and the scaling of scores. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slopes:
    """Position biases of attention: a score falls with the distance of query and key."""

    by_head: tuple[float, ...]  # positive: the score of a key falls by this much per position
    rounded: bool = False  # whether slope × position is rounded to bfloat16, before the scale
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """A query attends to itself and the tokens before it: the last `window` tokens, and always the
    first `sinks` tokens. If it is not causal, to all tokens of its step, which has the whole
    sequence.
    """

    scale: float  # factor of the scores query · key
    window: int | None = None  # None: no limit
    sinks: int = 0  # has no effect without a window
    softcap: float = 0.0  # bound of the scores, softcap × tanh(score / softcap); 0: no bound
    # positions of a chunk: only keys of the query's own chunk are attended to; None: no limit
    chunk: int | None = None
    slopes: Slopes | None = None
    causal: bool = True
    # values are the leading elements of the keys, this many; None: values are cached beside keys
    value_size: int | None = None
    # A logit of each head that takes part in the softmax and adds nothing to the result; None: no
    # such logits. Masks, which rules choose, do not depend on it.
    sink_logits: tuple[float, ...] | None = field(default=None, compare=False)


def cache_shape(
    layers: int, slots: int, kv_heads: int, head_size: int, vectors: int = 2
) -> tuple[int, ...]:
    """Return the shape of a cache: layers, (keys, values), then one layer's keys. vectors: 1 where
    the keys hold the values
    """
    return (layers, vectors, kv_heads, slots, head_size)

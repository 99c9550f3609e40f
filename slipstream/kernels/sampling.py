"""Draw tokens from the logits of a row on a CPU: seeded noise, and the filters top-k, top-p, min-p
and typical-p. Needs numpy only.

A draw adds Gumbel noise to the scaled logits and takes the largest. The noise of a token is a hash
of (seed, position, token). So a draw never depends on the other rows of the batch, and noise is
needed only for the tokens that the filters keep. `gpu/sampling/in_torch.py` draws the same tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_LOW_64_BITS = 0xFFFFFFFFFFFFFFFF

# Top-p without top-k takes this many tokens first: their probabilities nearly always reach p, and
# sorting the whole vocabulary costs more.
_FIRST_TOKENS = 1024
# The noise lies between -2.9 and 16.7. A token whose logit is this much below the largest one never
# wins, so that it needs no noise.
_NOISE_RANGE = 20.0


def noise_key(seed: int, position: int) -> int:
    """Return a 32-bit hash of a seed and a position."""
    mixed = _mix_64((seed & _LOW_64_BITS) ^ _mix_64(position + 1))
    return mixed >> 32


def gumbel(tokens: np.ndarray, key: int) -> np.ndarray:
    """Return Gumbel noise, float32 [n]. tokens: [n]"""
    bits = _mix_32(_mix_32(tokens.astype(np.uint32)) ^ np.uint32(key)) >> np.uint32(8)
    # Strictly between 0 and 1. The largest sum rounds up to 2**24, which would be infinite noise.
    uniform = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)
    np.minimum(uniform, np.float32(1 - 2.0**-24), out=uniform)
    noise: np.ndarray = -np.log(-np.log(uniform))
    return noise


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the places of the `count` largest of values [n], in falling order; of equal ones the
    first. There are fewer if fewer values are above minus infinity.
    """
    limit = -np.inf
    if count < len(values):
        limit = np.partition(values, len(values) - count)[len(values) - count]
    chosen = np.flatnonzero(values >= limit if limit > -np.inf else values > -np.inf)
    order = np.argsort(-values[chosen], kind="stable")[:count]
    places: np.ndarray = chosen[order]
    return places


def log_sum_exp(values: np.ndarray) -> np.float32:
    """Return the logarithm of the sum of exp(values), float32. values: float32 [n]"""
    top = values.max()
    total: np.float32 = top + np.log(np.exp(values - top).sum())
    return total


class Candidates(NamedTuple):
    """The tokens that a draw may take, in the order of the vocabulary."""

    tokens: np.ndarray  # int64 [n]
    scaled: np.ndarray  # float32 [n]: their logits divided by the temperature
    mass: np.float32  # logarithm of the sum of exp(scaled logit) over the whole vocabulary


def draw_from_all(
    logits: np.ndarray,  # float32 [vocab], the largest of them finite
    temperature: float,  # above 0
    min_p: float,  # 0: off
    key: int,
    typical_p: float = 1.0,  # 1: off
) -> int:
    """Return a token, drawn without top-k and top-p."""
    scaled = logits / np.float32(temperature)
    return draw_one(np.arange(len(scaled)), scaled, min_p, key, typical_p)


def draw_one(
    tokens: np.ndarray, scaled: np.ndarray, min_p: float, key: int, typical_p: float = 1.0
) -> int:
    """As `draw_from_all`, from some tokens [n] and their scaled logits, which may be changed."""
    if min_p > 0:
        scaled[scaled < scaled.max() + np.log(np.float32(min_p))] = -np.inf
    if typical_p < 1.0:
        scaled[~keep_typical(scaled, typical_p)] = -np.inf
    kept = scaled >= scaled.max() - np.float32(_NOISE_RANGE)
    return _draw(scaled[kept], tokens[kept], key)


def draw_narrowed(
    logits: np.ndarray,  # float32 [vocab], the largest of them finite
    temperature: float,  # above 0
    top_k: int,  # 0: off
    top_p: float,  # 1: off
    min_p: float,  # 0: off
    key: int,
    typical_p: float = 1.0,  # 1: off
) -> int:
    """Return a token, drawn after temperature, top-k, top-p within it, and min-p relative to the
    likeliest token.
    """
    scaled = logits / np.float32(temperature)
    places = largest(scaled, min(top_k or _FIRST_TOKENS, len(scaled)))
    # Top-p is relative to what top-k kept; without top-k, to the whole vocabulary.
    mass = log_sum_exp(scaled[places] if top_k else scaled)
    kept, reached = _keep(scaled[places], mass, top_p, min_p)
    if not top_k and not reached and len(places) < len(scaled):
        places = largest(scaled, len(scaled))
        kept, _ = _keep(scaled[places], mass, top_p, min_p)
    return _draw_typical(scaled[places[kept]], places[kept], typical_p, key)


def draw_from_candidates(
    found: Candidates, top_k: int, top_p: float, min_p: float, key: int, typical_p: float = 1.0
) -> int:
    """As `draw_narrowed`, where no other token can be kept."""
    places = largest(found.scaled, min(top_k or len(found.tokens), len(found.tokens)))
    values = found.scaled[places]
    kept, _ = _keep(values, log_sum_exp(values) if top_k else found.mass, top_p, min_p)
    return _draw_typical(values[kept], found.tokens[places[kept]], typical_p, key)


def _draw_typical(values: np.ndarray, tokens: np.ndarray, typical_p: float, key: int) -> int:
    if typical_p < 1.0:
        kept = keep_typical(values, typical_p)
        values = values[kept]
        tokens = tokens[kept]
    return _draw(values, tokens, key)


def keep_typical(
    scaled: np.ndarray,  # float32 [n] logits, -inf for tokens that are excluded already
    typical_p: float,
) -> np.ndarray:
    """Return which tokens locally typical sampling keeps [n].

    These are the fewest tokens whose probabilities reach `typical_p`, taken in the order of the
    distance between their negative log-probability and the entropy. Equal distances are all kept.
    """
    log_probability = scaled - scaled.max()
    log_probability -= np.log(np.exp(log_probability).sum())
    probability = np.exp(log_probability)
    possible = probability > 0
    entropy = -(probability[possible] * log_probability[possible]).sum()
    distance = np.abs(log_probability + entropy)
    order = np.argsort(distance, kind="stable")
    cumulative = _cumulative(probability[order])
    last = min(int((cumulative < np.float32(typical_p)).sum()), len(scaled) - 1)
    kept: np.ndarray = distance <= distance[order[last]]
    return kept


def _draw(scaled: np.ndarray, tokens: np.ndarray, key: int) -> int:
    """Return one of the tokens [n]. scaled: their scaled logits [n]"""
    return int(tokens[(scaled + gumbel(tokens, key)).argmax()])


def _keep(
    values: np.ndarray, mass: np.float32, top_p: float, min_p: float
) -> tuple[np.ndarray, bool]:
    """Return which of the sorted values are kept, and whether they reach top-p."""
    probability = np.exp(values - mass)
    cumulative = _cumulative(probability)
    kept = probability >= np.float32(min_p) * probability[0]
    if top_p < 1.0:
        kept &= cumulative - probability < np.float32(top_p)
    kept[0] = True
    return kept, bool(cumulative[-1] >= np.float32(top_p))


def _cumulative(probability: np.ndarray) -> np.ndarray:
    """Return cumulative sums in float32, added in float64."""
    sums: np.ndarray = np.cumsum(probability, dtype=np.float64).astype(np.float32)
    return sums


def _mix_32(x: np.ndarray) -> np.ndarray:
    """Hash uint32: a bijection in which each input bit affects every output bit."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def _mix_64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _LOW_64_BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LOW_64_BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LOW_64_BITS
    return x ^ (x >> 31)

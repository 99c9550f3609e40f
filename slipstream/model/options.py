"""The groups of options of a model's description: rotary scaling, position biases, experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# Several times what any model has: a config with larger counts is damaged.
_MAX_EXPERTS = 4096

RopeKind = Literal["linear", "yarn", "llama3", "longrope"]


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies beyond the trained context. Unused fields keep their
    default.
    """

    kind: RopeKind
    factor: float = 1.0
    original_positions: int = 0
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    # yarn, longrope: scale of cos and sin; None: the formula's own
    attention_factor: float | None = None
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()  # longrope


@dataclass(frozen=True)
class QueryScaling:
    """Queries at later positions are scaled up: by 1 + beta * log(1 + floor((position + offset) /
    interval)).
    """

    beta: float
    interval: int  # tokens
    offset: int = 0
    unrotated_only: bool = False  # in the layers without RoPE only


@dataclass(frozen=True)
class Alibi:
    """Position biases of attention: the score of a query and a key falls with their distance. Each
    head has its own slope.
    """

    largest_exponent: float = 8.0  # the slopes are 2 ** -exponent, in equal steps up to this one
    scale: float = 1.0  # factor of the biases
    rounded: bool = False  # whether slopes and biases are rounded to bfloat16


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: the keys and values of all heads come from one latent vector of
    a token. The cache holds that vector and one rotated key, which all heads share.
    """

    kv_rank: int  # elements of the latent vector
    rope_size: int  # elements of the rotated key, and of the rotated part of each query
    plain_size: int  # elements of the part of each query that is not rotated
    value_size: int  # elements of the values of a head
    query_rank: int = 0  # elements of the latent vector of the queries; 0: there is none
    norm_epsilon: float = 1e-6  # of the norms of the latent vectors

    def __post_init__(self) -> None:
        check_sizes(self, "kv_rank", "rope_size", "plain_size", "value_size")

    @property
    def query_size(self) -> int:
        return self.plain_size + self.rope_size

    @property
    def cached_size(self) -> int:
        return self.kv_rank + self.rope_size


@dataclass(frozen=True)
class ClampedGate:
    """A gated MLP whose halves are bounded: x * sigmoid(alpha * x) * (y + 1), where x, of the
    activated half, is at most `limit`, and y between -limit and limit.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, with a few experts per token."""

    count: int
    per_token: int
    ffn_size: int
    normalised: bool = True  # whether the routing weights of a token sum to 1
    shared_ffn_size: int = 0  # size of the expert that every token takes; 0: no such expert
    shared_router: bool = True  # whether a router of its own weighs the shared expert
    # routing weights: softmax over all experts, or the sigmoid of the chosen experts' logits
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    weighted_inputs: bool = False  # whether the routing weights scale inputs, not outputs
    biases: bool = False  # whether router and experts have biases
    groups: int = 1  # the experts of a token are chosen from a few of these groups
    groups_per_token: int = 1
    # whether experts and groups are chosen by scores with a learned correction, which is no part of
    # the routing weights; a group then counts by its two best experts, otherwise by the best
    corrected: bool = False
    routed_scale: float = 1.0  # factor of the routing weights
    exact_router: bool = False  # whether the router computes in float32
    layers: tuple[bool, ...] | None = None  # layers that have experts; None: all

    def __post_init__(self) -> None:
        check_sizes(self, "count", "per_token", "ffn_size")
        if self.shared_ffn_size:
            check_sizes(self, "shared_ffn_size")
        if not 0 < self.per_token <= self.count <= _MAX_EXPERTS:
            raise ValueError(
                f"{self.per_token} experts a token, of {self.count}; the most are {_MAX_EXPERTS}"
            )
        check_sizes(self, "groups", "groups_per_token")
        candidates = self.groups_per_token * (self.count // self.groups)
        if self.count % self.groups or not self.per_token <= candidates <= self.count:
            raise ValueError(
                f"{self.per_token} experts a token cannot be chosen from {self.groups_per_token} "
                f"of {self.groups} groups of {self.count} experts"
            )

    def held_by(self, rank: int, ranks: int) -> range:
        """Return the experts of a rank: a range of whole experts if their number can be divided,
        else all of them, with a part of each.
        """
        if self.count % ranks:
            return range(self.count)
        each = self.count // ranks
        return range(rank * each, (rank + 1) * each)


def check_sizes(holder: Any, *names: str) -> None:
    """Raise ValueError if a field of these names is no number of at least 1."""
    for name in names:
        value = getattr(holder, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, and must be a number of at least 1")

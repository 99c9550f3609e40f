"""Chooses a replica for each request: the one that probably has the prompt's beginning in its KV
cache, unless it is much busier than others.

    router = Router(replicas=2, most_blocks=4096)
    chain = block_hashes(prompt, 32, root_hash(adapter, salt))
    replica = router.choose(chain, loads=[3.0, 5.5], among=[0, 1])
    router.sent(replica, chain)

The rule, for the prompt's blocks that each replica has from the first on:

1. One replica is much busier than another: the least loaded one.
2. No replica has half of the blocks: the least loaded one.
3. Otherwise the one that has most, among equals the least loaded. But what it has may be a
   beginning that many prompts share, such as a system prompt. Then another replica gets the prompt,
   and that beginning, as soon as this takes fewer steps than the first one is ahead in load.

The router knows what was sent to each replica, not what a replica still holds. It remembers as many
blocks as all replicas have, and forgets the least recently used first, as replicas do. `gone` is
for exact reports of evicted blocks, which engines do not send yet. No torch here.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# prefix: as described above; load: the least loaded; random: for comparisons in benchmarks
Policy = Literal["prefix", "load", "random"]
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds at which load decides instead of a cached prefix, as in SGLang's router."""

    matched_share: float = 0.5  # least share of the prompt's blocks that a replica must know
    load_difference: float = 32.0  # most load above that of the least loaded replica
    load_ratio: float = 1.1  # the same as a factor; both must be exceeded
    # different continuations that make a beginning a shared one; a conversation has up to two: its
    # answer as generated, and as the next prompt repeats it
    continuations: int = 2


def root_hash(adapter: int, salt: str) -> int:
    """Return the root of a chain. Prompts of other adapters or tenants never share blocks."""
    return _hash(f"{adapter}\0{salt}".encode(), 0)


def block_hashes(tokens: Sequence[int], block_tokens: int, parent: int) -> list[int]:
    """Return a 64-bit hash for each full block. It covers all tokens up to the block's end."""
    content = memoryview(array("q", tokens)).cast("B")
    size = 8 * block_tokens
    hashes = []
    for end in range(size, len(content) + 1, size):
        parent = _hash(content[end - size : end], parent)
        hashes.append(parent)
    return hashes


def _hash(content: bytes | memoryview, parent: int) -> int:
    digest = hashlib.blake2b(parent.to_bytes(_HASH_BYTES, "little"), digest_size=_HASH_BYTES)
    digest.update(content)
    return int.from_bytes(digest.digest(), "little")


@dataclass(slots=True)
class _Block:
    replicas: int = 0  # those that it was sent to, one bit each
    child: int | None = None  # hash of the block that followed it last
    continuations: int = 0  # times that another block followed than before


class Router:
    def __init__(
        self,
        replicas: int,
        most_blocks: int,
        policy: Policy = "prefix",
        thresholds: Thresholds = Thresholds(),
        seed: int | None = None,
    ) -> None:
        """most_blocks: blocks of all replicas together
        seed: of the policy "random"
        """
        self.policy = policy
        self.most_blocks = most_blocks
        self.block_load = 0.0  # load of computing one block, in steps
        self._replicas = replicas
        self._turns = [0] * replicas  # when each was sent a request last
        self._thresholds = thresholds
        self._random = random.Random(seed)
        # by block hash, least recently sent first
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of blocks that are remembered."""
        return len(self._blocks)

    def choose(self, chain: Sequence[int], loads: Sequence[float], among: Sequence[int]) -> int:
        """Return one of the replicas in `among`.

        chain: hashes of the prompt's full blocks
        loads: load of every replica; see `load`
        """
        if self.policy == "random":
            return self._random.choice(among)
        least = self._least(among, loads)
        if self.policy == "load" or not chain:
            return least
        limits = self._thresholds
        highest = max(loads[replica] for replica in among)
        difference = highest - loads[least]
        if difference > limits.load_difference and highest > limits.load_ratio * loads[least]:
            return least
        matched = self.matched(chain)
        best = max(matched[replica] for replica in among)
        if best < limits.matched_share * len(chain):
            return least
        home = self._least([one for one in among if matched[one] == best], loads)
        if best and self._blocks[chain[best - 1]].continuations >= limits.continuations:
            added = (best - matched[least]) * self.block_load
            if loads[home] - loads[least] > added:
                return least
        return home

    def _least(self, among: Sequence[int], loads: Sequence[float]) -> int:
        """Return the least loaded replica; among equals the one that has waited longest."""
        return min(among, key=lambda replica: (loads[replica], self._turns[replica]))

    def matched(self, chain: Sequence[int]) -> list[int]:
        """Return how many leading blocks of a prompt each replica was sent before."""
        counts = [len(chain)] * self._replicas
        matching = (1 << self._replicas) - 1
        for position, block in enumerate(chain):
            known = self._blocks.get(block)
            still = 0 if known is None else matching & known.replicas
            if still == matching:
                continue
            for replica in _bits(matching & ~still):
                counts[replica] = position
            matching = still
            if not matching:
                break
        return counts

    def sent(self, replica: int, chain: Sequence[int]) -> None:
        """Note that a replica has these blocks, or will have when it has computed them."""
        self._turns[replica] = max(self._turns) + 1
        if self.policy != "prefix":
            return
        child = None
        # The end of a prompt is forgotten before its beginning, as replicas evict blocks.
        for block in reversed(chain):
            known = self._blocks.setdefault(block, _Block())
            known.replicas |= 1 << replica
            if child is not None and child != known.child:
                known.child = child
                known.continuations += 1
            child = block
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.most_blocks:
            self._blocks.popitem(last=False)

    def gone(self, replica: int, blocks: Sequence[int]) -> None:
        """Note that a replica does not have these blocks any more."""
        for block in blocks:
            known = self._blocks.get(block)
            if known is not None:
                known.replicas &= ~(1 << replica)
                if not known.replicas:
                    del self._blocks[block]

    def forget(self, replica: int) -> None:
        """Forget all blocks of a replica whose process has ended."""
        self.gone(replica, list(self._blocks))


def _bits(mask: int) -> list[int]:
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


def load(requests: int, uncomputed_tokens: int, step_tokens: int) -> float:
    """Return the load of a replica: its requests, and the steps that their prompts still take.

    uncomputed_tokens: prompt tokens of requests without output, except those in the cache
    step_tokens: token budget of one step
    """
    return requests + uncomputed_tokens / max(1, step_tokens)

"""Conversations over two replicas: a turn finds the keys and values of the turns before it.

The replicas are real block pools without a model. Requests overlap, and end in random order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import scripted_engine as scripted

from slipstream.engine.blocks import BlockPool, hash_block, root_hash
from slipstream.engine.messages import StepOutputs
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.engine import UNASSIGNED
from slipstream.server.engine_link.mailbox import InFlightRequest, Mailboxes
from slipstream.server.engine_link.replicas import ReplicaChooser

BLOCK_TOKENS = 32
CONVERSATIONS = 100
TURNS = 8
AT_ONCE = 12
SYSTEM = [1] * 70  # all conversations begin with it


class PoolReplica:
    """A replica that has blocks and no model. `finish` ends one of its requests."""

    ready = True
    processes = 1

    def __init__(self, blocks: int) -> None:
        self.info = replace(scripted.ScriptedLoop().info, total_blocks=blocks, step_tokens=512)
        self.pool = BlockPool(blocks, BLOCK_TOKENS)
        self.mailboxes = Mailboxes()
        self.requests: dict[int, InFlightRequest] = {}
        self.cached: dict[int, int] = {}  # request id → prompt tokens found in the cache
        self.held: dict[int, list[int]] = {}

    @property
    def outstanding(self) -> int:
        return len(self.mailboxes)

    def has(self, request_id: int) -> bool:
        return request_id in self.mailboxes

    def submit(self, request: GenerateRequest) -> InFlightRequest:
        in_flight = self.mailboxes.open(request, lambda request_id, reason: None)
        hashes = _hashes(request.prompt)
        found = self.pool.find(hashes)
        self.pool.hold(found)
        self.cached[in_flight.request_id] = len(found) * BLOCK_TOKENS
        self.held[in_flight.request_id] = found
        self.requests[in_flight.request_id] = in_flight
        return in_flight

    def finish(self, request_id: int, answer: list[int]) -> None:
        """Compute the rest of the prompt and the answer, and keep their full blocks."""
        request = self.requests.pop(request_id).request
        hashes = _hashes([*request.prompt, *answer])
        blocks = self.held.pop(request_id)
        blocks += self.pool.allocate(len(hashes) - len(blocks))
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.pool.register(block, block_hash)
        self.pool.release(blocks)
        self.mailboxes.deliver(
            StepOutputs([request_id], [len(answer)], ["stop"], [0], tokens=answer)
        )


def _hashes(tokens: list[int]) -> list[bytes]:
    parent = root_hash(0, "")
    hashes = []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = hash_block(parent, tokens[start : start + BLOCK_TOKENS])
        hashes.append(parent)
    return hashes


@dataclass
class Conversation:
    tokens: list[int]
    turn: int = 0


def converse(policy: str, blocks: int) -> tuple[float, list[int]]:
    """Return the share of turns that found all of the turn before, and the requests of each."""
    chance = random.Random(5)
    replicas = [PoolReplica(blocks) for _ in range(2)]
    chooser = ReplicaChooser(replicas, policy)
    waiting = [Conversation(list(SYSTEM)) for _ in range(CONVERSATIONS)]
    running: list[tuple[PoolReplica, int, Conversation]] = []
    counts = [0, 0]
    reused = 0
    while waiting or running:
        if waiting and len(running) < AT_ONCE:
            talk = waiting.pop(chance.randrange(len(waiting)))
            before = len(talk.tokens) // BLOCK_TOKENS * BLOCK_TOKENS if talk.turn else 0
            talk.tokens += [chance.randrange(900) for _ in range(chance.randrange(10, 60))]
            request = GenerateRequest(UNASSIGNED, list(talk.tokens), SamplingParams())
            in_flight = chooser.submit(request)
            index = next(
                i
                for i, one in enumerate(replicas)
                if one.requests.get(in_flight.request_id) is in_flight
            )
            counts[index] += 1
            reused += talk.turn > 0 and replicas[index].cached[in_flight.request_id] >= before
            running.append((replicas[index], in_flight.request_id, talk))
        else:
            replica, request_id, talk = running.pop(chance.randrange(len(running)))
            answer = [chance.randrange(900) for _ in range(chance.randrange(5, 200))]
            replica.finish(request_id, answer)
            talk.tokens += answer
            talk.turn += 1
            if talk.turn < TURNS:
                waiting.append(talk)
    assert sum(counts) == CONVERSATIONS * TURNS
    return reused / (CONVERSATIONS * (TURNS - 1)), counts


async def test_turns_reuse_their_own_cache_and_both_replicas_work():
    share, counts = converse("prefix", blocks=4000)
    assert share >= 0.9
    assert min(counts) >= 0.4 * sum(counts)


async def test_random_choice_loses_half_of_the_reuse():
    share, _ = converse("random", blocks=4000)
    assert 0.4 <= share <= 0.6


async def test_the_router_forgets_what_small_caches_evict():
    """With caches that hold a part of the conversations, it still finds more than at random."""
    known, _ = converse("prefix", blocks=600)
    chance, _ = converse("random", blocks=600)
    assert known > 1.5 * chance

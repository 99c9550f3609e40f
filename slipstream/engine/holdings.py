"""The rows and blocks of the requests that run. No torch here.

What it owns: a row belongs to one request; every block a request holds is counted in the pool; `promised` is the
sum of what the running requests may still come to need. Changes that a rank must know of go into the plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from slipstream.engine.adapters import Adapters
from slipstream.engine.blocks import BlockPool, next_name, root_name
from slipstream.engine.plan import RowFork, RowStart, StepPlan
from slipstream.engine.request import Request
from slipstream.engine.settings import Policy


class Holdings:
    def __init__(self, blocks: BlockPool, max_rows: int, adapters: Adapters | None = None) -> None:
        self.blocks = blocks
        self.adapters = adapters
        self.max_rows = max_rows
        self.running: dict[int, Request] = {}  # by row, in order of admission
        self.promised = 0  # blocks that running requests may still come to need
        self.users: dict[tuple[int, int], Request] = {}  # (row, generation) → request; a use that is over is not here
        self._free_rows = list(range(max_rows))  # a heap: the lowest number is handed out first
        self._generation = 0

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def most_blocks(self, request: Request) -> int:
        return self.blocks.blocks_for(request.limit - 1)

    # --- what the cache knows ---

    def reusable(self, request: Request) -> list[int]:
        """Cached blocks that begin the request's tokens. At least one token is left to compute."""
        if not self.blocks.reuse or request.sampling.scores_prompt:
            return []  # what lies in the cache has no logits
        usable = (request.known - 1) // self.blocks.block_tokens
        return self.blocks.find(self._names(request, usable))

    def stored(self, request: Request, found: list[int]) -> list[bytes]:
        """Names of blocks that follow the ones found, and lie in the host's memory."""
        if not self.blocks.host or request.sampling.scores_prompt:
            return []
        usable = (request.known - 1) // self.blocks.block_tokens
        return self.blocks.host.find(self._names(request, usable)[len(found) :])

    def name_blocks(self, request: Request) -> None:
        """Blocks that are now full and written become findable."""
        if not self.blocks.reuse:
            return
        full = request.settled // self.blocks.block_tokens
        if full > request.named:
            names = self._names(request, full)
            for index in range(request.named, full):
                self.blocks.name(request.blocks[index], names[index])
            request.named = full

    def _names(self, request: Request, count: int) -> list[bytes]:
        """The names of the request's first `count` blocks, computed once each."""
        names, size = request.names, self.blocks.block_tokens
        while len(names) < count:
            parent = names[-1] if names else root_name(request.request.adapter, request.request.cache_salt)
            start = len(names) * size
            names.append(next_name(parent, request.tokens[start : start + size]))
        return names[:count]

    # --- rows ---

    def fit(self, request: Request, found: list[int], tokens: int, policy: Policy) -> bool:
        """Whether blocks are there for a request that would start with `found` and compute to `tokens`."""
        available = self.blocks.available - self.blocks.idle_among(found)
        others, shared = request.sampling.beam_width - 1, request.prompt_tokens // self.blocks.block_tokens
        if policy == "guaranteed_no_evict":
            # Every running request may still grow to its limit; what that takes is spoken for.
            most = self.most_blocks(request)
            return most - len(found) + others * (most - shared) <= available - self.promised
        # One spare block a running request, so that admitting does not preempt in the very next step.
        beside = others * (self.blocks.blocks_for(request.known) - shared)
        return self.blocks.blocks_for(tokens) - len(found) + beside <= available - len(self.running)

    def start(self, plan: StepPlan, request: Request, found: list[int], stored: Sequence[bytes] = ()) -> None:
        """A row, and the blocks that were found for the beginning of the request's tokens."""
        self.blocks.take(found)
        request.blocks = found + self._load(plan, stored)
        request.named = len(request.blocks)
        request.computed = request.settled = len(request.blocks) * self.blocks.block_tokens
        self.take_row(request, self.most_blocks(request) - len(request.blocks))
        plan.starts.append(self._row_start(request))

    def _load(self, plan: StepPlan, stored: Sequence[bytes]) -> list[int]:
        """Blocks that get what the host has under these names. Others find them from this plan on."""
        slots = [self.blocks.host.read(name) for name in stored]
        blocks = self.blocks.allocate(len(slots))
        for block, name in zip(blocks, stored, strict=True):
            self.blocks.name(block, name)
        plan.loads += zip(slots, blocks, strict=True)
        return blocks

    def take_row(self, request: Request, claim: int) -> None:
        """A row for a request that may come to need `claim` blocks."""
        self._generation += 1
        request.row, request.generation = heapq.heappop(self._free_rows), self._generation
        self.users[request.row, request.generation] = request
        self.running[request.row] = request
        request.claim = claim
        self.promised += claim
        if self.adapters is not None and request.request.adapter:
            self.adapters.use(request.request.adapter)

    def give_back(self, request: Request) -> None:
        if self.adapters is not None and request.request.adapter:
            self.adapters.release(request.request.adapter)
        self.promised -= request.claim
        self.blocks.release(request.blocks)
        request.blocks, request.claim = [], 0
        del self.running[request.row]
        del self.users[request.row, request.generation]
        heapq.heappush(self._free_rows, request.row)
        request.row = -1

    # --- blocks ---

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks that are not there yet for the request's first `tokens` positions."""
        return self.blocks.blocks_for(tokens) - len(request.blocks)

    def append(self, plan: StepPlan, request: Request, count: int) -> None:
        self._claim(request, request.claim - count)
        request.marks.allocated_blocks += count
        for block in self.blocks.allocate(count):
            request.blocks.append(block)
            plan.appended_rows.append(request.row)
            plan.appended_blocks.append(block)

    def fork(self, plan: StepPlan, source: Request, target: Request, tokens: int) -> None:
        """`target`, whose own blocks are given up, shares the full blocks of the first `tokens` positions of
        `source`, and gets a copy of the one that they fill in part."""
        awake = bool(target.blocks)
        self.blocks.release(target.blocks)
        full, rest = divmod(tokens, self.blocks.block_tokens)
        target.blocks = source.blocks[:full]
        self.blocks.take(target.blocks)
        if rest:
            copy = self.blocks.allocate(1)[0]
            plan.copies.append((source.blocks[full], copy))
            target.blocks.append(copy)
            target.marks.allocated_blocks += 1
        target.names, target.named = source.names[:full], min(source.named, full)
        target.computed = target.settled = tokens
        self._claim(target, self.most_blocks(target) - len(target.blocks))
        if awake:
            plan.forks.append(RowFork(target.row, source.row, tokens, list(target.blocks)))
        else:
            plan.starts.append(self._row_start(target))

    def _claim(self, request: Request, claim: int) -> None:
        self.promised += claim - request.claim
        request.claim = claim

    def _row_start(self, request: Request) -> RowStart:
        adapter = request.request.adapter
        pages = self.adapters.pages_of(adapter) if self.adapters is not None and adapter else ()
        return RowStart(request.row, list(request.tokens), request.prompt_tokens, list(request.blocks),
                        request.sampling, adapter, pages, request.request.prompt_table)

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Raise if rows or blocks are lost, or a running request breaks its invariant."""
        self.blocks.check_integrity([request.blocks for request in live])
        used = [request.row for request in self.running.values()]
        if sorted(used + self._free_rows) != list(range(self.max_rows)):
            raise AssertionError(f"rows lost or doubled: used {used}, free {self._free_rows}")
        if set(self.users) != {(r.row, r.generation) for r in self.running.values()}:
            raise AssertionError("a row is mapped to a request that does not run")
        if self.promised != sum(request.claim for request in self.running.values()):
            raise AssertionError("promised blocks and running requests disagree")
        for request in self.running.values():
            if not 0 <= request.settled <= request.computed <= request.known:
                raise AssertionError(f"request {request.request.request_id}: computed more than it knows")
            if len(request.blocks) < self.blocks.blocks_for(request.computed):
                raise AssertionError(f"request {request.request.request_id}: computes outside its blocks")
            if request.blocks and request.claim != self.most_blocks(request) - len(request.blocks):
                raise AssertionError(f"request {request.request.request_id}: claims other than what it may need")


def strike(plan: StepPlan, request: Request) -> None:
    """Take a running request out of a plan that is being made; its row and blocks are about to be given back."""
    row = request.row
    for column in (index for index, other in reversed(list(enumerate(plan.rows))) if other == row):
        for values in (plan.rows, plan.generations, plan.positions, plan.counts, plan.samples, plan.drafts):
            del values[column]  # type: ignore[attr-defined]
    plan.masks.pop(row, None)
    kept = [(r, b) for r, b in zip(plan.appended_rows, plan.appended_blocks, strict=True) if r != row]
    plan.appended_rows[:], plan.appended_blocks[:] = [r for r, _ in kept], [b for _, b in kept]
    mine = set(request.blocks)
    plan.copies[:] = [copy for copy in plan.copies if copy[1] not in mine]
    plan.starts[:] = [start for start in plan.starts if start.row != row]
    plan.forks[:] = [fork for fork in plan.forks if fork.row != row]
    plan.written[:] = [write for write in plan.written if write[0] != row]

"""The rows and blocks of the requests that run. No torch here.

What it owns: a row belongs to one request; every block a request holds is counted in the pool;
`promised` is the sum of what the running requests may still come to need. Changes that a rank must
know of go into the plan.

Where all layers look through a window, a request lets go of blocks that it has passed, and
`promised` is what running requests hold at most at once. A block that one of them lets go of may
still be another's, so that nothing is taken off for blocks that they share.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from slipstream.engine.adapters.adapters import Adapters
from slipstream.engine.blocks import NULL_BLOCK, BlockPool, next_name, root_name
from slipstream.engine.cache.window import Window
from slipstream.engine.forecast import Forecast, at_own_pace
from slipstream.engine.plan import RowFork, RowStart, StepPlan
from slipstream.engine.request import Request
from slipstream.engine.settings import Policy


class Holdings:
    def __init__(
        self,
        blocks: BlockPool,
        max_rows: int,
        adapters: Adapters | None = None,
        window: Window | None = None,
        step_tokens: int = 0,
    ) -> None:
        self.blocks = blocks
        self.window = window
        self.step_tokens = step_tokens
        self.adapters = adapters
        self.max_rows = max_rows
        self.running: dict[int, Request] = {}  # by row, in order of admission
        self.promised = 0  # blocks that running requests may still come to need
        # (row, generation) → request; a use that is over is not here
        self.users: dict[tuple[int, int], Request] = {}
        self._forecast: Forecast | None = None  # of the plan in the making, where somebody asked
        self._free_rows = list(range(max_rows))  # a heap: the lowest number is handed out first
        self._generation = 0

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def most_blocks(self, request: Request) -> int:
        """What a request may come to hold at once, if it shares nothing."""
        whole = self.blocks.blocks_for(request.limit - 1)
        if self.window is None or not self._passes(request):
            return whole
        # Two steps may be under way. With less, the prompt is only computed in smaller pieces.
        steps = 2 * self.step_tokens
        at_once = steps if request.drafter is not None else min(request.prompt_tokens, steps)
        share = self.blocks.total_blocks // request.sampling.beam_width
        return min(whole, self.window.most_blocks(at_once, self.blocks.block_tokens, share))

    def room(self, request: Request, settled: int) -> int:
        """Up to which position the request may have blocks, once it has computed `settled` tokens."""
        if self.window is None or not self._passes(request):
            return request.limit
        passed = self.window.passed(settled, self.blocks.block_tokens)
        return (self.most_blocks(request) + len(passed)) * self.blocks.block_tokens

    def _passes(self, request: Request) -> bool:
        assert self.window is not None
        return bool(self.window.passed(request.limit - 1, self.blocks.block_tokens))

    def beside(self, request: Request) -> int:
        """What each further beam comes to hold: the full blocks of the prompt are shared, unless
        they are let go.
        """
        most = self.most_blocks(request)
        if self.window is not None and self._passes(request):
            return most
        return most - request.prompt_tokens // self.blocks.block_tokens

    def too_large(self, request: Request) -> str:
        """Why the pool can never hold the request; empty when it can."""
        prompt, sampling = request.prompt_tokens, request.sampling
        most = self.most_blocks(request) + (sampling.beam_width - 1) * self.beside(request)
        if most <= self.blocks.total_blocks:
            return ""
        beams = f" of {sampling.beam_width} beams" if sampling.beams else ""
        return (
            f"prompt ({prompt} tokens) and max_tokens ({sampling.max_tokens}){beams} exceed the KV cache, "
            f"{self.blocks.total_blocks * self.blocks.block_tokens} tokens"
        )

    # --- what the cache knows ---

    def reusable(self, request: Request) -> list[int]:
        """Cached blocks that begin the request's tokens. At least one token is left to compute."""
        if not self.blocks.reuse or request.sampling.scores_prompt:
            return []  # what lies in the cache has no logits
        usable = (request.known - 1) // self.blocks.block_tokens
        names = self._names(request, usable)
        return (
            self.blocks.find(names)
            if self.window is None
            else self._find_in_sight(names, self.window)
        )

    def _find_in_sight(self, names: list[bytes], window: Window) -> list[int]:
        """As many blocks as can be had when those that are passed by then need not be there."""
        table = [self.blocks.block_of(name) for name in names]
        size, known, best = self.blocks.block_tokens, 0, 0
        unknown = next(
            (index for index, block in enumerate(table) if block == NULL_BLOCK), len(table)
        )
        for count, block in enumerate(table, 1):
            known = known + 1 if block != NULL_BLOCK else 0  # in a run that ends here
            passed = window.passed(count * size, size)
            if known >= count - passed.stop and (unknown >= count or unknown >= passed.start):
                best = count
        return table[:best]

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
                self.blocks.keep(
                    request.blocks[index], request.keep_of(index, self.blocks.block_tokens)
                )
            request.named = full

    def _names(self, request: Request, count: int) -> list[bytes]:
        """The names of the request's first `count` blocks, computed once each."""
        names, size = request.names, self.blocks.block_tokens
        while len(names) < count:
            parent = (
                names[-1]
                if names
                else root_name(request.request.adapter, request.request.cache_salt)
            )
            start = len(names) * size
            names.append(next_name(parent, request.tokens[start : start + size]))
        return names[:count]

    # --- rows ---

    def fit(self, request: Request, found: list[int], tokens: int, policy: Policy) -> bool:
        """Whether blocks are there for a request that would start with `found` and compute to
        `tokens`.
        """
        available = self.blocks.available - self.blocks.idle_among(found)
        others, shared = (
            request.sampling.beam_width - 1,
            request.prompt_tokens // self.blocks.block_tokens,
        )
        if policy == "guaranteed_no_evict":
            # Every running request may still grow to its limit; what that takes is spoken for.
            most = self.most_blocks(request) + others * self.beside(request)
            if self.window is not None:
                return most <= self.blocks.total_blocks - self.promised
            return most - len(found) <= available - self.promised or self._in_turn(request, tokens)
        # One spare block a running request, so that admitting does not preempt in the very next
        # step.
        beside = others * (self.blocks.blocks_for(request.known) - shared)
        return self.blocks.blocks_for(tokens) - len(found) + beside <= available - len(self.running)

    def _in_turn(self, request: Request, tokens: int) -> bool:
        """Whether the request, computed to `tokens` at first, can run because some end before the
        others have grown.
        """
        if self.step_tokens < self.max_rows or request.group is not None:
            return False
        if self._forecast is None:
            if any(other.group is not None for other in self.running.values()):
                return False
            self._forecast = Forecast(
                self.running.values(), self.blocks.block_tokens, self.most_blocks
            )
        held = self._forecast.most(self.most_blocks(request), self._decoding(request, tokens))
        return held <= self.blocks.total_blocks

    def _decoding(self, request: Request, tokens: int) -> tuple[int, int] | None:
        return None if tokens < request.known or at_own_pace(request) else (tokens, request.limit)

    def begin_plan(self) -> None:
        self._forecast = None

    def start(
        self, plan: StepPlan, request: Request, found: list[int], stored: Sequence[bytes] = ()
    ) -> None:
        """A row, and the blocks that were found for the beginning of the request's tokens."""
        tokens = (len(found) + len(stored)) * self.blocks.block_tokens
        passed = (
            range(0)
            if self.window is None
            else self.window.passed(tokens, self.blocks.block_tokens)
        )
        held = [NULL_BLOCK if index in passed else block for index, block in enumerate(found)]
        self.blocks.take(held)
        later = range(len(found), len(found) + len(stored))
        wanted = [name for index, name in zip(later, stored, strict=True) if index not in passed]
        loaded = iter(self._load(plan, wanted))
        request.blocks = held + [NULL_BLOCK if index in passed else next(loaded) for index in later]
        for index, block in enumerate(
            request.blocks if request.request.retention is not None else ()
        ):
            self.blocks.keep(block, request.keep_of(index, self.blocks.block_tokens))
        request.named, request.passed = len(request.blocks), passed.stop
        request.computed = request.settled = tokens
        self.take_row(request, self._claim_of(request))
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
        if self._forecast is not None:
            self._forecast.add(self.most_blocks(request), None)
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

    def pass_blocks(self, plan: StepPlan, request: Request) -> None:
        """Let go of what nothing that is left to compute looks at."""
        if self.window is None:
            return
        # what right guesses have filled is passed before anybody named it
        self.name_blocks(request)
        passed = self.window.passed(request.settled, self.blocks.block_tokens)
        gone = range(max(passed.start, request.passed), passed.stop)
        self.blocks.release([request.blocks[index] for index in gone])
        for index in gone:
            request.blocks[index] = NULL_BLOCK
        plan.passed += [(request.row, index) for index in gone]
        request.passed = max(request.passed, passed.stop)

    def append(self, plan: StepPlan, request: Request, count: int) -> None:
        request.marks.allocated_blocks += count
        for block in self.blocks.allocate(count):
            request.blocks.append(block)
            plan.appended_rows.append(request.row)
            plan.appended_blocks.append(block)
        self._claim(request)

    def can_fork(self, source: Request, tokens: int) -> bool:
        """Whether the source still has what tokens from position `tokens` on look at."""
        if self.window is None:
            return True
        passed = self.window.passed(tokens, self.blocks.block_tokens)
        return source.passed <= max(passed.start, passed.stop)

    def fork(self, plan: StepPlan, source: Request, target: Request, tokens: int) -> None:
        """`target`, whose own blocks are given up, shares the full blocks of the first `tokens`
        positions of `source`, and gets a copy of the one that they fill in part.
        """
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
        target.passed = source.passed
        self._claim(target)
        if awake:
            plan.forks.append(RowFork(target.row, source.row, tokens, list(target.blocks)))
        else:
            plan.starts.append(self._row_start(target))

    def _claim(self, request: Request) -> None:
        claim = self._claim_of(request)
        self.promised += claim - request.claim
        request.claim = claim

    def _claim_of(self, request: Request) -> int:
        if self.window is not None:  # it takes and gives back as it goes
            return request.claim or self.most_blocks(request)
        return self.most_blocks(request) - len(request.blocks)

    def _row_start(self, request: Request) -> RowStart:
        adapter = request.request.adapter
        pages = self.adapters.pages_of(adapter) if self.adapters is not None and adapter else ()
        return RowStart(
            request.row,
            list(request.tokens),
            request.prompt_tokens,
            list(request.blocks),
            request.sampling,
            adapter,
            pages,
            request.request.prompt_table,
        )

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
                raise AssertionError(
                    f"request {request.request.request_id}: computed more than it knows"
                )
            if len(request.blocks) < self.blocks.blocks_for(request.computed):
                raise AssertionError(
                    f"request {request.request.request_id}: computes outside its blocks"
                )
            if request.blocks and request.claim != self._claim_of(request):
                raise AssertionError(
                    f"request {request.request.request_id}: claims other than what it may need"
                )
            if sum(block != NULL_BLOCK for block in request.blocks) > self.most_blocks(request):
                raise AssertionError(
                    f"request {request.request.request_id}: holds more blocks than it may"
                )

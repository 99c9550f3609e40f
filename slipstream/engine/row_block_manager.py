"""The rows and blocks of running requests. No torch here.

A row belongs to one request, and every block that a request holds is counted in the pool.
`reserved_blocks` is the sum of the blocks that running requests may still need. Changes that a
runner must know go into the plan.

If all layers use a sliding window, a request releases blocks outside of it. `reserved_blocks` is
then the sum of the most blocks that each running request holds at once. Blocks that requests share
are not subtracted, because one of them may release such a block before the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from slipstream.engine.adapters.cache import AdapterCache
from slipstream.engine.blocks import NULL_BLOCK, BlockPool, hash_block, root_hash
from slipstream.engine.cache.window import Window
from slipstream.engine.peak_usage import DecodeSpan, PeakUsage, is_unpredictable
from slipstream.engine.plan import RowFork, RowStart, StepPlan
from slipstream.engine.request import Request
from slipstream.engine.settings import Policy


class RowBlockManager:
    def __init__(
        self,
        blocks: BlockPool,
        max_rows: int,
        adapters: AdapterCache | None = None,
        window: Window | None = None,
        step_tokens: int = 0,
    ) -> None:
        self.blocks = blocks
        self.window = window
        self.step_tokens = step_tokens
        self.adapters = adapters
        self.max_rows = max_rows
        self.running: dict[int, Request] = {}  # by row, in order of admission
        self.reserved_blocks = 0  # sum over running requests
        # (row, epoch) → request; a use of a row that is over is not here
        self.by_epoch: dict[tuple[int, int], Request] = {}
        self._peak_usage: PeakUsage | None = None  # computed on demand, once per plan
        self._free_rows = list(range(max_rows))  # a heap: the lowest number is assigned first
        self._epoch = 0

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    # --- limits ---

    def max_blocks(self, request: Request) -> int:
        """Return the most blocks that a request holds at once, if it shares none."""
        whole = self.blocks.blocks_for(request.limit - 1)
        if self.window is None or not self._outgrows_window(request):
            return whole
        # Two steps may be in flight. With fewer blocks, the prompt is computed in smaller chunks.
        in_flight = 2 * self.step_tokens
        if request.proposer is None:
            in_flight = min(request.prompt_tokens, in_flight)
        share = self.blocks.total_blocks // request.sampling.beam_width
        return min(whole, self.window.max_blocks(in_flight, self.blocks.block_tokens, share))

    def max_position(self, request: Request, committed: int) -> int:
        """Return the position up to which a request with `committed` tokens may have blocks."""
        if self.window is None or not self._outgrows_window(request):
            return request.limit
        outside = self.window.blocks_outside(committed, self.blocks.block_tokens)
        return (self.max_blocks(request) + len(outside)) * self.blocks.block_tokens

    def _outgrows_window(self, request: Request) -> bool:
        assert self.window is not None
        return bool(self.window.blocks_outside(request.limit - 1, self.blocks.block_tokens))

    def max_blocks_per_further_beam(self, request: Request) -> int:
        """Return the most blocks of each further beam, which shares the full blocks of the prompt
        unless they are released.
        """
        most = self.max_blocks(request)
        if self.window is not None and self._outgrows_window(request):
            return most
        return most - request.prompt_tokens // self.blocks.block_tokens

    def _max_blocks_of_all_beams(self, request: Request) -> int:
        further = request.sampling.beam_width - 1
        return self.max_blocks(request) + further * self.max_blocks_per_further_beam(request)

    def capacity_problem(self, request: Request) -> str:
        """Return why the pool can never hold the request; empty when it can."""
        if self._max_blocks_of_all_beams(request) <= self.blocks.total_blocks:
            return ""
        sampling = request.sampling
        beams = f" of {sampling.beam_width} beams" if sampling.beams else ""
        return (
            f"prompt ({request.prompt_tokens} tokens) and max_tokens ({sampling.max_tokens})"
            f"{beams} exceed the KV cache, "
            f"{self.blocks.total_blocks * self.blocks.block_tokens} tokens"
        )

    # --- cached blocks ---

    def find_cached(self, request: Request) -> list[int]:
        """Return the cached blocks of the request's prefix. At least one token stays uncached."""
        if not self.blocks.reuse or request.sampling.uses_whole_prompt:
            return []  # cached blocks have no logits
        usable = _reusable_tokens(request) // self.blocks.block_tokens
        hashes = self._block_hashes(request, usable)
        if self.window is None:
            return self.blocks.find(hashes)
        return self._find_inside_window(hashes, self.window)

    def _find_inside_window(self, hashes: list[bytes], window: Window) -> list[int]:
        """Return the longest usable prefix. Blocks outside the window may be missing in it."""
        table = [self.blocks.find_block(block_hash) for block_hash in hashes]
        size = self.blocks.block_tokens
        first_missing = next(
            (index for index, block in enumerate(table) if block == NULL_BLOCK), len(table)
        )
        run = 0  # cached blocks in a row that end with this one
        best = 0
        for count, block in enumerate(table, 1):
            run = run + 1 if block != NULL_BLOCK else 0
            outside = window.blocks_outside(count * size, size)
            sinks_cached = first_missing >= count or first_missing >= outside.start
            if run >= count - outside.stop and sinks_cached:
                best = count
        return table[:best]

    def find_on_host(self, request: Request, found: list[int]) -> list[bytes]:
        """Return the hashes of blocks that follow the ones found and lie in the host's memory."""
        if not self.blocks.host or request.sampling.uses_whole_prompt:
            return []
        usable = _reusable_tokens(request) // self.blocks.block_tokens
        return self.blocks.host.find(self._block_hashes(request, usable)[len(found) :])

    def register_full_blocks(self, request: Request) -> None:
        """Make blocks findable that are now full and written."""
        if not self.blocks.reuse:
            return
        full = min(request.committed, request.settled) // self.blocks.block_tokens
        if full > request.hashed_blocks:
            hashes = self._block_hashes(request, full)
            for index in range(request.hashed_blocks, full):
                self.blocks.register(request.blocks[index], hashes[index])
                self._set_retention(request, index)
            request.hashed_blocks = full

    def _set_retention(self, request: Request, index: int) -> None:
        priority = request.retention_priority(index, self.blocks.block_tokens)
        self.blocks.set_retention(request.blocks[index], priority)

    def _block_hashes(self, request: Request, count: int) -> list[bytes]:
        """Return the hashes of the request's first `count` blocks. Each is computed once."""
        hashes = request.block_hashes
        size = self.blocks.block_tokens
        while len(hashes) < count:
            parent = (
                hashes[-1]
                if hashes
                else root_hash(request.submitted.adapter, request.submitted.cache_salt)
            )
            start = len(hashes) * size
            hashes.append(hash_block(parent, request.tokens[start : start + size]))
        return hashes[:count]

    # --- admission ---

    def begin_plan(self) -> None:
        self._peak_usage = None

    def can_admit(self, request: Request, found: list[int], tokens: int, policy: Policy) -> bool:
        """Return whether there are blocks for a request that starts with the blocks `found` and
        computes up to position `tokens`.
        """
        available = self.blocks.available - self.blocks.count_idle(found)
        if policy == "guaranteed_no_evict":
            # Every running request may grow to its limit. The blocks for that are reserved.
            most = self._max_blocks_of_all_beams(request)
            if self.window is not None:
                return most <= self.blocks.total_blocks - self.reserved_blocks
            unreserved = available - self.reserved_blocks
            return most - len(found) <= unreserved or self._fits_at_peak(request, tokens)
        # One spare block per running request, so that admission does not cause a preemption in the
        # next step.
        shared = request.prompt_tokens // self.blocks.block_tokens
        per_beam = self.blocks.blocks_for(request.known) - shared
        of_beams = (request.sampling.beam_width - 1) * per_beam
        needed = self.blocks.blocks_for(tokens) - len(found) + of_beams
        return needed <= available - len(self.running)

    def _fits_at_peak(self, request: Request, tokens: int) -> bool:
        """Return whether the request fits because some requests end before others have grown.

        `tokens`: the position up to which the request is computed in this step.
        """
        if self.step_tokens < self.max_rows or request.group is not None:
            return False
        if self._peak_usage is None:
            if any(other.group is not None for other in self.running.values()):
                return False
            self._peak_usage = PeakUsage(
                self.running.values(), self.blocks.block_tokens, self.max_blocks
            )
        decodes = tokens >= request.known and not is_unpredictable(request)
        span = DecodeSpan(tokens, request.limit) if decodes else None
        peak = self._peak_usage.with_request(self.max_blocks(request), span)
        return peak <= self.blocks.total_blocks

    # --- rows ---

    def start(
        self, plan: StepPlan, request: Request, found: list[int], on_host: Sequence[bytes] = ()
    ) -> None:
        """Assign a row to a request that starts with cached blocks.

        `found`: blocks on the device; `on_host`: hashes of the blocks after them.
        """
        tokens = (len(found) + len(on_host)) * self.blocks.block_tokens
        outside = range(0)
        if self.window is not None:
            outside = self.window.blocks_outside(tokens, self.blocks.block_tokens)
        held = [NULL_BLOCK if index in outside else block for index, block in enumerate(found)]
        self.blocks.hold(held)
        later = range(len(found), len(found) + len(on_host))
        wanted = [
            block_hash
            for index, block_hash in zip(later, on_host, strict=True)
            if index not in outside
        ]
        loaded = iter(self._load(plan, wanted))
        request.blocks = held + [
            NULL_BLOCK if index in outside else next(loaded) for index in later
        ]
        if request.submitted.retention is not None:
            for index in range(len(request.blocks)):
                self._set_retention(request, index)
        request.hashed_blocks = len(request.blocks)
        request.released_blocks = outside.stop
        request.scheduled = tokens
        request.committed = tokens
        self.assign_row(request, self._reservation(request))
        plan.starts.append(self._row_start(request))

    def _load(self, plan: StepPlan, hashes: Sequence[bytes]) -> list[int]:
        """Allocate blocks and load them from the host. Later requests of this plan find them."""
        slots = [self.blocks.host.read(block_hash) for block_hash in hashes]
        blocks = self.blocks.allocate(len(slots))
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.blocks.register(block, block_hash)
        plan.loads += zip(slots, blocks, strict=True)
        return blocks

    def assign_row(self, request: Request, reserved_blocks: int) -> None:
        """Assign a row to a request that may need this many more blocks."""
        self._epoch += 1
        request.row = heapq.heappop(self._free_rows)
        request.epoch = self._epoch
        self.by_epoch[request.row, request.epoch] = request
        self.running[request.row] = request
        if self._peak_usage is not None:
            self._peak_usage.add(self.max_blocks(request), None)
        request.reserved_blocks = reserved_blocks
        self.reserved_blocks += reserved_blocks
        if self.adapters is not None and request.submitted.adapter:
            self.adapters.use(request.submitted.adapter)

    def release(self, request: Request) -> None:
        """Release the row and the blocks of a running request."""
        if self.adapters is not None and request.submitted.adapter:
            self.adapters.release(request.submitted.adapter)
        self.reserved_blocks -= request.reserved_blocks
        self.blocks.release(request.blocks)
        request.blocks = []
        request.reserved_blocks = 0
        del self.running[request.row]
        del self.by_epoch[request.row, request.epoch]
        heapq.heappush(self._free_rows, request.row)
        request.row = -1

    # --- blocks ---

    def missing_blocks(self, request: Request, tokens: int) -> int:
        """Return how many blocks the request lacks for its first `tokens` positions."""
        return self.blocks.blocks_for(tokens) - len(request.blocks)

    def release_outside_window(self, plan: StepPlan, request: Request) -> None:
        """Release the blocks that no later token of the request attends to."""
        if self.window is None:
            return
        # Accepted draft tokens may have filled blocks that are not registered yet.
        self.register_full_blocks(request)
        settled = min(request.committed, request.settled)
        outside = self.window.blocks_outside(settled, self.blocks.block_tokens)
        released = range(max(outside.start, request.released_blocks), outside.stop)
        self.blocks.release([request.blocks[index] for index in released])
        for index in released:
            request.blocks[index] = NULL_BLOCK
        plan.released += [(request.row, index) for index in released]
        request.released_blocks = max(request.released_blocks, outside.stop)

    def append_blocks(self, plan: StepPlan, request: Request, count: int) -> None:
        request.stats.allocated_blocks += count
        for block in self.blocks.allocate(count):
            request.blocks.append(block)
            plan.appended_rows.append(request.row)
            plan.appended_blocks.append(block)
        self._update_reservation(request)

    def can_fork(self, source: Request, tokens: int) -> bool:
        """Return whether the source still holds what tokens from position `tokens` on attend to."""
        if self.window is None:
            return True
        outside = self.window.blocks_outside(tokens, self.blocks.block_tokens)
        return source.released_blocks <= max(outside.start, outside.stop)

    def fork(self, plan: StepPlan, source: Request, target: Request, tokens: int) -> None:
        """Make `target` continue from the first `tokens` positions of `source`.

        It releases its own blocks, shares the full blocks of those positions, and gets a copy of
        the block that they fill in part.
        """
        has_started = bool(target.blocks)
        self.blocks.release(target.blocks)
        full, rest = divmod(tokens, self.blocks.block_tokens)
        target.blocks = source.blocks[:full]
        self.blocks.hold(target.blocks)
        if rest:
            copy = self.blocks.allocate(1)[0]
            plan.copies.append((source.blocks[full], copy))
            target.blocks.append(copy)
            target.stats.allocated_blocks += 1
        target.block_hashes = source.block_hashes[:full]
        target.hashed_blocks = min(source.hashed_blocks, full)
        target.scheduled = tokens
        target.committed = tokens
        target.released_blocks = source.released_blocks
        self._update_reservation(target)
        if has_started:
            plan.forks.append(RowFork(target.row, source.row, tokens, list(target.blocks)))
        else:
            plan.starts.append(self._row_start(target))

    def _update_reservation(self, request: Request) -> None:
        reserved = self._reservation(request)
        self.reserved_blocks += reserved - request.reserved_blocks
        request.reserved_blocks = reserved

    def _reservation(self, request: Request) -> int:
        if self.window is not None:  # it allocates and releases blocks as it goes
            return request.reserved_blocks or self.max_blocks(request)
        return self.max_blocks(request) - len(request.blocks)

    def _row_start(self, request: Request) -> RowStart:
        adapter = request.submitted.adapter
        pages = self.adapters.get_pages(adapter) if self.adapters is not None and adapter else ()
        return RowStart(
            row=request.row,
            tokens=list(request.tokens),
            prompt_tokens=request.prompt_tokens,
            blocks=list(request.blocks),
            sampling=request.sampling,
            adapter=adapter,
            pages=pages,
            prompt_table=request.submitted.prompt_table,
        )

    # --- invariants ---

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Raise if rows or blocks are lost, or a running request breaks an invariant."""
        self.blocks.check_integrity([request.blocks for request in live])
        used = [request.row for request in self.running.values()]
        if sorted(used + self._free_rows) != list(range(self.max_rows)):
            raise AssertionError(f"rows lost or in two places: {used}, free {self._free_rows}")
        if set(self.by_epoch) != {(r.row, r.epoch) for r in self.running.values()}:
            raise AssertionError("a row is mapped to a request that does not run")
        if self.reserved_blocks != sum(r.reserved_blocks for r in self.running.values()):
            raise AssertionError("reserved blocks and running requests disagree")
        for request in self.running.values():
            problem = self._invariant_problem(request)
            if problem:
                raise AssertionError(f"request {request.submitted.request_id}: {problem}")

    def _invariant_problem(self, request: Request) -> str:
        if not 0 <= request.committed <= request.scheduled <= request.known:
            return "schedules more than it knows"
        if len(request.blocks) < self.blocks.blocks_for(request.scheduled):
            return "computes outside its blocks"
        if request.blocks and request.reserved_blocks != self._reservation(request):
            return "reserves other blocks than it may need"
        if sum(block != NULL_BLOCK for block in request.blocks) > self.max_blocks(request):
            return "holds more blocks than it may"
        return ""


def _reusable_tokens(request: Request) -> int:
    """Return how many tokens of a request may come from cached blocks: not the last one, nor tokens
    that may be revised.
    """
    return min(request.known - 1, request.settled)

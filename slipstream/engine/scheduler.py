"""Which tokens the next step computes. No torch here; the scheduler sees numbers, never tensors.

Every step gives each running request up to its deficit, within the step's budget, then admits waiting
requests while rows, blocks and budget last. What the scheduler owns: the tokens of a plan never exceed
the budget; every row of a plan holds blocks for all it will compute.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable

from slipstream.engine.blocks import BlockPool, next_name, root_name
from slipstream.engine.messages import EngineStats, StepOutputs
from slipstream.engine.plan import RowStart, StepPlan, StepResult
from slipstream.engine.queue_times import QueueTimes
from slipstream.engine.request import FinishReason, GenerateRequest, Request
from slipstream.engine.settings import Policy


class Scheduler:
    def __init__(
        self,
        blocks: BlockPool,
        max_rows: int,
        step_tokens: int,
        max_sequence_tokens: int,
        vocab_size: int,
        policy: Policy = "guaranteed_no_evict",
        chunked: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = blocks
        self.max_rows = max_rows
        # Without chunks a whole prompt must fit one step.
        self.step_tokens = step_tokens if chunked else max(step_tokens, max_sequence_tokens)
        self.max_sequence_tokens = max_sequence_tokens
        self.vocab_size = vocab_size
        self.policy = policy
        self.chunked = chunked
        self._clock = clock
        self._live: dict[int, Request] = {}  # by request id
        self._waiting: list[tuple[int, int, Request]] = []  # heap: (-priority, arrival, request)
        self._running: dict[int, Request] = {}  # by row, in order of admission
        self._promised = 0  # blocks that running requests may still come to need
        self._row_request: dict[tuple[int, int], Request] = {}  # (row, generation) → request
        self._free_rows = list(range(max_rows))  # a heap: the lowest number is handed out first
        self._generation = 0
        self._arrivals = 0
        self._steps = 0
        self._outputs = StepOutputs()
        self._with_deadline = 0
        self._prompt_tokens = self._cached_prompt_tokens = self._output_tokens = 0
        self._finished = self._cancelled = self._preemptions = self._failed = 0
        self._context_requests = self._context_tokens = self._reused_blocks = 0
        self._queue_times = QueueTimes(clock)

    # --- requests come and go ---

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. One that can never run is answered with an error at once."""
        problem = self._problem(request)
        if problem:
            self._failed += 1
            self._tell(request.request_id, [], "error", error=problem)
            return
        self._arrivals += 1
        queued = Request(request, arrival=self._arrivals, tokens=list(request.prompt))
        self._live[request.request_id] = queued
        self._queue_times.arrive(request.request_id)
        self._with_deadline += request.deadline is not None
        heapq.heappush(self._waiting, (-request.priority, queued.arrival, queued))

    def cancel(self, request_id: int, reason: FinishReason = "cancelled") -> None:
        """Stop a request now. One that is already gone is left alone: its finish and the cancel crossed."""
        request = self._live.get(request_id)
        if request is not None:
            self._finish(request, reason)

    def fail_all(self, error: str) -> None:
        for request in list(self._live.values()):
            self._finish(request, "error", error)

    def has_work(self) -> bool:
        return bool(self._live) or bool(self._outputs.request_ids)

    # --- a step ---

    def plan(self) -> StepPlan | None:
        """The next step's orders, or None when no live request can compute anything now."""
        if self._with_deadline:
            self._expire()
        self._steps += 1
        self._context_requests = self._context_tokens = 0
        plan = StepPlan(step=self._steps)
        preemptions = self._preemptions
        budget = self._plan_running(plan, self.step_tokens)
        if preemptions == self._preemptions:  # what preemption freed is for those that run
            self._admit(plan, budget)
        return plan if plan.rows else None

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Apply the result of a plan; results come in the order the plans were launched."""
        index = 0
        for row, generation, position, count, sampled in zip(
            plan.rows, plan.generations, plan.positions, plan.counts, plan.samples, strict=True
        ):
            request = self._row_request.get((row, generation))
            if request is not None:
                request.settled = position + count
                if request.settled >= (request.named + 1) * self.blocks.block_tokens:
                    self._name_blocks(request)
                if sampled:
                    self._apply(request, result, index)
            index += sampled

    def take_outputs(self) -> StepOutputs | None:
        """What there is to tell since the last call."""
        if not self._outputs.request_ids:
            return None
        outputs, self._outputs = self._outputs, StepOutputs()
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._live) - len(self._running),
            paused=sum(r.row < 0 <= r.generation for r in self._live.values()),
            context_requests=self._context_requests, context_tokens=self._context_tokens,
            generation_requests=sum(r.computed >= r.prompt_tokens for r in self._running.values()),
            free_blocks=self.blocks.available,
            cached_blocks=self.blocks.cached,
            total_blocks=self.blocks.total_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            output_tokens=self._output_tokens,
            finished=self._finished,
            cancelled=self._cancelled,
            preemptions=self._preemptions, failed=self._failed, reused_blocks=self._reused_blocks,
            queue_seconds=self._queue_times.seconds, queue_counts=list(self._queue_times.counts),
        )

    def check_integrity(self) -> None:
        """Raise if rows or blocks are lost, or a running request breaks its invariant."""
        self.blocks.check_integrity([request.blocks for request in self._live.values()])
        used = [request.row for request in self._running.values()]
        if sorted(used + self._free_rows) != list(range(self.max_rows)):
            raise AssertionError(f"rows lost or doubled: used {used}, free {self._free_rows}")
        if set(self._row_request) != {(r.row, r.generation) for r in self._running.values()}:
            raise AssertionError("a row is mapped to a request that does not run")
        if self._promised != sum(self._most_blocks(r) - len(r.blocks) for r in self._running.values()):
            raise AssertionError("promised blocks and running requests disagree")
        for request in self._running.values():
            if not 0 <= request.settled <= request.computed <= request.known:
                raise AssertionError(f"request {request.request.request_id}: computed more than it knows")
            if len(request.blocks) < self.blocks.blocks_for(request.computed):
                raise AssertionError(f"request {request.request.request_id}: computes outside its blocks")

    # --- planning ---

    def _plan_running(self, plan: StepPlan, budget: int) -> int:
        """Running requests first, those one token short of their next before all; returns the budget left."""
        longer = []
        for request in list(self._running.values()):
            deficit = request.deficit
            if deficit > 1:
                longer.append(request)
            elif deficit == 1 and budget > 0 and self._extend(plan, request, request.computed + 1):
                budget -= self._schedule(plan, request, 1)
        for request in sorted(longer, key=lambda r: (-r.request.priority, r.arrival)):
            count = self._share(request.deficit, budget)
            if count and self._extend(plan, request, request.computed + count):
                budget -= self._schedule(plan, request, count)
        return budget

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while self._free_rows and budget > 0:
            request = self._peek_waiting()
            if request is None:
                return
            found = self._reusable(request)
            start = len(found) * self.blocks.block_tokens
            count = self._share(request.known - start, budget)
            if count == 0 or not self._fits(request, found, start + count):
                return  # the head of the queue waits, so nobody behind it overtakes for ever
            heapq.heappop(self._waiting)
            self._start(plan, request, found)
            self._extend(plan, request, request.computed + count)
            budget -= self._schedule(plan, request, count)

    def _share(self, deficit: int, budget: int) -> int:
        if not self.chunked and deficit > budget:
            return 0
        return min(deficit, budget)

    def _peek_waiting(self) -> Request | None:
        while self._waiting:
            request = self._waiting[0][2]
            if request.finish_reason is None:
                return request
            heapq.heappop(self._waiting)  # cancelled while it waited
        return None

    def _fits(self, request: Request, found: list[int], tokens: int) -> bool:
        """Whether blocks are there for a request that would start with `found` and compute to `tokens`."""
        available = self.blocks.available - self.blocks.idle_among(found)
        if self.policy == "guaranteed_no_evict":
            # Every running request may still grow to its limit; what that takes is spoken for.
            return self._most_blocks(request) - len(found) <= available - self._promised
        # One spare block a running request, so that admitting does not preempt in the very next step.
        spare = len(self._running)
        return self.blocks.blocks_for(tokens) - len(found) <= available - spare

    def _most_blocks(self, request: Request) -> int:
        return self.blocks.blocks_for(request.limit - 1)

    def _reusable(self, request: Request) -> list[int]:
        """Cached blocks that begin the request's tokens. At least one token is left to compute."""
        if not self.blocks.reuse:
            return []
        usable = (request.known - 1) // self.blocks.block_tokens
        return self.blocks.find(self._names(request, usable))

    def _start(self, plan: StepPlan, request: Request, found: list[int]) -> None:
        self.blocks.take(found)
        request.blocks = list(found)
        request.named = len(found)
        request.computed = request.settled = len(found) * self.blocks.block_tokens
        if request.generation < 0:  # not a return after preemption
            request.cached_tokens = request.computed
            self._prompt_tokens += request.prompt_tokens
            self._cached_prompt_tokens += request.cached_tokens
            self._reused_blocks += len(found)
            self._queue_times.start(request.request.request_id)
        self._generation += 1
        request.row, request.generation = heapq.heappop(self._free_rows), self._generation
        self._row_request[request.row, request.generation] = request
        self._running[request.row] = request
        self._promised += self._most_blocks(request) - len(found)
        plan.starts.append(
            RowStart(request.row, list(request.tokens), request.prompt_tokens, list(found), request.sampling,
                     request.request.adapter)
        )

    def _extend(self, plan: StepPlan, request: Request, tokens: int) -> bool:
        """Give the request blocks for its first `tokens` positions; False when it has had to give way."""
        if request.row < 0:
            return False  # preempted for the sake of an earlier one
        missing = self.blocks.blocks_for(tokens) - len(request.blocks)
        if missing <= 0:
            return True
        while missing > self.blocks.available:
            victim = max(self._running.values(), key=lambda r: (-r.request.priority, r.arrival))
            self._preempt(plan, victim)
            if victim is request:
                return False
        self._promised -= missing
        for block in self.blocks.allocate(missing):
            request.blocks.append(block)
            plan.appended_rows.append(request.row)
            plan.appended_blocks.append(block)
        return True

    def _schedule(self, plan: StepPlan, request: Request, count: int) -> int:
        samples = request.computed + count == request.known
        plan.rows.append(request.row)
        plan.generations.append(request.generation)
        plan.positions.append(request.computed)
        plan.counts.append(count)
        plan.samples.append(samples)
        if request.computed < request.prompt_tokens:
            self._context_requests += 1
            self._context_tokens += count
        request.computed += count
        request.pending += samples
        return count

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        """Take a running request's row and blocks; it waits again and computes anew what the cache lost.

        A token sampled for it that has not come back is dropped with the row; sampling it again gives the
        same token, since the draw depends on seed and position alone.
        """
        self._preemptions += 1
        for column in (index for index, row in reversed(list(enumerate(plan.rows))) if row == request.row):
            for values in (plan.rows, plan.generations, plan.positions, plan.counts, plan.samples):
                del values[column]  # type: ignore[attr-defined]
        kept = [(r, b) for r, b in zip(plan.appended_rows, plan.appended_blocks, strict=True) if r != request.row]
        plan.appended_rows[:], plan.appended_blocks[:] = [r for r, _ in kept], [b for _, b in kept]
        self._give_back(request)
        request.pending = request.computed = request.settled = 0
        heapq.heappush(self._waiting, (-request.request.priority, request.arrival, request))

    # --- results ---

    def _apply(self, request: Request, result: StepResult, index: int) -> None:
        if index in result.errors:
            self._finish(request, "error", result.errors[index])
            return
        token = result.tokens[index]
        request.pending -= 1
        request.tokens.append(token)
        self._output_tokens += 1
        if token in request.sampling.end_ids:  # the end mark itself is not part of the answer
            self._finish(request, "stop")
            return
        last = len(request.tokens) == request.limit
        log_prob = result.log_probs[index] if result.log_probs is not None else math.nan
        self._tell(request.request.request_id, [token], "length" if last else "", request.cached_tokens,
                   log_prob, result.top_log_probs.get(index))
        if last:
            request.finish("length")
            self._drop(request)

    def _name_blocks(self, request: Request) -> None:
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

    # --- ends ---

    def _problem(self, request: GenerateRequest) -> str:
        """Why the request can never run; empty when it can."""
        prompt, wanted = len(request.prompt), request.sampling.max_tokens
        if request.request_id in self._live:
            return f"request id {request.request_id} is in use"
        if prompt == 0:
            return "the prompt has no tokens"
        if wanted < 1:
            return f"max_tokens must be at least 1, not {wanted}"
        if prompt + wanted > self.max_sequence_tokens:
            return (f"prompt ({prompt} tokens) and max_tokens ({wanted}) exceed the longest sequence, "
                    f"{self.max_sequence_tokens} tokens")
        if self.blocks.blocks_for(prompt + wanted - 1) > self.blocks.total_blocks:
            return (f"prompt ({prompt} tokens) and max_tokens ({wanted}) exceed the KV cache, "
                    f"{self.blocks.total_blocks * self.blocks.block_tokens} tokens")
        outside = next((token for token in request.prompt if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            return f"token id {outside} is outside the vocabulary of {self.vocab_size}"
        return ""

    def _expire(self) -> None:
        now = self._clock()
        for request in [r for r in self._live.values() if (r.request.deadline or math.inf) <= now]:
            self._finish(request, "timeout")

    def _finish(self, request: Request, reason: FinishReason, error: str = "") -> None:
        request.finish(reason)
        self._tell(request.request.request_id, [], reason, request.cached_tokens, error=error)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """A finished request leaves nothing behind but its named blocks."""
        del self._live[request.request.request_id]
        self._with_deadline -= request.request.deadline is not None
        self._finished += 1
        self._cancelled += request.finish_reason == "cancelled"
        self._failed += request.finish_reason == "error"
        self._queue_times.leave(request.request.request_id)
        if request.row >= 0:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self._promised -= self._most_blocks(request) - len(request.blocks)
        self.blocks.release(request.blocks)
        request.blocks = []
        del self._running[request.row]
        del self._row_request[request.row, request.generation]
        heapq.heappush(self._free_rows, request.row)
        request.row = -1

    def _tell(
        self,
        request_id: int,
        tokens: list[int],
        reason: str,
        cached_tokens: int = 0,
        log_prob: float = math.nan,
        top_log_probs: list[tuple[int, float]] | None = None,
        error: str = "",
    ) -> None:
        outputs = self._outputs
        outputs.request_ids.append(request_id)
        outputs.token_counts.append(len(tokens))
        outputs.finish_reasons.append(reason)
        outputs.cached_tokens.append(cached_tokens)
        outputs.tokens.extend(tokens)
        outputs.log_probs.extend(log_prob for _ in tokens)
        if top_log_probs is not None:
            outputs.top_log_probs.setdefault(request_id, []).append(top_log_probs)
        if error:
            outputs.errors[request_id] = error

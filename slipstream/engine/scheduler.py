"""Which tokens the next step computes. No torch here; the scheduler sees numbers, never tensors.

Every step gives each running request up to its deficit, within the step's budget, then admits
waiting requests while rows, blocks and budget last. What the scheduler owns: the tokens of a plan
never exceed the budget; every row of a plan holds blocks for all it will compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from slipstream.engine.adapters.adapters import Adapters
from slipstream.engine.adapters.admission import AdapterGate
from slipstream.engine.beams.beam_rows import bring_up
from slipstream.engine.beams.beams import BeamGroup
from slipstream.engine.blocks import BlockPool
from slipstream.engine.cache.window import Window
from slipstream.engine.capacity import Capacity
from slipstream.engine.columns import add_column, strike
from slipstream.engine.counters import Counters
from slipstream.engine.followers import follow, release_followers, source_of
from slipstream.engine.holdings import Holdings
from slipstream.engine.messages import EngineStats, StepOutputs
from slipstream.engine.outputs import News
from slipstream.engine.plan import StepPlan, StepResult
from slipstream.engine.queue_times import QueueTimes, timing_of
from slipstream.engine.request import Constraint, FinishReason, GenerateRequest, Request
from slipstream.engine.results import Results
from slipstream.engine.settings import Policy
from slipstream.engine.speculation import Drafter, guesses_of
from slipstream.engine.waiting import Waiting


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
        max_beam_width: int | None = None,
        lookup_tokens: int = 0,
        adapters: Adapters | None = None,
        window: Window | None = None,
    ) -> None:
        self.blocks = blocks
        # Without chunks a whole prompt must fit one step.
        self.step_tokens = step_tokens if chunked else max(step_tokens, max_sequence_tokens)
        self.vocab_size = vocab_size
        self.capacity = Capacity(
            max_rows, max_sequence_tokens, vocab_size, min(max_beam_width or max_rows, max_rows)
        )
        self.policy = policy
        self.chunked = chunked
        self.lookup_tokens = lookup_tokens
        self.window = window
        self._clock = clock
        self._live: dict[int, Request] = {}  # by request id; of a group of beams, its leader
        self._waiting = Waiting()
        self._holdings = Holdings(blocks, max_rows, adapters, window, self.step_tokens)
        self._gate = AdapterGate(adapters)
        self._arrivals = 0
        self._news = News()
        self._with_deadline = 0
        self._counters = Counters()
        self._queue_times = QueueTimes(clock)
        self._results = Results(self._news, self._counters, self._finish, self._drop)

    # --- requests come and go ---

    def add(self, request: GenerateRequest, constraint: Constraint | None = None) -> None:
        """Queue a request. One that can never run is answered with an error at once."""
        problem = self.capacity.problem(request) or self._gate.problem(request)
        if request.request_id in self._live:
            problem = f"request id {request.request_id} is in use"
        if problem:
            self.refuse(request.request_id, "error", problem)
            return
        self._arrivals += 1
        queued = Request(
            request, arrival=self._arrivals, tokens=list(request.prompt), constraint=constraint
        )
        queued.marks.arrived = self._clock()
        if request.sampling.beams:
            BeamGroup.of(queued)
        elif (
            (request.draft or self.lookup_tokens)
            and constraint is None
            and not request.sampling.scores_prompt
        ):
            queued.drafter, queued.lockstep = Drafter(request.draft, self.lookup_tokens), True
        queued.lockstep |= constraint is not None  # it goes by the text, which must be known first
        if problem := self._holdings.too_large(queued):
            self.refuse(request.request_id, "error", problem)
            return
        self._live[request.request_id] = queued
        self._gate.enter(request)
        self._queue_times.arrive(request.request_id)
        self._with_deadline += request.deadline is not None
        leader = self._live.get(request.prompt_of) if request.prompt_of is not None else None
        if not follow(queued, leader):
            self._waiting.push(queued)

    def refuse(self, request_id: int, reason: FinishReason, error: str = "") -> None:
        """Answer a request that never was in here."""
        self._counters.failed += reason == "error"
        self._news.tell(request_id, reason=reason, error=error)

    def cancel(self, request_id: int, reason: FinishReason = "cancelled") -> None:
        """Stop a request now. One that is already gone is left alone: its finish and the cancel
        crossed.
        """
        request = self._live.get(request_id)
        if request is not None:
            self._finish(request, reason)

    def has_work(self) -> bool:
        return bool(self._live) or bool(self._news)

    # --- a step ---

    def plan(self) -> StepPlan | None:
        """The next step's orders, or None when no live request can compute anything now."""
        if self._with_deadline:
            self._expire()
        self._counters.begin_step()
        plan = StepPlan(step=self._counters.steps)
        self._waiting.push(*self._gate.begin(plan.step))
        preemptions = self._counters.preemptions
        self._holdings.begin_plan()
        budget = self._plan_running(plan, self.step_tokens)
        if preemptions == self._counters.preemptions:  # what preemption freed is for those that run
            self._admit(plan, budget)
        if not plan.rows:
            return None
        plan.saves = self.blocks.host.complete()
        self._gate.finish(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Apply the result of a plan; results come in the order the plans were launched."""
        index, results = 0, self._results
        results.now = self._clock()
        self._gate.returned(plan)
        users, block_tokens = self._holdings.users, self.blocks.block_tokens
        special = bool(result.errors or result.generation_logits)
        for column, (row, generation, position, count, sampled, drafted) in enumerate(
            zip(
                plan.rows,
                plan.generations,
                plan.positions,
                plan.counts,
                plan.samples,
                plan.drafts,
                strict=True,
            )
        ):
            request = users.get((row, generation))
            if request is not None:
                request.settled = position + count - drafted
                if column in result.prompt_scores:
                    self._news.tell_prompt_scores(
                        request, position, result.prompt_scores[column], self.vocab_size
                    )
                if request.settled >= (request.named + 1) * block_tokens:
                    self._holdings.name_blocks(request)
                if request.followers:
                    self._waiting.push(*release_followers(request))
                if not sampled:
                    continue
                if request.group is not None:
                    results.take_beam(request, request.group, result, index)
                elif request.lockstep or special:
                    results.take(request, result, index, drafted)
                else:
                    results.take_token(request, result, index)
            if sampled:
                index += 1 + drafted

    def abandon(self, plan: StepPlan, error: str) -> None:
        """A plan was not carried out: the request that asked most of it fails, the others compute
        theirs anew.
        """
        self._gate.returned(plan)
        found = [
            self._holdings.users.get(key) for key in zip(plan.rows, plan.generations, strict=True)
        ]
        asked = [
            (count, request)
            for count, request in zip(plan.counts, found, strict=True)
            if request is not None
        ]
        if asked:
            self._finish(max(asked, key=lambda pair: pair[0])[1], "error", error)
        for _, request in asked:
            if request.row >= 0:
                self._preempt(plan, request)
        self.blocks.never_moved(plan.saves, plan.loads)

    def take_outputs(self) -> StepOutputs | None:
        """What there is to tell since the last call."""
        return self._news.take()

    def stats(self) -> EngineStats:
        return self._gate.stats(
            self._counters.stats(self._live.values(), self.blocks, self._queue_times)
        )

    def check_integrity(self) -> None:
        """Raise if rows or blocks are lost, or a running request breaks its invariant."""
        self._holdings.check_integrity(
            member for request in self._live.values() for member in _members(request)
        )
        self._gate.check_integrity(self._live.values(), self._holdings.running.values())

    # --- planning ---

    def _plan_running(self, plan: StepPlan, budget: int) -> int:
        """Running requests first, those one token short of their next before all; returns the
        budget left.
        """
        longer, guessing, block_tokens = [], [], self.blocks.block_tokens
        for request in list(self._holdings.running.values()):
            if request.group is not None and budget > 0:
                bring_up(plan, request.group, self._holdings, self._make_room)
            deficit = request.deficit
            if deficit > 1:
                longer.append(request)
            elif deficit == 1 and request.drafter is not None:
                guessing.append(request)
            elif deficit == 1 and budget > 0:
                if request.computed < len(request.blocks) * block_tokens:
                    budget -= self._schedule(plan, request, 1)  # the usual case: its block has room
                else:
                    budget -= self._give(plan, request, 1, budget)
        for behind, request in zip(reversed(range(len(guessing))), guessing, strict=True):
            if budget > 0:  # guesses are for what is left once everybody has a token
                budget -= self._give(plan, request, 1, max(1, budget - behind))
        for request in sorted(longer, key=lambda r: (-r.request.priority, r.arrival)):
            budget -= self._give(plan, request, self._share(request.deficit, budget), budget)
        return budget

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0:
            request = self._next_waiting()
            if request is None or self._holdings.free_rows < request.sampling.beam_width:
                return
            first = request.group.first if request.group is not None else request
            source = source_of(request)
            if source is not None and not self._holdings.can_fork(
                source, request.prompt_tokens - 1
            ):
                source = None
            stored: list[bytes] = []
            if source is None:
                found = self._holdings.reusable(first)
                stored = self._holdings.stored(first, found)
                start = (len(found) + len(stored)) * self.blocks.block_tokens
            else:
                start = request.prompt_tokens - 1
                found = source.blocks[: start // self.blocks.block_tokens]
            count = min(
                self._share(first.known - start, budget), self._holdings.room(first, start) - start
            )
            if count == 0 or not self._holdings.fit(first, found, start + count, self.policy):
                return  # the head of the queue waits, so nobody behind it overtakes for ever
            self._waiting.pop()
            self._start(plan, first, found, stored, source)
            budget -= self._give(plan, first, count, budget)

    def _next_waiting(self) -> Request | None:
        """The first of those that wait and whose adapter does not keep them from starting."""
        while (request := self._waiting.first()) is not None:
            problem = self._gate.problem(request.request)
            if not problem and self._gate.admits(request):
                return request
            self._waiting.pop()
            if problem:
                self._finish(request, "error", problem)
        return None

    def _share(self, deficit: int, budget: int) -> int:
        if not self.chunked and deficit > budget:
            return 0
        return min(deficit, budget)

    def _start(
        self,
        plan: StepPlan,
        request: Request,
        found: list[int],
        stored: list[bytes],
        source: Request | None,
    ) -> None:
        leader = request.group.leader if request.group is not None else request
        returns = leader.generation >= 0
        if source is None:
            self._holdings.start(plan, request, found, stored)
        else:
            self._holdings.take_row(request, claim=0)  # the fork knows
            self._holdings.fork(plan, source, request, request.prompt_tokens - 1)
        if request.group is not None:
            for member in request.group.sleep():
                self._holdings.take_row(member, self._holdings.beside(request))
        if not returns:  # after a preemption
            leader.cached_tokens = request.computed
            self._counters.prompt_tokens += leader.prompt_tokens
            self._counters.cached_prompt_tokens += leader.cached_tokens
            reused = len(found) + len(stored)
            self._counters.reused_blocks += reused
            leader.marks.first_scheduled, leader.marks.reused_blocks = self._clock(), reused
            self._queue_times.start(leader.request.request_id)

    def _give(self, plan: StepPlan, request: Request, count: int, budget: int) -> int:
        """Let a request compute `count` tokens, and guesses beyond them; returns how many it
        computes.
        """
        room = self._holdings.room(request, request.settled) - request.computed
        count, budget = min(count, room), min(budget, room)
        if count <= 0:
            return 0
        guesses = (
            guesses_of(request, count, budget - count, self.blocks)
            if request.drafter is not None
            else []
        )
        if not self._extend(plan, request, request.computed + count + len(guesses)):
            return 0
        return self._schedule(plan, request, count, guesses)

    def _extend(self, plan: StepPlan, request: Request, tokens: int) -> bool:
        """Give the request blocks for its first `tokens` positions; False when it has had to give
        way.
        """
        if request.row < 0:
            return False  # preempted for the sake of an earlier one
        missing = self._holdings.missing(request, tokens)
        if missing <= 0:
            return True
        self._holdings.pass_blocks(plan, request)
        if not self._make_room(plan, request, missing):
            return False
        self._holdings.append(plan, request, missing)
        return True

    def _make_room(self, plan: StepPlan, request: Request, blocks: int) -> bool:
        while blocks > self.blocks.available:
            self._preempt(
                plan,
                max(
                    self._holdings.running.values(), key=lambda r: (-r.request.priority, r.arrival)
                ),
            )
            if request.row < 0:
                return False
        return True

    def _schedule(
        self, plan: StepPlan, request: Request, count: int, guesses: Sequence[int] = ()
    ) -> int:
        if request.computed < request.prompt_tokens:
            self._counters.context_requests += 1
            self._counters.context_tokens += count
        return add_column(plan, request, count, guesses)

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        """Take a running request's row and blocks; it waits again and computes anew what the cache
        lost.

        A token sampled for it that has not come back is dropped with the row; sampling it again
        gives the same token, since the draw depends on seed and position alone. Beams give way
        together.
        """
        self._counters.preemptions += 1
        for member in _members(request):
            strike(plan, member)
            self._holdings.give_back(member)
            member.pending = member.computed = member.settled = 0
        if request.group is not None:
            request.group.rest()
            request = request.group.leader
        self._waiting.push(request)

    # --- ends ---

    def _expire(self) -> None:
        now = self._clock()
        for request in [r for r in self._live.values() if (r.request.deadline or math.inf) <= now]:
            self._finish(request, "timeout")

    def _finish(self, request: Request, reason: FinishReason, error: str = "") -> None:
        request = request if request.group is None else request.group.leader
        request.finish(reason)
        if request.group is not None and reason != "error":
            self._news.outputs.beams[request.request.request_id] = request.group.search.results()
        self._news.tell(request.request.request_id, (), reason, request.cached_tokens, error=error)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """A finished request leaves nothing behind but its named blocks."""
        del self._live[request.request.request_id]
        if request.sampling.timing:
            self._news.outputs.timings[request.request.request_id] = timing_of(request.marks)
        self._with_deadline -= request.request.deadline is not None
        self._counters.finished += 1
        self._counters.cancelled += request.finish_reason == "cancelled"
        self._counters.failed += request.finish_reason == "error"
        self._queue_times.leave(request.request.request_id)
        self._gate.leave(request.request)
        self._waiting.push(*release_followers(request, over=True))
        for member in _members(request):
            if member.row >= 0:
                self._holdings.give_back(member)


def _members(request: Request) -> list[Request]:
    """The requests that hold rows for this one."""
    return [request] if request.group is None else request.group.members

"""Decides which tokens the next step computes. No torch here; the scheduler never sees tensors.

Every step schedules each running request's uncomputed tokens (its deficit) as far as the token
budget allows. Then it admits waiting requests while rows, blocks and budget last. Invariants: the
tokens of a plan never exceed the budget, and every row of a plan holds blocks for all tokens that
it computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from slipstream.engine.adapters.admission import AdapterAdmission
from slipstream.engine.adapters.cache import AdapterCache
from slipstream.engine.beams.group import BeamGroup, apply_decisions
from slipstream.engine.blocks import BlockPool
from slipstream.engine.cache.window import Window
from slipstream.engine.capacity import Capacity, beam_limit
from slipstream.engine.constraints.revisions import Revisions
from slipstream.engine.messages import EngineStats, StepOutputs
from slipstream.engine.outputs import OutputBuffer
from slipstream.engine.plan import StepPlan, StepResult, add_entry, remove_request
from slipstream.engine.request import Constraint, FinishReason, GenerateRequest, Request
from slipstream.engine.results import ResultHandler
from slipstream.engine.row_block_manager import RowBlockManager
from slipstream.engine.settings import Policy
from slipstream.engine.speculation import Speculation, drafts_now, propose_draft_tokens
from slipstream.engine.statistics import Counters, QueueTimes, to_timing
from slipstream.engine.step_budget import PromptLimits
from slipstream.engine.waiting import (
    WaitingQueue,
    release_dependents,
    share_prompt,
    usable_prompt_source,
)


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
        adapters: AdapterCache | None = None,
        window: Window | None = None,
        revision_threads: int = 0,
        prompt_limits: PromptLimits | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """revision_threads: threads that revise outputs beside the steps; 0: no threads

        prompt_limits: limits the prompt tokens beside running streams, if prompts are in chunks
        """
        self.blocks = blocks
        # Without chunks a whole prompt must fit one step.
        self.step_tokens = step_tokens if chunked else max(step_tokens, max_sequence_tokens)
        self.vocab_size = vocab_size
        self.capacity = Capacity(
            max_rows, max_sequence_tokens, vocab_size, beam_limit(max_beam_width, max_rows)
        )
        self.policy = policy
        self.chunked = chunked
        self._speculation = speculation or Speculation(lookup_tokens)
        self.window = window
        self._clock = clock
        # by request id; a beam search is represented by its leader
        self._live: dict[int, Request] = {}
        self._waiting = WaitingQueue()
        self._manager = RowBlockManager(blocks, max_rows, adapters, window, self.step_tokens)
        self._adapters = AdapterAdmission(adapters)
        self._arrivals = 0
        self._outputs = OutputBuffer()
        self._with_deadline = 0  # live requests that have a deadline
        self._counters = Counters()
        self._queue_times = QueueTimes(clock)
        self._revisions = Revisions(revision_threads) if revision_threads else None
        self.prompt_limits = prompt_limits if chunked and prompt_limits else PromptLimits()
        self._results = ResultHandler(
            self._outputs, self._counters, self._finish, self._drop, self._revisions
        )

    # --- requests arrive and leave ---

    def add(self, request: GenerateRequest, constraint: Constraint | None = None) -> None:
        """Queue a request. One that can never run gets an error at once."""
        problem = self.capacity.problem(request) or self._adapters.problem(request)
        if request.request_id in self._live:
            problem = f"request id {request.request_id} is in use"
        if problem:
            self.refuse(request.request_id, "error", problem)
            return
        self._arrivals += 1
        queued = Request(
            request, arrival=self._arrivals, tokens=list(request.prompt), constraint=constraint
        )
        queued.stats.arrived = self._clock()
        if request.sampling.beams:
            BeamGroup.create(queued)
        else:
            self._speculation.add(queued)
        queued.needs_host_result |= constraint is not None  # masks depend on the text so far
        queued.needs_host_result |= bool(request.sampling.pooling)  # ends with the prompt
        if problem := self._manager.capacity_problem(queued):
            self.refuse(request.request_id, "error", problem)
            return
        self._live[request.request_id] = queued
        self._adapters.hold(request)
        self._queue_times.arrive(request.request_id)
        self._with_deadline += request.deadline is not None
        source = (
            self._live.get(request.shares_prompt_with)
            if request.shares_prompt_with is not None
            else None
        )
        if not share_prompt(queued, source):
            self._waiting.push(queued)

    def refuse(self, request_id: int, reason: FinishReason, error: str = "") -> None:
        """Send the end of a request that was never queued."""
        self._counters.failed += reason == "error"
        self._outputs.emit(request_id, reason=reason, error=error)

    def cancel(self, request_id: int, reason: FinishReason = "cancelled") -> None:
        """Stop a request now. A request that has already finished is ignored."""
        request = self._live.get(request_id)
        if request is not None:
            self._finish(request, reason)

    def has_work(self) -> bool:
        return bool(self._live) or bool(self._outputs)

    # --- a step ---

    def wait_for_revisions(self, seconds: float) -> None:
        """Wait until all outputs are revised, or for this long."""
        if self._revisions is not None:
            self._revisions.wait(seconds)

    def plan(self) -> StepPlan | None:
        """Return the next plan, or None when no live request can compute anything now."""
        if self._revisions:
            self._apply_revised(self._revisions)
        if self._with_deadline:
            self._expire()
        self._counters.begin_step()
        plan = StepPlan(step=self._counters.steps)
        self._waiting.push(*self._adapters.begin_step(plan.step))
        preemptions = self._counters.preemptions
        began = self._clock()
        self._manager.begin_plan()
        self.prompt_limits.begin_plan()
        budget = self._plan_running(plan, self.step_tokens)
        # Admit no request in a step that preempted: the freed blocks belong to the requests that
        # still run.
        if preemptions == self._counters.preemptions:
            self._admit(plan, budget)
        if not plan.rows:
            return None
        plan.saves = self.blocks.host.take_saves()
        self._adapters.complete_plan(plan)
        self.prompt_limits.begin(plan, began)
        self._speculation.begin(plan, began)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Apply the result of a plan. Results arrive in the order the plans were launched."""
        index = 0
        results = self._results
        results.now = self._clock()
        self.prompt_limits.end(plan, results.now)
        self._speculation.end(plan, results.now)
        self._adapters.plan_returned(plan)
        by_epoch = self._manager.by_epoch
        block_tokens = self.blocks.block_tokens
        special = bool(result.errors or result.generation_logits)
        entries = zip(
            plan.rows,
            plan.epochs,
            plan.positions,
            plan.counts,
            plan.samples,
            plan.drafts,
            strict=True,
        )
        for entry, (row, epoch, position, count, samples, drafts) in enumerate(entries):
            request = by_epoch.get((row, epoch))
            if request is not None:
                request.committed = position + count - drafts
                if entry in result.prompt_scores:
                    self._outputs.emit_prompt_scores(
                        request, position, result.prompt_scores[entry], self.vocab_size
                    )
                if request.committed >= (request.hashed_blocks + 1) * block_tokens:
                    self._manager.register_full_blocks(request)
                if request.dependents:
                    self._waiting.push(*release_dependents(request))
                if not samples:
                    continue
                if request.group is not None:
                    results.apply_beam(request, request.group, result, index)
                elif drafts or request.needs_host_result or special:
                    results.apply_tokens(request, result, index, drafts)
                else:
                    results.apply_token(request, result, index)
            if samples:
                index += 1 + drafts

    def _apply_revised(self, revisions: Revisions) -> None:
        """Apply the outputs that threads have revised."""
        if len(revisions) >= len(self._manager.running):
            revisions.wait()  # a plan for a few of them would leave the others behind
        self._results.now = self._clock()
        for request, token, revised in revisions.take_ready():
            self._results.apply_revised(request, token, revised)

    def abandon(self, plan: StepPlan, error: str) -> None:
        """Handle a plan that was not carried out: the request with the most tokens in it fails, and
        the others are preempted.
        """
        self._adapters.plan_returned(plan)
        self.prompt_limits.abandon(plan)
        affected: list[tuple[int, Request]] = []  # (tokens in the plan, request)
        for row, epoch, count in zip(plan.rows, plan.epochs, plan.counts, strict=True):
            request = self._manager.by_epoch.get((row, epoch))
            if request is not None:
                affected.append((count, request))
        if affected:
            self._finish(max(affected, key=lambda pair: pair[0])[1], "error", error)
        for _, request in affected:
            if request.row >= 0:
                self._preempt(plan, request)
        self.blocks.discard_transfers(plan.saves, plan.loads)

    def take_outputs(self) -> StepOutputs | None:
        """Return the outputs since the last call, or None."""
        return self._outputs.take()

    def stats(self) -> EngineStats:
        return self._adapters.add_stats(
            self._counters.stats(self._live.values(), self.blocks, self._queue_times)
        )

    def check_integrity(self) -> None:
        """Raise if rows or blocks are lost, or a running request breaks an invariant."""
        members: list[Request] = []
        for request in self._live.values():
            members += _members(request)
        self._manager.check_integrity(members)
        self._adapters.check_integrity(self._live.values(), self._manager.running.values())

    # --- planning ---

    def _plan_running(self, plan: StepPlan, budget: int) -> int:
        """Schedule running requests, those with a deficit of one token first; return the budget
        left.
        """
        longer: list[Request] = []
        drafting: list[Request] = []
        block_tokens = self.blocks.block_tokens
        running = len(self._manager.running)
        for request in list(self._manager.running.values()):
            if request.group is not None and budget > 0:
                apply_decisions(plan, request.group, self._manager, self._make_room)
            deficit = request.deficit
            if deficit > 1:
                longer.append(request)
            elif deficit == 1 and drafts_now(request, running):
                drafting.append(request)
            elif deficit == 1 and budget > 0:
                if request.scheduled < len(request.blocks) * block_tokens:
                    budget -= self._schedule(plan, request, 1)  # the usual case: its block has room
                else:
                    budget -= self._schedule_up_to(plan, request, 1, budget)
        # Draft tokens use the budget that is left once every request has a token.
        # `still_to_schedule` counts the requests after this one: each needs a token of the budget.
        for still_to_schedule, request in zip(
            reversed(range(len(drafting))), drafting, strict=True
        ):
            if budget > 0:
                budget -= self._schedule_up_to(plan, request, 1, max(1, budget - still_to_schedule))
        longer.sort(key=lambda r: (-r.submitted.priority, r.arrival))
        if len(longer) < len(self._manager.running):
            position = longer[0].scheduled if longer else 0
            backlog = self._waiting.tokens + sum(request.deficit for request in longer)
            budget = self.prompt_limits.prompt_tokens(plan, position, backlog, budget)
        for request in longer:
            budget -= self._schedule_up_to(
                plan, request, self._chunk(request, request.deficit, budget), budget
            )
        return budget

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0:
            request = self._next_waiting()
            if request is None or self._manager.free_rows < request.sampling.beam_width:
                return
            first = request.group.first if request.group is not None else request
            source = usable_prompt_source(request)
            if source is not None and not self._manager.can_fork(source, request.prompt_tokens - 1):
                source = None
            on_host: list[bytes] = []
            if source is None:
                found = self._manager.find_cached(first)
                on_host = self._manager.find_on_host(first, found)
                start = (len(found) + len(on_host)) * self.blocks.block_tokens
            else:
                start = request.prompt_tokens - 1
                found = source.blocks[: start // self.blocks.block_tokens]
            count = min(
                self._chunk(first, first.known - start, budget),
                self._manager.max_position(first, start) - start,
            )
            if count == 0 or not self._manager.can_admit(first, found, start + count, self.policy):
                return  # later requests wait too, so that they do not overtake this one for ever
            self._waiting.pop()
            self._start(plan, first, found, on_host, source)
            budget -= self._schedule_up_to(plan, first, count, budget)

    def _next_waiting(self) -> Request | None:
        """Return the first waiting request whose adapter is ready."""
        while (request := self._waiting.first()) is not None:
            problem = self._adapters.problem(request.submitted)
            if not problem and self._adapters.try_admit(request):
                return request
            self._waiting.pop()
            if problem:
                self._finish(request, "error", problem)
        return None

    def _chunk(self, request: Request, deficit: int, budget: int) -> int:
        """Return how many tokens of a deficit fit into the budget; without chunks, all or none."""
        if request.sampling.scores_prompt:
            budget = self.prompt_limits.scored_tokens(budget)
        if not self.chunked and deficit > budget:
            return 0
        return min(deficit, budget)

    def _start(
        self,
        plan: StepPlan,
        request: Request,
        found: list[int],
        on_host: list[bytes],
        source: Request | None,
    ) -> None:
        leader = request.group.leader if request.group is not None else request
        ran_before = leader.epoch >= 0  # it was preempted
        if source is None:
            self._manager.start(plan, request, found, on_host)
        else:
            self._manager.assign_row(request, reserved_blocks=0)  # fork() sets the reservation
            self._manager.fork(plan, source, request, request.prompt_tokens - 1)
        if request.group is not None:
            reserved = self._manager.max_blocks_per_further_beam(request)
            for member in request.group.start_first():
                self._manager.assign_row(member, reserved)
        if not ran_before:
            reused = len(found) + len(on_host)
            leader.cached_tokens = request.scheduled
            leader.stats.first_scheduled = self._clock()
            leader.stats.reused_blocks = reused
            self._counters.prompt_tokens += leader.prompt_tokens
            self._counters.cached_prompt_tokens += leader.cached_tokens
            self._counters.reused_blocks += reused
            self._queue_times.start(leader.submitted.request_id)

    def _schedule_up_to(self, plan: StepPlan, request: Request, count: int, budget: int) -> int:
        """Schedule up to `count` tokens of a request and draft tokens after them; return how many
        in all.
        """
        settled = min(request.committed, request.settled)
        room = self._manager.max_position(request, settled) - request.scheduled
        count = min(count, room)
        budget = min(budget, room)
        if count <= 0:
            return 0
        draft_tokens = (
            propose_draft_tokens(request, count, budget - count, self.blocks)
            if drafts_now(request, len(self._manager.running))
            else []
        )
        if not self._extend(plan, request, request.scheduled + count + len(draft_tokens)):
            return 0
        return self._schedule(plan, request, count, draft_tokens)

    def _extend(self, plan: StepPlan, request: Request, tokens: int) -> bool:
        """Allocate blocks for the request's first `tokens` positions; False if it was preempted."""
        if request.row < 0:
            return False  # preempted earlier in this plan
        missing = self._manager.missing_blocks(request, tokens)
        if missing <= 0:
            return True
        self._manager.release_outside_window(plan, request)
        if not self._make_room(plan, request, missing):
            return False
        self._manager.append_blocks(plan, request, missing)
        return True

    def _make_room(self, plan: StepPlan, request: Request, blocks: int) -> bool:
        """Preempt requests until enough blocks are available; False if `request` was preempted."""
        while blocks > self.blocks.available:
            running = self._manager.running.values()
            self._preempt(plan, max(running, key=lambda r: (-r.submitted.priority, r.arrival)))
            if request.row < 0:
                return False
        return True

    def _schedule(
        self, plan: StepPlan, request: Request, count: int, draft_tokens: Sequence[int] = ()
    ) -> int:
        if request.scheduled < request.prompt_tokens:
            self._counters.context_requests += 1
            self._counters.context_tokens += count
            if request.sampling.scores_prompt:
                self.prompt_limits.add_scored(count)
        return add_entry(plan, request, count, draft_tokens)

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        """Release a running request's row and blocks and queue it again. It computes again what is
        not cached. All beams of a group are preempted together.

        A sampled token that has not arrived is dropped with the row. Sampling it again gives the
        same token, because a draw depends on seed and position only.
        """
        self._counters.preemptions += 1
        if self._revisions is not None:
            self._revisions.stop(request)
        for member in _members(request):
            remove_request(plan, member)
            self._manager.release(member)
            member.pending = 0
            member.scheduled = 0
            member.committed = 0
            member.unwritten = 0  # a new start has all tokens
        if request.group is not None:
            request.group.reset()
            request = request.group.leader
        self._waiting.push(request)

    # --- ends ---

    def _expire(self) -> None:
        now = self._clock()
        for request in [
            r for r in self._live.values() if (r.submitted.deadline or math.inf) <= now
        ]:
            self._finish(request, "timeout")

    def _finish(self, request: Request, reason: FinishReason, error: str = "") -> None:
        """End a request and send its end."""
        request = request if request.group is None else request.group.leader
        request_id = request.submitted.request_id
        request.finish(reason)
        if request.group is not None and reason != "error":
            self._outputs.outputs.beams[request_id] = request.group.search.results()
        if request.reviser is None:
            self._outputs.emit(request_id, (), reason, request.cached_tokens, error=error)
        else:  # nothing revises its last tokens any more
            end = len(request.tokens) - request.prompt_tokens
            self._counters.output_tokens += self._outputs.emit_unsent(request, end, reason, error)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """Release everything that a finished request holds. Its hashed blocks stay in the cache."""
        request_id = request.submitted.request_id
        del self._live[request_id]
        if self._revisions is not None:
            self._revisions.forget(request)
        if request.sampling.timing:
            self._outputs.outputs.timings[request_id] = to_timing(request.stats)
        self._with_deadline -= request.submitted.deadline is not None
        self._counters.finished += 1
        self._counters.cancelled += request.finish_reason == "cancelled"
        self._counters.failed += request.finish_reason == "error"
        self._queue_times.leave(request_id)
        self._adapters.release(request.submitted)
        self._waiting.push(*release_dependents(request, over=True))
        for member in _members(request):
            if member.row >= 0:
                if member.reviser is not None:  # its last tokens never change now
                    self._manager.register_full_blocks(member)
                self._manager.release(member)


def _members(request: Request) -> list[Request]:
    """Return the requests that hold rows for this one: all beams of a group."""
    return [request] if request.group is None else request.group.members

"""A fake model and device, so that the scheduler runs on plain Python objects."""

from __future__ import annotations

import hashlib
import itertools

from slipstream.engine.beams.search import BeamSearch
from slipstream.engine.blocks import NULL_BLOCK, BlockPool
from slipstream.engine.messages import Beam
from slipstream.engine.plan import StepPlan, StepResult
from slipstream.engine.request import Revision
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step_budget import PromptSpread

END = 3
VOCABULARY = 50


def next_token(history: list[int]) -> int:
    """Return the next token of the fake model, which depends on all tokens before it."""
    return (sum(history) * 31 + len(history) * 7) % VOCABULARY


def log_prob(history: list[int], token: int) -> float:
    """Return a log-probability of the fake model, which depends on all tokens before."""
    return -((sum(history) * 7 + token * 13 + len(history)) % 101) / 10


def expected_answer(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        token = next_token(tokens)
        if token == END:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class Revising:
    """A constraint of the fake model, which revises the output as a guide does: it replaces the last
    tokens by another one, and appends tokens that must follow.
    """

    error = ""

    def mask(self, tokens: list[int]) -> bytes:
        return b""

    def complete(self, tokens: list[int]) -> bool:
        return tokens[-1] == VOCABULARY - 1

    def only(self, token: int) -> bytes:
        return token.to_bytes(4, "little")

    def revise(self, tokens: list[int], fixed: int) -> Revision:
        revised = list(tokens)
        for _ in range(2):
            if revised[-1] % 3 == 0 and len(revised) - fixed >= 2:
                revised[-2:] = [10 + sum(revised[-2:]) % 30]
        if revised[-1] % 4 == 1:
            revised += [10 + (revised[-1] + place) % 30 for place in range(revised[-1] % 11)]
        return Revision(revised, len(revised) - 1 - len(revised) % 3)


def expected_revised_answer(prompt: list[int], max_tokens: int) -> tuple[list[int], str]:
    """Return the answer under `Revising`, and the finish reason."""
    constraint = Revising()
    output: list[int] = []
    sent = 0
    while True:
        token = next_token(prompt + output)
        if token == END:
            return output, "stop"
        revision = constraint.revise([*output, token], sent)
        output = revision.tokens[:max_tokens]
        if constraint.complete(output):
            return output, "stop"
        if len(output) == max_tokens:
            return output, "length"
        sent = max(sent, revision.settled)


def candidates(history: list[int], count: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens of the fake model and their log-probabilities, without ties."""
    digest = hashlib.sha256(repr(history).encode()).digest()
    scores = {token: -0.05 - digest[token % 32] / 64 - token / 1e4 for token in range(VOCABULARY)}
    return sorted(scores.items(), key=lambda item: -item[1])[:count]


def expected_beams(prompt: list[int], sampling: SamplingParams) -> list[Beam]:
    search = BeamSearch(sampling)
    while not search.finished:
        search.advance(
            [candidates(prompt + list(beam.tokens), sampling.candidates) for beam in search.beams]
        )
    return search.results()


class Device:
    """Keeps the state of a runner from plans alone, and checks that every plan can be carried out.

    A slot of the cache holds a hash of the tokens that its key and value were computed from. A row
    must read only slots that were computed from its own tokens.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.window = scheduler.window
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.sampling: dict[int, SamplingParams] = {}
        # block → offset → hash of the tokens it was computed from
        self.cache: dict[int, dict[int, int]] = {}
        self.host: dict[int, dict[int, int]] = {}  # host slot → content of a block
        self.copied = 0
        self.loaded = 0
        self.steps = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.apply(plan)
        self.steps += 1
        assert 0 < plan.tokens <= self.scheduler.step_tokens
        assert len(set(plan.rows)) == len(plan.rows)
        log_probs: list[float] = []
        result = StepResult(tokens=[], log_probs=log_probs)
        entries = zip(
            plan.rows, plan.positions, plan.counts, plan.samples, plan.drafts, strict=True
        )
        for row, position, count, samples, drafts in entries:
            self._compute(row, position, count)
            assert samples or not drafts
            for place in range(position + count - drafts, position + count + 1) if samples else ():
                history = self.tokens[row][:place]
                if self.sampling[row].beams:
                    index = len(result.tokens)
                    result.top_log_probs[index] = candidates(history, self.sampling[row].candidates)
                sample = place - (position + count - drafts)
                only = plan.masks.get(row, b"")[4 * sample : 4 * sample + 4]
                token = int.from_bytes(only, "little") if only else next_token(history)
                result.tokens.append(token)
                log_probs.append(log_prob(history, token))
            if samples:
                drawn = result.tokens[-drafts - 1 :]
                self.tokens[row][position + count - drafts :] = drawn
        return result

    def apply(self, plan: StepPlan) -> None:
        for block, slot in plan.saves:
            self.host[slot] = dict(self.cache[block])
        for slot, block in plan.loads:
            self.cache[block] = dict(self.host[slot])
            self.loaded += 1
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {source for source, _ in plan.copies}
        for source, target in plan.copies:
            self.cache[target] = dict(self.cache[source])
            self.copied += 1
        for start in plan.starts:
            self.tokens[start.row] = list(start.tokens)
            self.tables[start.row] = list(start.blocks)
            self.sampling[start.row] = start.sampling
        for fork in plan.forks:
            self.tokens[fork.row] = self.tokens[fork.source][: fork.tokens]
            self.tables[fork.row] = list(fork.blocks)
        for row, block in zip(plan.appended_rows, plan.appended_blocks, strict=True):
            self.tables[row].append(block)
        for row, place in plan.released:
            self.tables[row][place] = NULL_BLOCK
        for row, position, token in plan.written:
            self.tokens[row][position:] = [token]

    def _compute(self, row: int, position: int, count: int) -> None:
        tokens = self.tokens[row]
        table = self.tables[row]
        size = self.scheduler.blocks.block_tokens
        assert position + count <= len(tokens), "a row computes only known tokens"
        assert len(table) * size >= position + count, "a row has blocks for all tokens it computes"
        held = [block for block in table if block != NULL_BLOCK]
        assert len(set(held)) == len(held)
        for place in self._visible(position, count):
            assert table[place // size] != NULL_BLOCK, (
                "a row reads or writes a block that it has released"
            )
            slots = self.cache.setdefault(table[place // size], {})
            origin = hash(tuple(tokens[: place + 1]))
            if place >= position:
                slots[place % size] = origin
            else:
                assert slots.get(place % size) == origin, (
                    "a row reads slots computed from other tokens"
                )

    def _visible(self, position: int, count: int) -> list[int]:
        """Return the positions that tokens from `position` on read and write."""
        if self.window is None:
            return list(range(position + count))
        oldest = max(0, position - self.window.tokens + 1)
        return sorted({*range(min(self.window.sinks, position)), *range(oldest, position + count)})


class SmallSpread(PromptSpread):
    """Computes one to five prompt tokens beside streams."""

    def __init__(self) -> None:
        super().__init__(tokens_per_second=1.0)

    def prompt_tokens(self, streams: int, backlog: int) -> int:
        return 1 + (streams + backlog) % 5


class Harness:
    """Runs scheduler and device with up to `depth` plans in flight, as the engine's loop does."""

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.device = Device(scheduler)
        self.flight: list = []
        self.answers: dict[int, list[int]] = {}
        self.beams: dict[int, list[Beam]] = {}
        self.reasons: dict[int, str] = {}
        self.log_probs: dict[int, list[float]] = {}

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.flight.append((plan, self.device.run(plan)))
        if self.flight and (plan is None or len(self.flight) >= self.depth):
            self.scheduler.commit(*self.flight.pop(0))
        self.collect()
        self.scheduler.check_integrity()

    def collect(self) -> None:
        outputs = self.scheduler.take_outputs()
        if outputs is None:
            return
        tokens = iter(outputs.tokens)
        log_probs = iter(outputs.log_probs)
        for request_id, count, reason in zip(
            outputs.request_ids, outputs.token_counts, outputs.finish_reasons, strict=True
        ):
            assert request_id not in self.reasons, "no output after a request has finished"
            self.answers.setdefault(request_id, []).extend(itertools.islice(tokens, count))
            self.log_probs.setdefault(request_id, []).extend(itertools.islice(log_probs, count))
            if reason:
                self.reasons[request_id] = reason
        self.beams.update(outputs.beams)

    def run_dry(self, steps: int = 3000) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work() and not self.flight:
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")


def make_scheduler(
    blocks=24,
    block_tokens=4,
    rows=4,
    budget=16,
    policy="guaranteed_no_evict",
    reuse=True,
    chunked=True,
    clock=lambda: 0.0,
    host_slots=0,
    **more,
) -> Scheduler:
    pool = BlockPool(blocks, block_tokens, reuse, host_slots)
    return Scheduler(
        pool,
        rows,
        budget,
        max_sequence_tokens=64,
        vocab_size=VOCABULARY,
        policy=policy,
        chunked=chunked,
        clock=clock,
        **more,
    )

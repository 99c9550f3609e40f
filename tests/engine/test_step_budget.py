"""The token budget of steps with running streams, on given times."""

import pytest
from scheduler_harness import Harness, expected_answer, make_scheduler

from slipstream.engine.plan import StepPlan
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.step_budget import (
    PromptLimits,
    PromptSpread,
    StepBudget,
    StepTimeModel,
    StepWork,
)

MOST = 8192


def plan_of(step: int, decodes: int, prompt: int = 0, position: int = 0, context: int = 100):
    """A step of rows that decode at position `context`, and one row with prompt tokens."""
    plan = StepPlan(step=step)
    plan.rows = list(range(decodes + (prompt > 0)))
    plan.positions = [context] * decodes + [position] * (prompt > 0)
    plan.counts = [1] * decodes + [prompt] * (prompt > 0)
    return plan


def seconds_of(work: StepWork) -> float:
    """A device: 2 ms a step, 10 µs a decode row, 20 ns a context token, 10 µs a prompt token."""
    return (
        2e-3
        + 10e-6 * work.decodes
        + 2e-8 * work.context
        + 10e-6 * work.prompt_tokens
        + 1e-9 * work.pairs
    )


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_work_of_a_plan_is_counted():
    assert StepWork.of(plan_of(1, 3, context=9)) == StepWork(1, 3, 30, 0, 0)
    # 4 tokens from position 10 on attend to 11, 12, 13 and 14
    assert StepWork.of(plan_of(1, 3, 4, 10, context=9)) == StepWork(1, 3, 30, 4, 50)


def test_the_model_finds_the_times_of_a_linear_device():
    model = StepTimeModel()
    for step in range(400):
        decodes = step * 7 % 60
        prompt = step * 131 % 2000 if step % 3 else 0
        work = StepWork.of(plan_of(step, decodes, prompt, step * 17 % 5000, step * 37 % 900))
        model.observe(work, seconds_of(work))
    for work in (StepWork(1, 32, 32_000, 0, 0), StepWork(1, 32, 32_000, 1024, 4_000_000)):
        assert model.seconds(work) == pytest.approx(seconds_of(work), rel=0.05)
    assert all(coefficient >= 0 for coefficient in model.coefficients)


def feed(budget: StepBudget, plans: list[StepPlan], clock: Clock) -> None:
    for plan in plans:
        budget.begin(plan, clock.now)
        clock.now += seconds_of(StepWork.of(plan))
        budget.end(plan, clock.now)


def test_the_budget_fills_the_planned_share_of_the_target():
    budget = StepBudget(0.02, MOST)
    clock = Clock()
    steps = iter(range(1000))
    feed(budget, [plan_of(next(steps), 32) for _ in range(5)], clock)
    decodes = StepWork.of(plan_of(0, 32))
    position = 0
    for _ in range(40):
        tokens = budget.prompt_tokens(decodes, position)
        feed(budget, [plan_of(next(steps), 32, tokens, position)], clock)
        position = (position + tokens) % 8000
    for position in (0, 4000, 7000):
        tokens = budget.prompt_tokens(decodes, position)
        planned = seconds_of(StepWork.of(plan_of(0, 32, tokens, position)))
        more = seconds_of(StepWork.of(plan_of(0, 32, tokens + 64, position)))
        assert planned <= 1.05 * 0.9 * 0.02 < 1.05 * more
    assert budget.prompt_tokens(decodes, 7000) < budget.prompt_tokens(decodes, 0)


def test_the_first_chunks_are_small_and_double():
    budget = StepBudget(10.0, MOST)
    clock = Clock()
    sizes = []
    for step in range(7):
        sizes.append(budget.prompt_tokens(StepWork.of(plan_of(step, 4)), 0))
        feed(budget, [plan_of(step, 4, sizes[-1])], clock)
    assert sizes == [256, 512, 1024, 2048, 4096, 8192, 8192]


def test_prompts_advance_even_if_decoding_alone_misses_the_target():
    budget = StepBudget(0.001, MOST)
    clock = Clock()
    feed(budget, [plan_of(step, 32, 64) for step in range(20)], clock)
    assert budget.prompt_tokens(StepWork.of(plan_of(0, 32)), 0) == MOST // 32


def test_one_delayed_step_hardly_changes_the_budget():
    budget = StepBudget(0.02, MOST)
    clock = Clock()
    feed(budget, [plan_of(step, 32, 512 + step) for step in range(50)], clock)
    decodes = StepWork.of(plan_of(0, 32))
    before = budget.prompt_tokens(decodes, 0)
    delayed = plan_of(50, 32, 512)
    budget.begin(delayed, clock.now)
    clock.now += 3.0
    budget.end(delayed, clock.now)
    assert budget.prompt_tokens(decodes, 0) >= 0.9 * before


def test_a_step_planned_while_another_runs_lasts_from_result_to_result():
    """The second step is planned at 0.001 and its result comes at 0.030: it took 0.020."""
    budgets = [StepBudget(0.1, MOST), StepBudget(0.1, MOST)]
    plans = [plan_of(1, 1, 1000), plan_of(2, 1, 2000)]
    one_after_the_other = [(0.0, 0.010), (0.010, 0.030)]
    overlapping = [(0.0, 0.010), (0.001, 0.030)]
    for budget, times in zip(budgets, (one_after_the_other, overlapping), strict=True):
        for plan, (began, _) in zip(plans, times, strict=True):
            budget.begin(plan, began)
        for plan, (_, ended) in zip(plans, times, strict=True):
            budget.end(plan, ended)
    decodes = StepWork.of(plan_of(3, 1))
    assert budgets[0].prompt_tokens(decodes, 0) == budgets[1].prompt_tokens(decodes, 0)


def with_target(seconds: float) -> PromptLimits:
    return PromptLimits(StepBudget(seconds, 64))


class TimedHarness(Harness):
    """A harness whose clock advances by the time of each step on the device of `seconds_of`."""

    def __init__(self, clock: Clock, depth: int, **options) -> None:
        super().__init__(make_scheduler(clock=clock, **options), depth)
        self.clock = clock
        self.plans: list[StepPlan] = []
        run = self.device.run

        def run_timed(plan: StepPlan):
            self.plans.append(plan)
            clock.now += seconds_of(StepWork.of(plan))
            return run(plan)

        self.device.run = run_timed  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_beside_a_stream_is_computed_in_chunks(depth):
    # 2 ms and 10 µs for each of 12 tokens: 2.15 ms are a few tokens, all 32 take too long
    harness = TimedHarness(Clock(), depth, budget=64, prompt_limits=with_target(0.0024), blocks=64)
    prompt = [token % 5 for token in range(40)]
    harness.scheduler.add(GenerateRequest(0, [1, 2, 3], SamplingParams(max_tokens=40)))
    for _ in range(4):
        harness.step()
    harness.scheduler.add(GenerateRequest(1, prompt, SamplingParams(max_tokens=5)))
    harness.run_dry()
    chunks = [
        plan.counts[1] for plan in harness.plans if len(plan.rows) == 2 and max(plan.counts) > 1
    ]
    assert sum(chunks) == len(prompt)
    assert len(chunks) > 2
    assert harness.answers[1] == expected_answer(prompt, 5)
    assert harness.answers[0] == expected_answer([1, 2, 3], 40)


def test_a_prompt_without_running_streams_takes_the_full_budget():
    harness = TimedHarness(Clock(), 1, budget=64, prompt_limits=with_target(0.001), blocks=64)
    harness.scheduler.add(GenerateRequest(0, [1] * 40, SamplingParams(max_tokens=2)))
    harness.run_dry()
    assert harness.plans[0].counts == [40]


def test_without_a_target_a_prompt_beside_a_stream_takes_the_full_budget():
    harness = TimedHarness(Clock(), 1, budget=64, blocks=64)
    harness.scheduler.add(GenerateRequest(0, [1, 2, 3], SamplingParams(max_tokens=20)))
    harness.step()
    harness.scheduler.add(GenerateRequest(1, [1] * 40, SamplingParams(max_tokens=2)))
    harness.run_dry()
    assert harness.plans[1].counts == [1, 40]


@pytest.mark.parametrize("target", [0.0, -5.0, float("inf"), float("nan")])
def test_a_target_must_be_positive(target):
    with pytest.raises(ValueError, match="target_itl_ms must be positive"):
        EngineSettings(target_itl_ms=target)


def test_a_target_needs_prompts_in_chunks():
    with pytest.raises(ValueError, match="enable_chunked_context"):
        EngineSettings(target_itl_ms=50.0, chunked=False)


def test_prompts_beside_streams_are_spread_over_steps():
    spread = PromptSpread(50_000.0)  # 2,000 tokens in 40 ms
    assert spread.prompt_tokens(8, 100) == 2048 - 8, "enough to use the device well"
    assert spread.prompt_tokens(512, 100) == 3584 - 512, "six for each stream"
    assert spread.prompt_tokens(8, 48 * 4096) == 4224 - 8, "a 48th of what waits, in whole tiles"
    assert PromptSpread(1_000.0).prompt_tokens(8, 100) == 512 - 8, "not less than a slow GPU needs"


class FixedSpread(PromptSpread):
    """Computes five prompt tokens beside streams, and records what it was asked."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.asked: list[tuple[int, int]] = []

    def prompt_tokens(self, streams: int, backlog: int) -> int:
        self.asked.append((streams, backlog))
        return 5


def test_a_scheduler_spreads_prompts_only_beside_streams():
    spread = FixedSpread()
    harness = Harness(
        make_scheduler(budget=16, rows=4, prompt_limits=PromptLimits(spread=spread)), 1
    )
    plans: list[StepPlan] = []
    run = harness.device.run
    harness.device.run = lambda plan: (plans.append(plan), run(plan))[1]
    prompts = {1: [5] * 12, 2: [6] * 14, 3: [7] * 9}
    harness.scheduler.add(GenerateRequest(1, prompts[1], SamplingParams(max_tokens=8)))
    harness.step()
    for number in (2, 3):
        request = GenerateRequest(number, prompts[number], SamplingParams(max_tokens=2))
        harness.scheduler.add(request)
    harness.run_dry()
    assert plans[0].counts == [12], "the whole budget where no stream runs"
    assert [plan.counts for plan in plans[1:4]] == [[1, 5], [1, 5], [1, 4, 1]]
    # the tokens of both requests wait, then what is left of them
    assert spread.asked[:3] == [(1, 23), (1, 18), (1, 13)]
    for number, prompt in prompts.items():
        most = 8 if number == 1 else 2
        assert harness.answers[number] == expected_answer(prompt, most)


def test_whole_prompts_are_not_spread():
    spread = FixedSpread()
    limits = PromptLimits(spread=spread)
    harness = Harness(make_scheduler(rows=4, chunked=False, prompt_limits=limits), 1)
    for number in (1, 6):
        prompt = [number] * 12
        harness.scheduler.add(GenerateRequest(number, prompt, SamplingParams(max_tokens=4)))
        harness.step()
    harness.run_dry()
    assert spread.asked == []
    assert harness.answers == {n: expected_answer([n] * 12, 4) for n in (1, 6)}


def test_the_smaller_of_two_limits_counts():
    plan = plan_of(1, 32)
    loose = StepBudget(10.0, MOST)
    feed(loose, [plan_of(step, 32, 4096) for step in range(2, 12)], Clock())
    tight = StepBudget(0.001, MOST)
    spread = PromptSpread(50_000.0)
    assert loose.prompt_tokens(StepWork.of(plan), 0) == MOST
    assert PromptLimits(loose, spread).prompt_tokens(plan, 0, 0, MOST) == 2048 - 32
    assert PromptLimits(tight, spread).prompt_tokens(plan, 0, 0, MOST) == 256
    assert PromptLimits(tight, spread).prompt_tokens(plan, 0, 0, 100) == 100
    assert PromptLimits().prompt_tokens(plan, 0, 0, MOST) == MOST


def test_the_queue_counts_the_tokens_that_wait():
    scheduler = make_scheduler(rows=1)
    for number, length in ((1, 5), (2, 7), (3, 9)):
        scheduler.add(GenerateRequest(number, [4] * length, SamplingParams(max_tokens=2)))
    queue = scheduler._waiting
    assert queue.tokens == 21
    scheduler.cancel(1)
    harness = Harness(scheduler, 1)
    harness.step()
    assert queue.tokens == 9, "the second has started, and the cancelled one does not count"
    harness.run_dry()
    assert queue.tokens == 0

"""The order of rows in a GPU step, and of its results. Needs no GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are defined

pytest.importorskip(
    "triton", reason="the kernels need Triton, which a CPU installation of torch does not bring"
)

from slipstream.engine.gpu.runner import _in_plan_order
from slipstream.engine.gpu.step_arrays import sort_rows
from slipstream.engine.plan import StepPlan
from slipstream.engine.sampler import Sampled


def plan_of(counts, samples, drafts):
    return StepPlan(
        step=1,
        rows=[10 + entry for entry in range(len(counts))],
        positions=[100 * entry for entry in range(len(counts))],
        counts=counts,
        samples=samples,
        drafts=drafts,
    )


def test_rows_with_one_new_token_come_first_and_keep_their_order():
    step = sort_rows(plan_of([5, 1, 3, 1], [True] * 4, [0] * 4))
    assert step.order == [1, 3, 0, 2]
    assert step.rows.tolist() == [11, 13, 10, 12]
    assert step.positions.tolist() == [100, 300, 0, 200]
    assert step.counts.tolist() == [1, 1, 5, 3]


def test_results_are_sorted_by_plan_entry_and_draft_token():
    plan = plan_of([5, 1, 3, 1], [True, True, True, False], [0, 0, 2, 0])
    # in the order of the step: entry 1, entry 0, then entry 2 with two draft tokens
    tokens = torch.tensor([11, 10, 20, 21, 22])
    top = [(0, torch.tensor([1]), torch.tensor([0.1])), (3, torch.tensor([2]), torch.tensor([0.2]))]
    sampled = Sampled(tokens, tokens.float(), tokens / 10, top, [(1, torch.tensor([5.0]))])
    found = _in_plan_order(sampled, sort_rows(plan).order, plan)
    assert found.tokens.tolist() == [10, 11, 20, 21, 22]
    assert found.best.tolist() == [10.0, 11.0, 20.0, 21.0, 22.0]
    assert found.log_probs is not None
    assert found.log_probs.tolist() == pytest.approx([1.0, 1.1, 2.0, 2.1, 2.2])
    assert [(index, ids.tolist()) for index, ids, _ in found.top] == [(1, [1]), (3, [2])]
    assert [(index, logits.tolist()) for index, logits in found.raw] == [(0, [5.0])]


def test_results_that_are_in_plan_order_are_returned_unchanged():
    plan = plan_of([1, 1, 4], [True, False, True], [0, 0, 1])
    sampled = Sampled(torch.tensor([1, 2, 3]), torch.zeros(3), None, [])
    assert _in_plan_order(sampled, sort_rows(plan).order, plan) is sampled

"""What the leading rank sends, what it does about failures, and how rows are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slipstream.engine.adapters.modules import rank_part
from slipstream.engine.plan import RowStart, StepFailed, StepPlan
from slipstream.engine.ranks.digests import ChangedRows
from slipstream.engine.ranks.leading import LeadingRunner, RankFailed
from slipstream.engine.ranks.orders import AdapterGone, AdapterHere, Leave, Order, RowDigests
from slipstream.engine.rows import Rows
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.adapter_layout import DOWN_PROJ, O_PROJ, QKV, UP_PROJ, Matrices
from slipstream.model.spec import ModelSpec

SPEC = ModelSpec("LlamaForCausalLM", 96, 64, 2, 8, 2, 8, 32, 128)


class Recorded:
    """Followers that record what they are sent, and a runner that records what it launches."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.answers: list[RowDigests] = []
        self.block_tokens = 16
        self.cache = torch.empty(0)
        self.rows = Rows(4, 32, 2)
        self.adapters = None
        self.host = None
        self.failure: Exception | None = None

    def send(self, order: Order, follower: int | None = None) -> None:
        self.events.append(("sent", order, follower))

    def receive_digests(self) -> list[RowDigests]:
        return self.answers

    def close(self) -> None:
        self.events.append("closed")

    def launch(self, plan: StepPlan) -> str:
        self.events.append(("launched", plan))
        if self.failure is not None:
            raise self.failure
        self.rows.apply(plan)
        return "step"


def plan_of(row: int, tokens: list[int], step: int = 1) -> StepPlan:
    start = RowStart(row, tokens, len(tokens), [3], SamplingParams())
    return StepPlan(
        step,
        starts=[start],
        rows=[row],
        epochs=[1],
        positions=[0],
        counts=[len(tokens)],
        samples=[True],
        drafts=[0],
    )


def test_a_plan_is_sent_before_it_is_launched():
    recorded = Recorded()
    leader = LeadingRunner(recorded, recorded)
    plan = plan_of(1, [5, 6])
    assert leader.launch(plan) == "step"
    assert recorded.events == [("sent", plan, None), ("launched", plan)]


def test_a_step_that_fails_on_one_rank_ends_the_engine():
    recorded = Recorded()
    recorded.failure = StepFailed("the GPU ran out of memory")
    with pytest.raises(RankFailed, match="the GPU ran out of memory"):
        LeadingRunner(recorded, recorded).launch(plan_of(0, [1]))


def test_adapters_go_to_the_follower_that_they_are_for():
    recorded = Recorded()
    leader = LeadingRunner(recorded, recorded)
    parts = [AdapterHere(7, 4, "float32", bytes([rank]), [], []) for rank in (1, 2)]
    leader.add_adapter(parts)
    leader.remove_adapter(7)
    leader.leave()
    assert recorded.events == [
        ("sent", parts[0], 0),
        ("sent", parts[1], 1),
        ("sent", AdapterGone(7), None),
        ("sent", Leave(), None),
        "closed",
    ]


@pytest.mark.parametrize("change", ["token", "block", "row"])
def test_a_follower_with_other_rows_is_named(change):
    leading = Recorded()
    follower = Recorded()
    leader = LeadingRunner(leading, leading)
    changed = ChangedRows(follower.rows)
    for row in (0, 2):
        plan = plan_of(row, [5, 6, 7])
        leader.launch(plan)
        follower.launch(plan)
        if not (change == "row" and row == 2):
            changed.note(plan)
    if change == "token":
        follower.rows.tokens[2, 1] = 9
    if change == "block":
        follower.rows.tables[2, 0] = 9
    leading.answers = [RowDigests(changed.take_digests())]
    with pytest.raises(RankFailed, match=r"^rank 1 holds other tokens than rank 0 \(row 2\)$"):
        leader.check_integrity()


def test_equal_rows_have_equal_digests_and_are_compared_once():
    leading = Recorded()
    follower = Recorded()
    leader = LeadingRunner(leading, leading)
    changed = ChangedRows(follower.rows)
    plan = plan_of(3, [5, 6, 7])
    leader.launch(plan)
    follower.launch(plan)
    changed.note(plan)
    found = changed.take_digests()
    assert list(found) == [3]
    leading.answers = [RowDigests(found)]
    leader.check_integrity()
    assert changed.take_digests() == {}
    leading.answers = [RowDigests({})]
    leader.check_integrity()


def matrices(linear: int, part: int, inputs: int, outputs: int) -> Matrices:
    first = np.arange(2 * inputs, dtype=np.float32).reshape(2, inputs)
    second = np.arange(2 * outputs, dtype=np.float32).reshape(2, outputs)
    return Matrices(0, linear, part, first, second)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("linear", "part", "inputs", "outputs"),
    [(QKV, 0, 64, 64), (O_PROJ, 0, 64, 64), (UP_PROJ, 1, 64, 32), (DOWN_PROJ, 0, 32, 64)],
)
def test_the_parts_of_an_adapter_are_the_whole(ranks, linear, part, inputs, outputs):
    whole = matrices(linear, part, inputs, outputs)
    parts = [rank_part(whole, SPEC, rank, ranks) for rank in range(ranks)]
    if linear in (O_PROJ, DOWN_PROJ):
        assert np.array_equal(np.concatenate([one.first for one in parts], axis=1), whole.first)
        assert all(np.array_equal(one.second, whole.second) for one in parts)
    else:
        assert np.array_equal(np.concatenate([one.second for one in parts], axis=1), whole.second)
        assert all(np.array_equal(one.first, whole.first) for one in parts)


def test_ranks_that_share_a_kv_head_have_the_same_part_of_an_adapter():
    whole = matrices(QKV, 1, 64, 16)  # 2 KV heads of 8
    parts = [rank_part(whole, SPEC, rank, 4).second for rank in range(4)]
    assert np.array_equal(parts[0], parts[1])
    assert np.array_equal(parts[2], parts[3])
    assert np.array_equal(np.concatenate([parts[0], parts[2]], axis=1), whole.second)

"""What ranks exchange, between three real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from slipstream.kernels.experts import mixture
from slipstream.kernels.normalisation import Norm, add_norm
from slipstream.kernels.ranks import ALONE

RANK = """
import sys
import torch
import torch.distributed as dist
from slipstream.kernels.normalisation import Norm, add_norm
from slipstream.kernels.torch_ranks import RanksDiffer, TorchRanks

rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
ranks = TorchRanks()
assert (ranks.rank, ranks.size) == (rank, size)
ranks.meet("the same")

torch.manual_seed(rank)
summed = ranks.sum(torch.randn(3, 5))
torch.manual_seed(0)
parts = []
for other in range(size):
    torch.manual_seed(other)
    parts.append(torch.randn(3, 5))
torch.testing.assert_close(summed, torch.stack(parts).sum(dim=0))
assert ranks.least(int(summed.view(torch.int32)[0, 0])) == int(summed.view(torch.int32)[0, 0])
strided = ranks.sum(torch.full((4, 6), rank + 1.0)[:, ::2])
assert strided.tolist() == [[6.0] * 3] * 4

norm = Norm(torch.rand(5), None, 1e-5)
hidden = torch.ones(3, 5)
expected = add_norm(torch.ones(3, 5), summed, norm)
torch.manual_seed(rank)
assert torch.equal(ranks.sum_add_norm(hidden, torch.randn(3, 5), norm, add_norm), expected)
assert torch.equal(hidden, 1 + summed)

torch.manual_seed(7)
whole = torch.randn(4, 8)
own = whole[:, rank * 3 : (rank + 1) * 3]
assert torch.equal(ranks.join(own, 3, 8), whole)
memory = torch.zeros(4, 8)
assert ranks.join(own, 3, 8, memory) is memory
assert torch.equal(memory, whole)
assert ranks.join(own[:0], 3, 8).shape == (0, 8)

whole[0, 7] = 9.0
whole[1, [2, 4, 7]] = 9.0  # equal values in all parts
whole[2, 5] = float("nan")
best, tokens = ranks.likeliest(whole[:, rank * 3 : (rank + 1) * 3], rank * 3)
assert best[:2].tolist() == [9.0, 9.0]
assert bool(best[2].isnan())
assert tokens.tolist() == [7, 2, 5, int(whole[3].argmax())]
assert float(best[3]) == float(whole[3].max())

torch.manual_seed(rank)
own = torch.randn(5, 7)
in_order = TorchRanks(batch_invariant=True)
total = in_order.sum(own.clone())
assert torch.equal(total[2:3], in_order.sum(own[2:3]))
torch.testing.assert_close(total, ranks.sum(own))
assert ranks.least(10 - rank) == 8
try:
    ranks.meet(f"torch {rank}")
except RanksDiffer as error:
    assert "rank 0 has torch 0, rank 1 has torch 1" in str(error)
else:
    raise AssertionError("different descriptions were accepted")
ranks.meet()
dist.destroy_process_group()
"""


def test_three_processes_exchange_the_same_bits(tmp_path: Path):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "3", str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0, 0], "\n".join(errors)


def test_one_rank_changes_nothing():
    y = torch.randn(2, 3)
    assert ALONE.sum(y) is y
    assert ALONE.join(y, 3, 3) is y
    assert ALONE.least(5) == 5
    best, tokens = ALONE.likeliest(y, 10)
    assert torch.equal(best, y.max(dim=-1).values)
    assert torch.equal(tokens, y.argmax(dim=-1) + 10)
    norm = Norm(torch.ones(3), None, 1e-5)
    assert torch.equal(
        ALONE.sum_add_norm(torch.zeros(2, 3), y, norm, add_norm),
        add_norm(torch.zeros(2, 3), y, norm),
    )
    ALONE.meet("anything")


def test_experts_of_two_ranks_add_up():
    torch.manual_seed(3)
    matrices = torch.randn(6, 4, 4)
    experts = [lambda x, matrix=matrix: x @ matrix for matrix in matrices]
    x = torch.randn(5, 4)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2], [5, 0], [3, 1]])
    weights = torch.rand(5, 2)
    whole = mixture(x, chosen, weights, experts)
    parts = [mixture(x, chosen, weights, experts[first : first + 3], first) for first in (0, 3)]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    # no token of these chose one of the last experts
    assert not mixture(x[:3], chosen[:3], weights[:3], experts[3:], 3).any()

"""The number of logits that a large step computes, and the memory they are written to."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are defined

pytest.importorskip(
    "triton", reason="the kernels need Triton, which a CPU installation of torch does not bring"
)

from slipstream.engine.gpu.graphs import DecodeGraphs
from slipstream.engine.gpu.runner import GpuRunner


def runner_of(sizes, logits):
    graphs = SimpleNamespace(_graphs=dict.fromkeys(sizes), logits=logits)
    graphs.captured_size = lambda rows: DecodeGraphs.captured_size(graphs, rows)
    return SimpleNamespace(graphs=graphs)


@pytest.mark.parametrize(
    ("wanted", "padded"),
    [
        ([5], [5]),
        ([5, 9, 11], [5, 9, 11, 0]),
        (list(range(8)), list(range(8))),
        (list(range(9)), list(range(9))),
        ([], []),
    ],
)
def test_number_of_logits_is_rounded_up_to_a_captured_size(wanted, padded):
    runner = runner_of([1, 2, 4, 8], None)
    assert GpuRunner._pad_logit_tokens(runner, np.array(wanted, dtype=np.int64)).tolist() == padded


def test_logits_use_the_memory_of_the_graphs_if_they_fit():
    place = torch.zeros(4, 3)
    assert GpuRunner._static_logits(runner_of([4], place), 2).data_ptr() == place.data_ptr()
    assert GpuRunner._static_logits(runner_of([4], place), 2).shape == (2, 3)
    assert GpuRunner._static_logits(runner_of([4], place), 5) is None
    assert GpuRunner._static_logits(runner_of([], None), 2) is None

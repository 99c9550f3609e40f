"""Two ranks on one GPU generate the tokens of one rank: NCCL inside CUDA graphs.

    pytest -m gpu tests/engine/test_ranks_gpu.py

With NVIDIA's MPS the ranks run at the same time; without it the GPU switches between them, and a
sum takes milliseconds.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from rank_models import build_rank_engine, save_rank_model
from rank_runs import run_alone, run_ranks

pytestmark = pytest.mark.gpu

RUNS = {
    "llama": ["greedy", "sampled", "penalties", "beams", "scores", "preempted", "host", "lookup"],
    "qwen2_moe": ["greedy", "sampled"],  # whole experts, and a shared one
    "gptj": ["greedy"],  # parallel residual
    "gemma2": ["greedy"],  # output norms and soft caps
    "gemma": ["greedy"],  # one KV head
}
CASES = [(family, kind) for family, kinds in RUNS.items() for kind in kinds]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("engines")
    for family in RUNS:
        save_rank_model(family, folder / f"{family}-model")
        build_rank_engine(folder / f"{family}-model", folder / family)
    return {family: str(folder / family) for family in RUNS}


@pytest.fixture(scope="module")
def two_ranks(engines) -> dict:
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))  # a short path, as sockets need it
    cases = [(f"{family}: {kind}", engines[family], kind) for family, kind in CASES]
    try:
        return run_ranks(2, cases, folder, "cuda")
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_two_ranks_on_a_gpu_generate_the_tokens_of_one(two_ranks, engines, family, kind):
    found = two_ranks[f"{family}: {kind}"]
    expected = run_alone(engines[family], kind, "cuda")
    assert found["tokens"] == expected["tokens"]
    assert found["beams"] == expected["beams"]
    assert found["reasons"] == expected["reasons"]
    assert found["ranks"] == 2
    assert found["weight_bytes"] < expected["weight_bytes"]
    for name, values in expected["numbers"].items():
        assert found["numbers"][name] == pytest.approx(values, rel=1e-2, abs=1e-2), name
    assert "problem" not in found, found.get("problem")  # the digests of both ranks are equal

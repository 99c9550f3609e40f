"""Kernels fit into GPUs other than the one they were tuned on: compiled for them without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "kernel_resources.py"
ROOT = Path(__file__).parents[2]
MANY_TOKENS = ROOT / "slipstream/kernels/gpu/gated_gemm.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "shared_bytes"),
    [(80, 166_912), (86, 101_376), (89, 101_376), (90, 232_448), (100, 232_448), (120, 101_376)],
)
def test_kernels_fit_into_shared_memory(architecture, shared_bytes):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(SCRIPT), str(architecture), str(shared_bytes)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    built = [line.rsplit(" ", 1) for line in ended.stdout.splitlines()]
    assert len(built) >= 45
    assert [line for line, taken in built if int(taken) > shared_bytes] == []
    if architecture == 90:  # the only one it is for
        (taken,) = (int(taken) for line, taken in built if line.startswith("_gated_gemm "))
        assert f"_SHARED_BYTES = {taken:_} " in MANY_TOKENS.read_text()

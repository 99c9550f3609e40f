"""Checkpoints that the libraries for quantisation write: an engine has the weights as the library
expands them.
"""

from __future__ import annotations

import os
import site
import subprocess
from pathlib import Path

import pytest
import torch
from client_environment import environment
from run_engine import logits_of
from tiny_models import config_of, folder_tensors, random_model

from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import read_engine_folder

pytestmark = pytest.mark.clients

SCRIPT = Path(__file__).parent / "scripts" / "write_quantised.py"
# torch and transformers are those of this environment
REQUIREMENTS = {
    "compressed-tensors": ("compressed-tensors==0.20.0", "loguru"),
    "bitsandbytes": ("bitsandbytes==0.50.2", "psutil"),
    "autoawq": ("autoawq==0.2.9",),
    "modelopt": (
        "nvidia-modelopt==0.47.0",
        "nvidia-ml-py",
        "omegaconf",
        "antlr4-python3-runtime==4.9.*",
        "pulp<4",
        "scipy",
        "pydantic",
        "pydantic-core",
        "typing-inspection",
        "annotated-types",
        "ninja",
    ),
    "autoround": (
        "auto-round==0.16.1",
        "py-cpuinfo",
        "datasets",
        "pyarrow",
        "dill",
        "multiprocess",
        "xxhash",
        "pandas",
        "python-dateutil",
        "pydantic",
        "pydantic-core",
        "typing-inspection",
        "annotated-types",
    ),
    "transformers": ("packaging",),
}
TOKENS = [[3, 1, 41, 59, 26, 5, 35]]


def write(folder: Path, model: str, library: str) -> list[Path]:
    """Return a folder for each format of a library."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    options = {"n_embd": 128} if model == "gpt2" else sizes
    random_model(config_of(model, **options)).save_pretrained(folder / "plain")
    python = environment(library, ("--no-deps", *REQUIREMENTS[library]))
    path = os.pathsep.join(site.getsitepackages())
    finished = subprocess.run(
        [python, SCRIPT, folder / "plain", folder / "written", library],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return sorted((folder / "written").iterdir())


def assert_read_as_meant(written: Path) -> None:
    spec, tensors = folder_tensors(written / "quantised")
    _, meant = folder_tensors(written / "meant")
    _, plain = folder_tensors(written.parents[1] / "plain")
    assert tensors.keys() == meant.keys()
    # AutoAWQ expands in float16, AutoRound in bfloat16
    close = 2**-8 if written.name.startswith("autoround") else 1e-3
    for parameter, tensor in tensors.items():
        torch.testing.assert_close(tensor.float(), meant[parameter].float(), rtol=close, atol=1e-6)
    weight = "transformer.layers.1.mlp.proj.weight"
    assert (tensors[weight] - plain[weight]).abs().max() > 1e-4
    assert_kept(written, max(close, 2**-9))
    (ours,) = logits_of(spec, tensors, torch.float32, TOKENS)
    (expected,) = logits_of(spec, meant, torch.float32, TOKENS)
    assert (ours - expected).abs().max() < 2 * close * float(expected.abs().max())


# the form in which an engine keeps the bits; other formats are expanded
FORMS = {
    "w4a16": "Q4_0",
    "w4a16-channel": "Q4_0",
    "w4a16-zeros": "Q4_1",
    "usual": "Q4_1",
    "autoround": "Q4_0",
    "autoround-zeros": "Q4_1",
    "w8a16": "Q8_0",
    "w8a8": "Q8_0",
    "w8a8-group": "Q8_0",
    "int8": "Q8_0",
}


KEPT_FP8 = {"fp8-tensor", "fp8-channel", "hf-fp8-tensor", "modelopt-fp8", "modelopt-fp8-channel"}


def assert_kept(written: Path, close: float) -> None:
    folder = build_engine(written / "quantised", written / "engine", dtype="auto")
    engine = read_engine_folder(folder)
    stored = engine.quantisation.stored
    kept_fp8 = written.name in KEPT_FP8
    assert engine.quantisation.algorithm == ("FP8" if kept_fp8 else "GGUF" if stored else None)
    assert {part.form for parts in stored.values() for part in parts} == (
        {FORMS[written.name]} if written.name in FORMS else set()
    )
    _, meant = folder_tensors(written / "meant")
    for name, tensor in engine.tensors(dtype=torch.float32).items():
        if name in stored and name in meant:
            largest = close * float(meant[name].abs().max())
            assert float((tensor - meant[name]).abs().max()) <= largest, name


@pytest.mark.parametrize(
    ("library", "count"),
    [
        ("compressed-tensors", 11),
        ("bitsandbytes", 4),
        ("autoawq", 1),
        ("modelopt", 2),
        ("autoround", 2),
        ("transformers", 2),
    ],
)
def test_what_a_library_writes_is_read(tmp_path: Path, library: str, count: int) -> None:
    written = write(tmp_path, "llama", library)
    assert len(written) == count
    for folder in written:
        assert_read_as_meant(folder)


def test_layers_that_store_inputs_by_outputs(tmp_path: Path) -> None:
    for folder in write(tmp_path, "gpt2", "bitsandbytes"):
        assert_read_as_meant(folder)

"""A repository with ensembles over two models, and what loads and unloads do to them.

`ens` uses `a` and `b`; `outer` uses `ens` and `a`. The states are those of Triton 2.51, which
`test_live_lifecycle.py` compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_TENSORS = """
input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
_STEP = """{ model_name: "%s" model_version: -1
  input_map { key: "text_input" value: "%s" }
  output_map { key: "text_output" value: "%s" } }"""
CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
        return responses
"""
BROKEN = "raise RuntimeError('broken')\n"


def write_repository(folder: Path) -> Path:
    for name in ("a", "b"):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(CODE)
        text = f'name: "{name}"\nbackend: "python"\ninstance_group [ {{ kind: KIND_CPU }} ]\n'
        (folder / name / "config.pbtxt").write_text(text + _TENSORS)
    for name, first, second in (("ens", "a", "b"), ("outer", "ens", "a")):
        (folder / name / "1").mkdir(parents=True)
        steps = [_STEP % (first, "text_input", "mid"), _STEP % (second, "mid", "text_output")]
        scheduling = "ensemble_scheduling { step [ " + ", ".join(steps) + " ] }\n"
        text = f'name: "{name}"\nplatform: "ensemble"\n'
        (folder / name / "config.pbtxt").write_text(text + _TENSORS + scheduling)
    return folder


class Step(NamedTuple):
    """A request, and the models that serve after it."""

    action: str  # load, unload, unload with dependents; break and repair change the code of `a`
    model: str
    ready: str


# Each scenario begins with nothing loaded.
SCENARIOS: dict[str, tuple[Step, ...]] = {
    "an ensemble loads its models": (Step("load", "ens", "a b ens"),),
    "a model brings back the ensembles that use it": (
        Step("load", "ens", "a b ens"),
        Step("unload", "a", "b"),
        Step("load", "b", "b"),
        Step("load", "a", "a b ens"),
    ),
    "ensembles of ensembles come back, too": (
        Step("load", "outer", "a b ens outer"),
        Step("unload", "a", "b"),
        Step("load", "a", "a b ens outer"),
        Step("unload", "ens", "a b"),
        Step("load", "a", "a b"),
        Step("load", "ens", "a b ens outer"),
    ),
    "an ensemble that was unloaded by name stays unloaded": (
        Step("load", "ens", "a b ens"),
        Step("unload", "ens", "a b"),
        Step("load", "a", "a b"),
        Step("unload", "a", "b"),
        Step("load", "a", "a b"),
        Step("load", "ens", "a b ens"),
    ),
    "dependents are unloaded unless they were loaded by name": (
        Step("load", "ens", "a b ens"),
        Step("unload with dependents", "ens", ""),
        Step("load", "a", "a"),
        Step("load", "ens", "a b ens"),
        Step("unload with dependents", "ens", "a"),
    ),
    "dependents of a nested ensemble": (
        Step("load", "outer", "a b ens outer"),
        Step("unload", "ens", "a b"),
        Step("load", "ens", "a b ens outer"),
        Step("unload with dependents", "outer", "a b ens"),
        Step("unload with dependents", "a", "b"),
        Step("load", "a", "a b ens"),
    ),
    "a model that serves already is not loaded by name": (
        Step("load", "outer", "a b ens outer"),
        Step("load", "ens", "a b ens outer"),
        Step("unload with dependents", "outer", ""),
    ),
    "a failed model keeps its ensembles away until it loads": (
        Step("load", "ens", "a b ens"),
        Step("unload", "a", "b"),
        Step("break", "a", "b"),
        Step("load", "a", "b"),
        Step("load", "ens", "b"),
        Step("repair", "a", "b"),
        Step("load", "a", "a b ens"),
    ),
    "an ensemble that failed to load comes with the model that it waits for": (
        Step("break", "a", ""),
        Step("load", "ens", "b"),
        Step("load", "outer", "b"),
        Step("repair", "a", "b"),
        Step("load", "a", "a b ens outer"),
    ),
    "a reload that fails changes nothing": (
        Step("load", "ens", "a b ens"),
        Step("break", "a", "a b ens"),
        Step("load", "a", "a b ens"),
        Step("load", "ens", "a b ens"),
        Step("repair", "a", "a b ens"),
        Step("load", "a", "a b ens"),
    ),
}

"""Check a repository without loading weights.

The check reports every problem that the server would find. It also compares each model with the
template of the release that the repository resembles most. It warns about tensors and parameters
that only one of the two has, and about types that differ. These are only warnings, because a
repository may leave things out on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.repository.config import ModelConfig
from slipstream.repository.models import RepositoryModel, inspect_repository
from slipstream.repository.pbtxt import parse_pbtxt
from slipstream.repository.problems import Problems, did_you_mean
from slipstream.repository.releases.render import render_template
from slipstream.repository.releases.tables import RELEASES, REPOSITORIES, list_models
from slipstream.repository.roles import Role
from slipstream.repository.schema import FileReading
from slipstream.repository.templates import FIXED_NAMES, template, template_names

_TEMPLATES = {
    Role.PREPROCESSING: "preprocessing",
    Role.ENGINE: "tensorrt_llm",
    Role.POSTPROCESSING: "postprocessing",
    Role.ENSEMBLE: "ensemble",
    Role.BLS: "tensorrt_llm_bls",
}
# Kind and release of the repositories that `slipstream import` writes.
_IMPORTED = ("imported", "those of slipstream import")
_INDEX = re.compile(r"\[(\d+)\]")
_DOT = re.compile(r"\.")
_STEP_MAP_PATH = re.compile(r"ensemble_scheduling\.step\.[^.]+(\.(input_map|output_map))?")
_TENSOR_SETTING_PATH = re.compile(
    r"(input|output)\.[^.]+\.(data_type|dims|optional|allow_ragged_batch|reshape\.shape)"
)
# An input that only this server has. Repositories may or may not declare it.
_OUR_OWN = re.compile(r"(.*\.)?(messages|MESSAGES)(\..*)?")
_FIXED_TEXT = re.compile(r"platform|backend|ensemble_scheduling\.step\..*|instance_group\.0\.kind")


@dataclass(frozen=True)
class _Shape:
    """A configuration by path, with names in place of list indexes: "input.end_id.dims"."""

    lines: Mapping[str, int]
    values: Mapping[str, Any]


def check_repository(path: str | Path) -> Problems:
    """Return every problem of a repository, fatal problems first."""
    repository, problems = inspect_repository(path)
    known = {
        name: template
        for name, model in repository.models.items()
        if (template := _template_name(model))
    }
    shapes = {
        name: _paths(repository.models[name].config, template) for name, template in known.items()
    }
    if known:
        kind, release = find_nearest_release([(known[name], shapes[name]) for name in known])
        for name, template in known.items():
            _compare(
                repository.models[name].config, shapes[name], (kind, release, template), problems
            )
    return problems


def _template_name(model: RepositoryModel) -> str | None:
    """Return the template to compare a model with, or None.

    The role decides. A model without a role may be a damaged copy of a template, so its folder's
    name is tried too.
    """
    named = model.name if model.name in _TEMPLATES.values() else None
    return _TEMPLATES.get(model.role, named)


def find_nearest_release(models: list[tuple[str, _Shape]]) -> tuple[str, str]:
    """Return the kind and release whose templates differ least from these models.

    `models` are pairs of a template's name and a model's shape.
    """

    def distance(candidate: tuple[str, str]) -> int:
        return sum(_distance(shape, _template(*candidate, name)) for name, shape in models)

    candidates = [(kind, release) for kind in REPOSITORIES for release in reversed(RELEASES)]
    return min([*candidates, _IMPORTED], key=distance)


def _distance(ours: _Shape, theirs: _Shape | None) -> int:
    if theirs is None:
        return len(ours.lines)
    differing = sum(
        1
        for path in ours.lines.keys() & theirs.lines.keys()
        if _TENSOR_SETTING_PATH.fullmatch(path) and ours.values.get(path) != theirs.values.get(path)
    )
    return len(ours.lines.keys() ^ theirs.lines.keys()) + differing


def _compare(
    config: ModelConfig, ours: _Shape, wanted: tuple[str, str, str], problems: Problems
) -> None:
    expected = _template(*wanted)
    release = wanted[1]
    file = config.file
    if expected is None:
        return
    missing = _drop_nested(path for path in expected.lines if path not in ours.lines)
    extra = _drop_nested(path for path in ours.lines if path not in expected.lines)
    for path in missing:
        text = f"is missing; repositories like {release} have it"
        problems.warn(file, _nearest_line(ours, path), path, text + _suggest_name(path, extra))
    for path in extra:
        # read_parameters has already reported unknown parameters
        if _is_named(path) and not path.startswith("parameters."):
            hint = _suggest_name(path, missing) if problems.keeps_warnings(str(file)) else ""
            text = f"repositories like {release} do not have it{hint}"
            problems.warn(file, ours.lines[path], path, text)
    for path in ours.lines.keys() & expected.lines.keys():
        _compare_value(path, ours, expected, config, release, problems)


def _compare_value(
    path: str,
    ours: _Shape,
    expected: _Shape,
    config: ModelConfig,
    release: str,
    problems: Problems,
) -> None:
    compared = _TENSOR_SETTING_PATH.fullmatch(path) or _FIXED_TEXT.fullmatch(path)
    if not compared or _STEP_MAP_PATH.fullmatch(path):
        return  # the entries of a step's maps are compared one by one
    value = ours.values.get(path)
    wanted = expected.values.get(path)
    if value != wanted and not _is_variable(wanted):
        text = (
            f"is {_format_value(value)}, "
            f"where repositories like {release} have {_format_value(wanted)}"
        )
        problems.warn(config.file, ours.lines[path], path, text)


def _is_variable(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${")


def _format_value(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) and not value.startswith("TYPE_") else str(value)


def _drop_nested(paths: Iterable[str]) -> list[str]:
    """Return the paths without those below another path of the list."""
    chosen: dict[str, None] = {}
    for path in sorted(set(paths)):  # a path comes after those that it is nested in
        ends = (match.start() for match in _DOT.finditer(path))
        if not any(path[:end] in chosen for end in ends):
            chosen[path] = None
    return list(chosen)


def _is_named(path: str) -> bool:
    return path.startswith(("input.", "output.", "ensemble_scheduling."))


def _suggest_name(path: str, others: list[str]) -> str:
    """Return "; did you mean …?" with the closest of `others` in the same message, or ""."""
    place, _, name = path.rpartition(".")
    return did_you_mean(
        name, [other.rpartition(".")[2] for other in others if other.rpartition(".")[0] == place]
    )


def _nearest_line(shape: _Shape, path: str) -> int:
    """Return the line of the message that should hold `path`, or of a field in that message."""
    while path:
        path = path.rpartition(".")[0]
        if path in shape.lines:
            return shape.lines[path]
        if not path:
            break
        inside = [line for other, line in shape.lines.items() if other.startswith(f"{path}.")]
        if inside:
            return min(inside)
    return 1


@cache
def _template(kind: str, release: str, name: str) -> _Shape | None:
    names = template_names() if kind == _IMPORTED[0] else list_models(kind, release)
    if name not in names:
        return None
    text = template(name) if kind == _IMPORTED[0] else render_template(kind, name, release)
    reading = FileReading(name, Problems())
    document = reading.message("ModelConfig", parse_pbtxt(text))
    shape = _shape(document, reading.lines)
    variable = {_resolve_path(document, path)[0] for path in reading.unfilled}
    return _Shape(
        shape.lines,
        {path: "${}" if path in variable else value for path, value in shape.values.items()},
    )


def _paths(config: ModelConfig, template: str) -> _Shape:
    return _shape(_with_fixed_names(config, template), config.lines)


def _with_fixed_names(config: ModelConfig, template: str) -> dict[str, Any]:
    """Return a configuration whose steps have the names that the first model's steps have.

    The helpers of further models of `slipstream import` are named after their model: those of
    `gpt2-ensemble` are `gpt2-preprocessing` and so on.
    """
    document = dict(config.document)
    owner, _, helper = config.name.rpartition(f"-{template}")
    if helper or not owner or "ensemble_scheduling" not in document:
        return document
    scheduling = document["ensemble_scheduling"]
    steps = []
    for step in scheduling.get("step", []):
        name = str(step.get("model_name")).removeprefix(f"{owner}-")
        steps.append({**step, "model_name": name} if name in FIXED_NAMES else step)
    return {**document, "ensemble_scheduling": {**scheduling, "step": steps}}


def _shape(document: Mapping[str, Any], lines: Mapping[str, int]) -> _Shape:
    named_lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    for path, line in lines.items():
        named, value = _resolve_path(document, path)
        if named is not None and not _INDEX.search(named) and not _OUR_OWN.fullmatch(named):
            named_lines.setdefault(named, line)
            values[named] = value
    return _Shape(named_lines, values | _name_by_source(document, values))


def _name_by_source(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors inside an ensemble under the step output that they come from.

    Each ensemble chooses its own names for them, so the names themselves cannot be compared.
    """
    outside = {
        tensor["name"]
        for kind in ("input", "output")
        for tensor in document.get(kind, [])
        if "name" in tensor
    }
    sources = {
        name: f"{step.get('model_name')}.{tensor}"
        for step in document.get("ensemble_scheduling", {}).get("step", [])
        for tensor, name in step.get("output_map", {}).items()
        if name not in outside
    }
    return {
        path: sources[value]
        for path, value in values.items()
        if path.startswith("ensemble_scheduling.step.")
        and isinstance(value, str)
        and value in sources
    }


def _resolve_path(document: Mapping[str, Any], path: str) -> tuple[str | None, Any]:
    """Return a reader's path with names in place of indexes, and the value at that path.

    An item of a list of scalars resolves to the whole list.
    """
    value: Any = document
    names: list[str] = []
    for part in re.split(r"\.(?![^\[\]]*\])", path):
        name, *indexes = re.split(r"[\[\]]+", part.rstrip("]"))
        if not isinstance(value, Mapping) or name not in value:
            return ".".join([*names, part]), None
        value = value[name]
        names.append(name)
        for index in indexes:
            position = int(index)
            if (
                not isinstance(value, list)
                or position >= len(value)
                or not isinstance(value[position], Mapping)
            ):
                return ".".join(names), value
            value = value[position]
            names.append(str(value.get("name") or value.get("model_name") or position))
    return ".".join(names), value

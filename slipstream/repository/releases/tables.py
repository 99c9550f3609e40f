"""Read the tables of releases: the tensors and parameters of each model in each release."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from slipstream.repository.releases import gpt, inflight_batcher_llm

RELEASES = ("2023-09", "v0.5", "2024-01", "v0.9", "v0.10", "v0.18")
REPOSITORIES = {
    "inflight_batcher_llm": (
        "preprocessing",
        "tensorrt_llm",
        "postprocessing",
        "ensemble",
        "tensorrt_llm_bls",
    ),
    "gpt": ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble"),
}
# Release without a table of its own → the release whose table it shares.
_SAME_AS = {
    "v0.6": "v0.5",
    "v0.7": "2024-01",
    "v0.8": "2024-01",
    **{f"v0.{n}": "v0.10" for n in range(11, 14)},
    **{f"v0.{n}": "v0.18" for n in (14, 15, 16, 17, 19)},
}
_TABLES = {"inflight_batcher_llm": inflight_batcher_llm.TABLE, "gpt": gpt.TABLE}
_TENSOR = re.compile(r"(?P<type>[^\[]+)\[(?P<dims>[-\d,]+)\](?:/(?P<marks>[org]+))?")

_Row = tuple[str, list[str]]  # name, one cell per release


@dataclass(frozen=True)
class Tensor:
    name: str
    data_type: str  # type such as "INT32", or a template variable for the type
    dims: tuple[int, ...]
    optional: bool = False
    scalar: bool = False
    ragged: bool = False


@dataclass(frozen=True)
class ModelTable:
    """One model of one release."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: tuple[tuple[str, str], ...]

    @property
    def input_names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.inputs)

    @property
    def output_names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.outputs)


def find_release(text: str) -> str:
    """Return the release of RELEASES whose templates `text` (such as v0.11 or 0.10.0) shares."""
    name = text if text.startswith(("v", "20")) else f"v{text}"
    name = ".".join(name.split(".")[:2])
    name = _SAME_AS.get(name, name)
    if name not in RELEASES:
        raise ValueError(
            f"'{text}' is not a known release; "
            f"known: {', '.join(RELEASES)}, and the releases between them"
        )
    return name


def list_models(repository: str, release: str) -> tuple[str, ...]:
    """Return the models of `all_models/<repository>` in a release."""
    return tuple(
        model for model in REPOSITORIES[repository] if read_model(repository, model, release).inputs
    )


def read_model(repository: str, model: str, release: str) -> ModelTable:
    """Return the tensors and parameters of one model in a release."""
    sections = _sections(repository)[model]
    column = RELEASES.index(release)
    return ModelTable(
        inputs=tuple(_tensor(*cell) for cell in _column(sections.get("input", []), column)),
        outputs=tuple(_tensor(*cell) for cell in _column(sections.get("output", []), column)),
        parameters=tuple(_column(sections.get("parameter", []), column)),
    )


def _column(rows: list[_Row], column: int) -> list[tuple[str, str]]:
    """Return (name, cell) of the rows that are present in a column."""
    return [(name, cells[column]) for name, cells in rows if cells[column] != "-"]


@cache
def _sections(repository: str) -> dict[str, dict[str, list[_Row]]]:
    """Return the rows of each model by kind: "input", "output" or "parameter"."""
    sections: dict[str, dict[str, list[_Row]]] = {}
    rows: list[_Row] = []
    for line in _TABLES[repository].split("\n"):
        if line.startswith("["):
            model, kind = line.strip("[]").split()
            rows = sections.setdefault(model, {}).setdefault(kind, [])
        elif line:
            name, *cells = line.split()
            for position, cell in enumerate(cells):
                cells[position] = cells[position - 1] if cell == "=" else cell
            assert len(cells) == len(RELEASES), line
            rows.append((name, cells))
    return sections


def _tensor(name: str, cell: str) -> Tensor:
    match = _TENSOR.fullmatch(cell)
    assert match is not None, (name, cell)
    marks = match["marks"] or ""
    dims = tuple(int(size) for size in match["dims"].split(","))
    return Tensor(name, match["type"], dims, "o" in marks, "r" in marks, "g" in marks)

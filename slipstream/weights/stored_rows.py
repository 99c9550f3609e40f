"""Matrices that a build copies from the model's file as they are. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

from slipstream.model.families.family import Recipe
from slipstream.weights.parameters import (
    E4M3_FORM,
    PLAIN_FORMS,
    EngineParameter,
    Quantisation,
    StoredRows,
    engine_parameters,
    part_name,
    scales_name,
)
from slipstream.weights.sources.source import Source, StoredMatrices

_SCALE_BYTES = 4  # at the end of a row of E4M3_FORM


class _Piece(NamedTuple):
    """Consecutive rows of a parameter that come from one tensor of the source."""

    form: str
    rows: int
    read: Callable[[], np.ndarray]  # → uint8 [rows, row bytes]


def keep_as_stored(source: Source, quantisation: Quantisation) -> Quantisation:
    """Return the quantisation of an engine that keeps the matrices of the source as they are; the
    same as before if the source has none in blocks or in FP8.
    """
    if source.stored is None:
        return quantisation
    if source.stored.forms() and set(source.stored.forms().values()) == {E4M3_FORM}:
        return _keep_fp8(source, quantisation)
    stored = {
        parameter.name: parts
        for parameter in engine_parameters(source.spec, quantisation)
        if (parts := _describe(source, source.stored, parameter))
    }
    if not stored:
        return quantisation
    return Quantisation("GGUF", kv_cache=quantisation.kv_cache, stored=stored)


def _keep_fp8(source: Source, quantisation: Quantisation) -> Quantisation:
    """Return the quantisation with all linear layers in FP8 that the source has in it."""
    fp8 = Quantisation("FP8", kv_cache=quantisation.kv_cache)
    linears = [one for one in engine_parameters(source.spec, fp8) if one.bits]
    others = [one.name.removesuffix(".weight") for one in linears if not has_fp8(source, one)]
    return quantisation if len(others) == len(linears) else replace(fp8, excluded=tuple(others))


def keeps_fp8(source: Source, quantisation: Quantisation) -> bool:
    """Return whether an engine keeps FP8 matrices of the source."""
    if quantisation.algorithm != "FP8" or source.stored is None:
        return False
    return E4M3_FORM in source.stored.forms().values()


def has_fp8(source: Source, parameter: EngineParameter) -> bool:
    """Return whether the source has all rows of a parameter in FP8, with a scale each."""
    if source.stored is None:
        return False
    forms = source.stored.forms()
    for part in parameter.parts:
        recipe = source.recipe(part)
        in_fp8 = all(forms.get(name) == E4M3_FORM for name in recipe.sources)
        if not in_fp8 or not _keeps_rows(recipe):
            return False
    return True


def fp8_pieces(source: Source, parameter: EngineParameter) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (tensor name, part of the tensor) of a parameter that the source has in FP8. Rows of a
    fused matrix keep the scales of their own tensors.
    """
    assert source.stored is not None
    scales = []
    for piece in _pieces(source, source.stored, parameter):
        rows = piece.read()
        scales.append(rows[:, -_SCALE_BYTES:])
        yield parameter.name, rows[:, :-_SCALE_BYTES]
    yield scales_name(parameter.name), np.concatenate(scales)


def stored_pieces(
    source: Source, parameter: EngineParameter, parts: tuple[StoredRows, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (tensor name, rows as stored) of a parameter with these parts, in order."""
    assert source.stored is not None
    pieces = iter(_pieces(source, source.stored, parameter))
    for index, part in enumerate(parts):
        name = parameter.name if part.form in PLAIN_FORMS else part_name(parameter.name, index)
        remaining = part.rows
        while remaining > 0:
            piece = next(pieces)
            remaining -= piece.rows
            yield name, piece.read()


def _describe(
    source: Source, stored: StoredMatrices, parameter: EngineParameter
) -> tuple[StoredRows, ...]:
    """Return the parts of a parameter as stored; () if the build has to convert it."""
    forms = {name for name, form in stored.forms().items() if form != E4M3_FORM}
    recipes = [source.recipe(part) for part in parameter.parts]
    if any(not _keeps_rows(recipe) or not forms >= set(recipe.sources) for recipe in recipes):
        return ()
    parts = []
    for form, pieces in groupby(_pieces(source, stored, parameter), lambda piece: piece.form):
        parts.append(StoredRows(form, sum(piece.rows for piece in pieces)))
    plain = any(part.form in PLAIN_FORMS for part in parts)
    return () if plain and len(parts) > 1 else tuple(parts)


def _keeps_rows(recipe: Recipe) -> bool:
    """Return whether the rows of a parameter are rows of its sources."""
    return not (recipe.transposed or recipe.stacked or recipe.flat or recipe.unit_rows)


def _pieces(source: Source, stored: StoredMatrices, parameter: EngineParameter) -> Iterator[_Piece]:
    forms = stored.forms()
    shapes = source.shapes()
    for part in parameter.parts:
        recipe = source.recipe(part)
        rows = [shapes[name][0] for name in recipe.sources]
        if recipe.rows is None:
            for name, count in zip(recipe.sources, rows, strict=True):
                yield _Piece(forms[name], count, partial(stored.read_stored, name))
            continue
        order = np.array(recipe.rows())
        ends = np.cumsum(rows)
        source_of = np.searchsorted(ends, order, side="right")
        for run in np.split(order, np.flatnonzero(np.diff(source_of)) + 1):
            index = int(np.searchsorted(ends, run[0], side="right"))
            name = recipe.sources[index]
            own = run - (ends[index] - rows[index])
            yield _Piece(forms[name], len(own), partial(_read_rows, stored, name, own))


def _read_rows(stored: StoredMatrices, name: str, rows: np.ndarray) -> np.ndarray:
    chosen: np.ndarray = stored.read_stored(name)[rows]
    return chosen

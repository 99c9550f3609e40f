"""The table of request fields is consistent with everything that is derived from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slipstream.engine.sampling_params import SamplingParams
from slipstream.offline.sampling_params import SamplingParams as SamplingOptions
from slipstream.request_fields import markdown
from slipstream.request_fields.field import BEAM_SEARCH, DRAFT_MODEL, Range
from slipstream.request_fields.table import (
    BLS_INPUTS,
    BY_PARAMETER,
    COPIED,
    ENGINE_FIELDS,
    FIELDS,
    GROUPS,
    PREPROCESSING_FIELDS,
    conflicting_parameter,
    number_range,
)
from slipstream.server.openai.fields import ChatFields, CompletionFields

DOCS = Path(__file__).parents[2] / "docs"


def test_documentation_page_is_generated_from_the_table() -> None:
    written = (DOCS / "request-fields.md").read_text(encoding="utf-8")
    assert written == markdown.page(), "to update the page, run: python docs/generate.py"


def test_cells_of_the_documentation_page_are_short() -> None:
    rows = [line for line in markdown.page().splitlines() if line.startswith("|")]
    assert max(len(cell.strip()) for row in rows for cell in row.split("|")) <= 100


def test_every_name_means_one_field() -> None:
    assert len(FIELDS) == sum(len(group) for group in GROUPS.values())
    for attribute in ("openai", "llm", "engine", "preprocessing"):
        names = [name for field in FIELDS.values() if (name := getattr(field, attribute))]
        assert len(names) == len(set(names)), attribute
    names = [name for field in FIELDS.values() for name in (field.name, *field.aliases)]
    assert len(names) == len(set(names))


def test_parameters_are_attributes_of_the_sampling_parameters() -> None:
    attributes = {attribute.name for attribute in dataclasses.fields(SamplingParams)}
    assert {field.parameter for field in FIELDS.values() if field.parameter} <= attributes
    parameters = [field.parameter for field in COPIED]
    assert len(parameters) == len(set(parameters))


def test_names_of_other_interfaces_exist_there() -> None:
    options = {option.name for option in dataclasses.fields(SamplingOptions)}
    assert {field.llm for field in FIELDS.values() if field.llm} <= options
    bodies = {*ChatFields.__struct_fields__, *CompletionFields.__struct_fields__}
    assert {field.openai for field in FIELDS.values() if field.openai} <= bodies


def test_supported_fields_are_documented_and_refused_ones_have_a_reason() -> None:
    for field in FIELDS.values():
        assert bool(field.help) != bool(field.unsupported_reason), field.name


def test_request_parameters_have_one_value_of_a_known_type() -> None:
    assert {field.datatype for field in BY_PARAMETER.values()} == {
        "BOOL",
        "INT32",
        "UINT64",
        "FP32",
        "BYTES",
    }


def test_lookups_hold_the_names_of_each_kind_of_model() -> None:
    assert ENGINE_FIELDS["runtime_top_k"] == "top_k"
    assert ENGINE_FIELDS["seed"] == "random_seed"
    assert PREPROCESSING_FIELDS["REQUEST_OUTPUT_LEN"] == "max_tokens"
    assert {"text_input", "min_tokens", "min_p"} <= BLS_INPUTS
    assert "input_ids" not in BLS_INPUTS
    assert BY_PARAMETER["seed"] is FIELDS["random_seed"]
    assert "max_tokens" not in BY_PARAMETER


@pytest.mark.parametrize(
    ("bound", "value", "problem"),
    [
        (Range(0, 5), 5, ""),
        (Range(0, 5), 6, "must be at least 0 and at most 5"),
        (Range(0.0, 1.0, above=True), 0.0, "must be over 0 and at most 1"),
        (Range(0.0), -0.5, "must be >= 0"),
        (Range(None, 3), 4, "must be <= 3"),
        (Range(0, 2**31 - 1, above=True), 0, "must be > 0"),
        (Range(0.0, 1.0), float("nan"), "must be a finite number"),
        (number_range("random_seed"), 2**64, f"must be at least 0 and at most {2**64 - 1}"),
    ],
)
def test_a_range_says_what_a_value_must_be(bound: Range, value: float, problem: str) -> None:
    assert bound.problem(value) == problem


@pytest.mark.parametrize(
    ("feature", "values", "parameter"),
    [
        (BEAM_SEARCH, {}, ""),
        (BEAM_SEARCH, {"top_k": 1, "temperature": 0.5, "presence_penalty": 1.0}, ""),
        (BEAM_SEARCH, {"top_k": 2}, "top_k"),
        (BEAM_SEARCH, {"min_p": 0.1}, "min_p"),
        (BEAM_SEARCH, {"typical_p": 0.9}, "typical_p"),
        (BEAM_SEARCH, {"top_log_probs": 1}, "top_log_probs"),
        (DRAFT_MODEL, {"top_k": 2, "top_p": 0.5, "repetition_penalty": 1.5}, ""),
        (DRAFT_MODEL, {"presence_penalty": -1.0}, "presence_penalty"),
        (DRAFT_MODEL, {"beam_width": 2}, "beam_width"),
        (DRAFT_MODEL, {"context_logits": True}, "context_logits"),
    ],
)
def test_parameters_that_a_feature_cannot_be_combined_with(
    feature: str, values: dict[str, float], parameter: str
) -> None:
    assert conflicting_parameter(SamplingParams(**values), feature) == parameter

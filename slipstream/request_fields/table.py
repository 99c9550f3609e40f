"""The table of request fields. Every interface of the server is derived from it.

Derived are: the bounds that requests are checked against, the sampling parameters of Triton
requests, the fields of OpenAI's routes, the bounds of the options of `slipstream.LLM`, the inputs
of BLS models, the fields that beam search and draft models cannot be combined with, and
docs/request-fields.md.

The entries are in sampling_fields.py and input_output_fields.py. The package lies below
`repository/` and `server/`, because both read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.engine.sampling_params import SamplingParams
from slipstream.request_fields.field import Field, Range, Words
from slipstream.request_fields.input_output_fields import OUTPUT_FIELDS, PROMPT_FIELDS
from slipstream.request_fields.sampling_fields import SAMPLING_FIELDS

GROUPS: Mapping[str, Sequence[Field]] = {
    "Prompt": PROMPT_FIELDS,
    **SAMPLING_FIELDS,
    **OUTPUT_FIELDS,
}
FIELDS: Mapping[str, Field] = {field.name: field for group in GROUPS.values() for field in group}

# Later spellings of Triton's fields: other name → field.
ALIASES: Mapping[str, str] = {
    alias: field.name for field in FIELDS.values() for alias in field.aliases
}
# Tensors of the engine model that are spelled differently from the field: tensor → field.
ENGINE_FIELDS: Mapping[str, str] = {
    **{field.engine: field.name for field in FIELDS.values() if field.engine},
    **ALIASES,
}
PREPROCESSING_FIELDS: Mapping[str, str] = {
    field.preprocessing: field.name for field in FIELDS.values() if field.preprocessing
}
BLS_INPUTS = frozenset(
    name for field in FIELDS.values() if field.bls for name in (field.name, *field.aliases)
)
# Request parameters for models that do not declare the input: parameter → field.
BY_PARAMETER: Mapping[str, Field] = {
    name: field
    for field in FIELDS.values()
    if field.allowed_as_parameter
    for name in (field.name, *field.aliases)
}
COPIED = tuple(field for field in FIELDS.values() if field.copied_unchanged)


def number_range(name: str) -> Range:
    """Return the bounds of a number field."""
    bound = FIELDS[name].bound
    assert isinstance(bound, Range), f"{name} is no number"
    return bound


def word_bounds(name: str) -> Words:
    """Return the bounds of a field that is a list of strings."""
    bound = FIELDS[name].bound
    assert isinstance(bound, Words), f"{name} is no list of strings"
    return bound


def conflicting_parameter(sampling: SamplingParams, feature: str) -> str:
    """Return the first sampling parameter in effect that cannot be combined with the feature.

    `feature` is BEAM_SEARCH or DRAFT_MODEL. The result is empty if there is no such parameter.
    """
    for field in FIELDS.values():
        if feature in field.conflicts and field.parameter and field.has_effect(sampling):
            return field.parameter
    return ""

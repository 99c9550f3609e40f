"""The types of the request-field table: a field and its bounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from slipstream.engine.sampling_params import SamplingParams

LARGEST_INT = 2**31 - 1
LARGEST_UINT64 = 2**64 - 1

PYTHON_TYPES: dict[str, type] = {
    "BOOL": bool,
    "INT32": int,
    "UINT64": int,
    "FP32": float,
    "BYTES": str,
}

# Features that some fields cannot be combined with, by the field that turns them on.
BEAM_SEARCH = "beam_width"
DRAFT_MODEL = "num_draft_tokens"

_SAMPLING_DEFAULTS = {
    attribute.name: attribute.default for attribute in dataclasses.fields(SamplingParams)
}


@dataclass(frozen=True)
class Range:
    """The values of a number: finite, and `low` ≤ value ≤ `high`. `above` excludes `low`."""

    low: float | None = None
    high: float | None = None
    above: bool = False

    def problem(self, value: float) -> str:
        """Return what the value must be, or an empty string if it is within the range."""
        if not isinstance(value, int) and not math.isfinite(value):
            return "must be a finite number"
        too_low = self.low is not None and (value <= self.low if self.above else value < self.low)
        if not too_low and (self.high is None or value <= self.high):
            return ""
        if too_low and (self.high is None or self.high == LARGEST_INT):
            return f"must be {'>' if self.above else '>='} {_digits(self.low)}"
        if self.low is None:
            return f"must be <= {_digits(self.high)}"
        least = f"{'over' if self.above else 'at least'} {_digits(self.low)}"
        return f"must be {least} and at most {_digits(self.high)}"


def _digits(bound: float | None) -> str:
    """Return all digits of a whole number, or a float without trailing zeros."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


TOKEN_ID = Range(0, LARGEST_INT)
TOKEN_ID_OR_NONE = Range(-1, LARGEST_INT)
UINT64 = Range(0, LARGEST_UINT64)


@dataclass(frozen=True)
class Words:
    """The bounds of a list of strings."""

    count: int  # strings in the list
    bytes: int  # bytes of each string


@dataclass(frozen=True)
class Field:
    """One request field: its names on every interface, its type, its bounds and its meaning."""

    name: str  # Triton's name, as in the generate endpoint
    datatype: str  # Triton's datatype
    bound: Range | Words | None  # None: every value of the datatype
    help: str  # meaning, for the documentation

    _: dataclasses.KW_ONLY
    triton_bound: Range | None = None  # on Triton's protocols, if it differs from `bound`
    note: str = ""  # values, for the documentation; empty: derived from `bound`
    unsupported_reason: str = ""  # empty: this server supports the field

    # Names on other interfaces.
    aliases: tuple[str, ...] = ()  # later spellings of `name`, on all Triton models
    engine: str = ""  # tensor of the engine model, if it differs from `name`
    preprocessing: str = ""  # tensor of the preprocessing model
    openai: str = ""  # field of OpenAI request bodies
    llm: str = ""  # option of `slipstream.LLM`

    # How the value reaches the engine.
    parameter: str = ""  # attribute of SamplingParams that the field sets
    copied_unchanged: bool = False  # the value is copied to that attribute unchanged
    openai_default: Any = None  # default of OpenAI's routes; None: that of the attribute
    default_note: str = ""  # default, for the documentation; empty: derived from the above
    # values that have no effect, besides the attribute's default
    no_effect_values: tuple[Any, ...] = ()
    enables_sampling: bool = False  # on Triton models, a value with an effect turns sampling on
    conflicts: Collection[str] = ()  # fields that it cannot be combined with

    # Where it is taken.
    bls: bool = False  # declared input of BLS models
    allowed_as_parameter: bool = False  # request parameter for models that do not declare the input

    @property
    def sampling_default(self) -> Any:
        """Return the default of the attribute of SamplingParams that the field sets."""
        return _SAMPLING_DEFAULTS[self.parameter]

    def has_effect(self, sampling: SamplingParams) -> bool:
        """Return whether the field's parameter differs from the values that turn it off."""
        value = getattr(sampling, self.parameter)
        return value != self.sampling_default and value not in self.no_effect_values

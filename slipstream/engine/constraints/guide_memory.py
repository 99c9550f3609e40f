"""An estimate of the memory that a compiled grammar takes."""

from __future__ import annotations

from slipstream.engine.sampling_params import Guide

# measured on objects with many properties, long enums, patterns and long descriptions
_BYTES_PER_CHARACTER = 16
_BYTES_PER_OBJECT = 4096
_BYTES_PER_ITEM = 512


def estimate_bytes(guide: Guide) -> int:
    text = guide.text
    marks = _BYTES_PER_OBJECT * text.count("{") + _BYTES_PER_ITEM * text.count(",")
    return _BYTES_PER_CHARACTER * len(text) + marks

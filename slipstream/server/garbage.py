"""Python's search for garbage, kept off what stays for good."""

from __future__ import annotations

import gc


def spare_what_is_there() -> None:
    """Leave all that exists now out of further searches. A search through it all would stop every
    request meanwhile: for 0.1 s where torch is loaded.
    """
    gc.collect()
    gc.freeze()

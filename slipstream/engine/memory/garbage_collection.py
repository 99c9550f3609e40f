"""Settings of Python's garbage collector for a process that serves requests. No torch here."""

from __future__ import annotations

import gc

# New objects that start a garbage collection: more than a step of 1,024 rows makes.
_NEW_OBJECTS = 20_000


def freeze_garbage_collector() -> None:
    """Exclude all objects that exist now from further garbage collections, and collect less often.

    A collection of all of them would stop every request: for 0.1 s where torch is loaded. The
    objects of a step are freed without it, but their number would start one several times a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])

"""The plan of a build or a conversion, made from headers alone and without torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from slipstream.version import VERSION
from slipstream.weights.engine_config import BuildLimits, folder_format
from slipstream.weights.parameters import Quantisation, choose_quantisation
from slipstream.weights.rank_split import RankMapping
from slipstream.weights.sources.source import Source, check_source, choose_dtype
from slipstream.weights.stored_rows import keep_as_stored

# The part of a plan that only an engine folder or only a checkpoint has.
Details = TypeVar("Details", BuildLimits, RankMapping)


@dataclass(frozen=True)
class BuildPlan(Generic[Details]):
    dtype: str
    quantisation: Quantisation
    details: Details
    inputs_hash: str  # a folder with the same hash need not be built again


def plan_build(
    source: Source,
    dtype: str,
    weight_only: str | None,
    fp8_kv_cache: bool,
    details: Details,
    keep_stored: bool = False,
) -> BuildPlan[Details]:
    """Check the source and return the plan of a folder.

    keep_stored: keep matrices in blocks as they are in the source.

    Raises SourceError, UnsupportedModel or ValueError with one line that says why it cannot be
    built.
    """
    stored = choose_dtype(source, dtype)
    check_source(source)
    quantisation = choose_quantisation(source.spec, weight_only, fp8_kv_cache)
    if keep_stored:
        quantisation = keep_as_stored(source, quantisation)
    inputs: list[Any] = [
        VERSION,
        folder_format(quantisation),
        source.fingerprint(),
        stored,
        asdict(quantisation),
        hashed_details(details),
    ]
    if source.pooling is not None:
        inputs.append(asdict(source.pooling))
    inputs_hash = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    return BuildPlan(stored, quantisation, details, inputs_hash)


def hashed_details(details: BuildLimits | RankMapping) -> dict[str, Any]:
    """Return what a folder's hashes cover. Limits that were not given add only their numbers."""
    values = asdict(details)
    if not values.get("given", True):
        del values["given"]
    return values

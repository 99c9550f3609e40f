"""What a request brings to an engine besides its prompt and how it samples, whichever way the
engine is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from slipstream.engine.cache.retention import Retention
from slipstream.engine.request import GenerateRequest, PromptTable, SamplingParams
from slipstream.server.fields.adapters import AdapterUse
from slipstream.server.kserve.access import TENANT


class Submission(TypedDict, total=False):
    priority: int
    deadline: float | None
    cache_salt: str
    prompt_of: int | None
    draft: Sequence[int]
    adapter: AdapterUse | None
    prompt_table: PromptTable | None
    retention: Retention | None


def engine_request(
    request_id: int, prompt: list[int], sampling: SamplingParams, more: Submission
) -> GenerateRequest:
    adapter, salt = more.get("adapter"), more.get("cache_salt", "")
    return GenerateRequest(
        request_id,
        prompt,
        sampling,
        priority=more.get("priority", 0),
        deadline=more.get("deadline"),
        cache_salt=f"{tenant}\0{salt}" if (tenant := TENANT.get()) else salt,
        prompt_of=more.get("prompt_of"),
        draft=list(more.get("draft", ())),
        prompt_table=more.get("prompt_table"),
        retention=more.get("retention"),
        **({} if adapter is None else adapter.fields()),
    )

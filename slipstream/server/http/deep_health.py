"""`/health` and `/health_generate`, where servers of OpenAI's API have their probes: 200 or 503,
and why not.

The second is the deep one: every engine that answers in text is asked for a token, unless it has
its hands full, which it can only have while its loop turns; its watchdog sees to that.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from slipstream.engine.request import SamplingParams
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.registry import ModelRegistry
from slipstream.server.models.llm_models import run
from slipstream.server.models.queue_policy import TIMED_OUT
from slipstream.server.openai.models import NamedModel, text_models
from slipstream.server.text.pipeline import TextRequest

HEALTH, GENERATE = "/health", "/health_generate"
PATHS = (HEALTH, GENERATE)
ANSWER_SECONDS = 10.0
_REPLY_SECONDS = 2.0  # more, for an engine to say that it found no time
_FIRST = 2**31 - 1  # before all others that wait


async def why_not_generating(registry: ModelRegistry) -> str:
    """Empty where every engine gives a token."""
    models = {id(model.text.generator.engine): model for model in text_models(registry)}
    return "; ".join(filter(None, await asyncio.gather(*map(_why_not, models.values()))))


async def _why_not(model: NamedModel) -> str:
    engine = model.text.generator.engine
    if engine.info is not None and getattr(engine, "outstanding", 0) >= engine.info.max_rows:
        return ""
    tokenizer = model.tokenizer
    prompt = [tokenizer.bos_id if tokenizer.bos_id is not None else 0]
    request = TextRequest(
        prompt,
        SamplingParams(max_tokens=1),
        ignore_end=True,
        priority=_FIRST,
        deadline=time.monotonic() + ANSWER_SECONDS,
    )
    try:
        async with asyncio.timeout(ANSWER_SECONDS + _REPLY_SECONDS):
            async with aclosing(run(model.text.generator, request)) as answers:
                async for _ in answers:
                    pass
    except TimeoutError:
        return f"{model.text.engine.name} gave no token in {ANSWER_SECONDS:g} s"
    except InferenceError as error:
        # One whose every row was taken meanwhile says so itself.
        return "" if error.message == TIMED_OUT else f"{model.text.engine.name}: {error.message}"
    return ""

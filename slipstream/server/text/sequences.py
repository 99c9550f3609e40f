"""Several answers to one request: samples of one prompt, and the beams of a search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import TypeVar

from slipstream.engine.messages import Beam, EngineInfo
from slipstream.engine.sampling_params import SamplingParams
from slipstream.request_fields.field import BEAM_SEARCH
from slipstream.request_fields.table import conflicting_parameter
from slipstream.server.engine_link.engine import TextBeam
from slipstream.server.text.stream import StopWords, TextStream
from slipstream.server.text.tokenizer import Tokenizer

Item = TypeVar("Item")

_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that no two sequences of a request have the same seed
_SEEDS = 2**64


def write_beams(
    tokenizer: Tokenizer,
    beams: Sequence[Beam],
    stop_words: StopWords | None,
    skip_special_tokens: bool,
) -> list[TextBeam]:
    """Return the beams with their texts, each cut at its first stop word."""
    written = []
    for beam in beams:
        stream = TextStream(tokenizer, stop_words or (), skip_special_tokens)
        text = stream.push(beam.tokens) + stream.finish()
        count = stream.tokens_used if stream.stopped else len(beam.tokens)
        row_bytes = len(beam.generation_logits) // max(1, len(beam.tokens))
        written.append(
            TextBeam(
                tokens=beam.tokens[:count],
                log_probs=beam.log_probs[:count],
                total_log_prob=beam.total_log_prob,
                finish_reason="stop" if stream.stopped else beam.finish_reason,
                generation_logits=beam.generation_logits[: row_bytes * count],
                text=text,
            )
        )
    return written


def beam_problem(
    sampling: SamplingParams, sequences: int, drafted: bool, info: EngineInfo | None
) -> str:
    """Return why the rest of a request does not go with its beam search; empty where it does."""
    width = sampling.beam_width
    if info is not None and width > info.max_beam_width:
        return (
            f"Requested beam width {width} is larger than configured max beam width "
            f"{info.max_beam_width}"
        )
    if sequences > width:
        return (
            f"{sequences} sequences were asked for, and a search of beam width {width} has no "
            f"more than {width}"
        )
    other = conflicting_parameter(sampling, BEAM_SEARCH) or ("draft" if drafted else "")
    return f"{other} cannot be combined with beam width {width}" if other else ""


def sampling_of_sequence(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of a sequence after the first: with a seed of its own.

    The scores of the prompt are the same for all sequences and come with the first.
    """
    seed = (sampling.seed + index * _SEED_STEP) % _SEEDS
    return replace(
        sampling,
        seed=seed,
        prompt_log_probs=False,
        top_prompt_log_probs=0,
        prompt_ranks=False,
        context_logits=False,
    )


async def merge_streams(
    sources: Sequence[AsyncIterator[Item]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all sources as they come, each with the index of its source."""
    if len(sources) == 1:
        async for item in sources[0]:
            yield 0, item
        return
    waiting = {asyncio.ensure_future(_next(source)): place for place, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                place = waiting.pop(task)
                found = task.result()
                if found is not None:
                    waiting[asyncio.ensure_future(_next(sources[place]))] = place
                    yield place, found
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(source: AsyncIterator[Item]) -> Item | None:
    try:
        return await source.__anext__()
    except StopAsyncIteration:
        return None

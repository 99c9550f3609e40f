"""The output tensors of a generation: text or ids, scores, counts and times, and the zeros older
repositories send.

Besides its text or ids a model sends what its configuration declares. An output with a flag of its
own (`return_…`) is sent when a request sets the flag; where the model declares the output but not
the flag, always. A flag may also come as a parameter, to a model that declares neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from slipstream.engine.messages import Scores, Timing
from slipstream.engine.request import SamplingParams
from slipstream.repository.config import ModelConfig
from slipstream.server.engine_link.engine import TextBeam, TextOutput
from slipstream.server.fields.limits import RequestFields
from slipstream.server.kserve.joining import LONG
from slipstream.server.kserve.tensors import DTYPES, Tensor

Made = TypeVar("Made")

_BLOCKS = ("return_kv_cache_reuse_stats", "return_perf_metrics")
_PERFORMANCE = ("return_perf_metrics",)
# An optional output → the flags that ask for it.
FLAGS: Mapping[str, tuple[str, ...]] = {
    "finish_reason": ("return_finish_reason",),
    "num_input_tokens": ("return_num_input_tokens",),
    "num_output_tokens": ("return_num_output_tokens",),
    "num_cached_tokens": ("return_num_cached_tokens",),
    "prompt_log_probs": ("return_prompt_log_probs",),
    "kv_cache_alloc_new_blocks": _BLOCKS,
    "kv_cache_reused_blocks": _BLOCKS,
    "kv_cache_alloc_total_blocks": _BLOCKS,
    "arrival_time_ns": _PERFORMANCE,
    "first_scheduled_time_ns": _PERFORMANCE,
    "first_token_time_ns": _PERFORMANCE,
    "last_token_time_ns": _PERFORMANCE,
    "acceptance_rate": _PERFORMANCE,
    "total_accepted_draft_tokens": _PERFORMANCE,
    "total_draft_tokens": _PERFORMANCE,
}
_TIMED = frozenset(name for name, flags in FLAGS.items() if "return_perf_metrics" in flags)


@dataclass(frozen=True)
class OutputRequest:
    """What one request wants besides its text or ids."""

    sampling: SamplingParams
    optional: frozenset[str]  # of FLAGS
    placeholders: bool  # zeros stand for what was not asked for

    @property
    def by_name(self) -> Collection[str]:
        """What is sent even where the model does not declare it."""
        tops = {"output_top_ids", "output_top_log_probs"} if self.sampling.top_log_probs else set()
        return self.optional | tops | {"sequence_index"}

    @property
    def tells_end(self) -> bool:
        """The last answer says something even where it has no text."""
        return bool(self.optional - {"prompt_log_probs"})

    def completed(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with what the engine must be told to be able to answer."""
        return replace(
            sampling,
            timing=bool(self.optional & _TIMED),
            prompt_log_probs=sampling.prompt_log_probs or "prompt_log_probs" in self.optional,
        )


def read_output_request(
    fields: RequestFields,
    sampling: SamplingParams,
    inputs: Collection[str],
    outputs: Collection[str],
    placeholders: bool,
) -> OutputRequest:
    """`inputs`, `outputs`: the fields that the model declares."""
    optional = set()
    for name, flags in FLAGS.items():
        asked = any(flag in fields and fields[flag].value for flag in flags)
        if asked or (
            name in outputs and not any(flag in inputs or flag in fields for flag in flags)
        ):
            optional.add(name)
    return OutputRequest(sampling, frozenset(optional), placeholders)


@dataclass
class Completion:
    """What a generation has produced so far, as the outputs need it."""

    end_ids: frozenset[int]  # tokens that end the text and are not part of it
    normalise: bool  # cum_log_probs is divided by the length
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    scores: Scores = field(default_factory=Scores)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    timing: Timing | None = None
    beams: Sequence[TextBeam] = ()  # at the end of a search
    # of a beam, with its end: what the tokens' log-probabilities do not add up to
    total: float | None = None
    told: int = 0  # tokens whose scores were sent
    context_told: bool = False  # the prompt's scores were sent, or are another sequence's to send

    def add(self, delta: TextOutput) -> TextOutput:
        """Take a delta in; the answer is the same without the token that ended the text."""
        if delta.finish_reason == "stop" and delta.tokens and delta.tokens[-1] in self.end_ids:
            delta.tokens = delta.tokens[:-1]
            delta.log_probs = (
                delta.log_probs[: len(delta.tokens)] if delta.log_probs is not None else None
            )
        self.tokens += delta.tokens
        self.log_probs += delta.log_probs or []
        self.top_log_probs += (delta.top_log_probs or [])[: len(delta.tokens)]
        self.text += delta.text
        self.prompt_tokens = delta.prompt_tokens
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.finish_reason, self.timing = delta.finish_reason, delta.timing
        if delta.scores is not None:
            self.scores.merge(delta.scores)
        self.beams = delta.beams or ()
        return delta

    def parts(self) -> list[Completion]:
        """One for each sequence that is answered with: the beams of a search, or itself."""
        if not self.beams:
            return [self]
        # otherwise it was ended from outside, all beams alike
        ended = self.finish_reason in ("stop", "length")
        return [
            replace(
                self,
                tokens=beam.tokens,
                log_probs=beam.log_probs,
                text=beam.text,
                total=beam.total_log_prob,
                scores=replace(self.scores, generation_logits=beam.generation_logits),
                finish_reason=beam.finish_reason if ended else self.finish_reason,
            )
            for beam in self.beams
        ]

    @property
    def cumulative(self) -> float:
        total = sum(self.log_probs) if self.total is None else self.total
        return total / len(self.log_probs) if self.normalise and self.log_probs else total


async def made(
    make: Callable[..., Made],
    texts: Any,
    asked: OutputRequest,
    parts: Sequence[Completion],
    *more: Any,
) -> Made:
    """An answer; in a thread where it has so many logits that others' answers would wait for it."""
    logits = sum(
        len(part.scores.context_logits) + len(part.scores.generation_logits) for part in parts
    )
    if logits < 4 * LONG:
        return make(texts, asked, parts, *more)
    return await asyncio.to_thread(make, texts, asked, parts, *more)


def side_outputs(asked: OutputRequest, progress: Completion) -> list[Tensor]:
    """By field name: all that goes with a text, of the tokens since the last call. Streams call it
    again and again.
    """
    start, progress.told = progress.told, len(progress.tokens)
    outputs = [
        *_log_probs(asked, progress, start),
        *_logits(asked, progress, start),
        *_counts(asked, progress),
    ]
    if progress.timing is not None:
        outputs += _performance(asked, progress.timing)
    return outputs


def _log_probs(asked: OutputRequest, progress: Completion, start: int) -> list[Tensor]:
    outputs, sampling = [], asked.sampling
    if sampling.log_probs:
        values = progress.log_probs[start:]
        outputs.append(Tensor.from_values("cum_log_probs", "FP32", (1, 1), [progress.cumulative]))
        outputs.append(Tensor.from_values("output_log_probs", "FP32", (1, 1, len(values)), values))
    elif asked.placeholders:
        outputs.append(Tensor.from_values("cum_log_probs", "FP32", (1, 1), [0.0]))
        outputs.append(Tensor.from_values("output_log_probs", "FP32", (1, 1, 1), [0.0]))
    if sampling.top_log_probs:
        tops = progress.top_log_probs[start:]
        shape = (1, 1, len(tops), len(tops[0]) if tops else 0)
        outputs.append(
            Tensor.from_values(
                "output_top_ids", "INT32", shape, [token for top in tops for token, _ in top]
            )
        )
        outputs.append(
            Tensor.from_values(
                "output_top_log_probs", "FP32", shape, [v for top in tops for _, v in top]
            )
        )
    return outputs


def _logits(asked: OutputRequest, progress: Completion, start: int) -> list[Tensor]:
    """The prompt's go with the first answer, each token's with the token."""
    outputs: list[Tensor] = []
    sampling, scores = asked.sampling, progress.scores
    if sampling.context_logits and not progress.context_told:
        values = np.frombuffer(scores.context_logits, DTYPES["FP32"])
        positions = max(1, progress.prompt_tokens)
        outputs.append(
            Tensor("context_logits", "FP32", (1, positions, len(values) // positions), values)
        )
    elif asked.placeholders:
        outputs.append(Tensor.from_values("context_logits", "FP32", (1, 1, 1), [0.0]))
    if sampling.generation_logits:
        count = len(progress.tokens) - start
        values = np.frombuffer(scores.generation_logits, DTYPES["FP32"])
        width = len(values) // count if count else 0
        outputs.append(Tensor("generation_logits", "FP32", (1, 1, count, width), values))
        scores.generation_logits = b""
    elif asked.placeholders:
        outputs.append(Tensor.from_values("generation_logits", "FP32", (1, 1, 1, 1), [0.0]))
    if "prompt_log_probs" in asked.optional and not progress.context_told:
        outputs.append(
            Tensor.from_values(
                "prompt_log_probs",
                "FP32",
                (1, len(scores.prompt_log_probs)),
                scores.prompt_log_probs,
            )
        )
    progress.context_told = True
    return outputs


def _counts(asked: OutputRequest, progress: Completion) -> list[Tensor]:
    counts = {
        "num_input_tokens": progress.prompt_tokens,
        "num_output_tokens": len(progress.tokens),
        "num_cached_tokens": progress.cached_tokens,
    }
    outputs = [
        Tensor.from_values(name, "INT32", (1, 1), [value])
        for name, value in counts.items()
        if name in asked.optional
    ]
    if "finish_reason" in asked.optional:
        outputs.append(Tensor("finish_reason", "BYTES", (1, 1), [progress.finish_reason.encode()]))
    return outputs


def _performance(asked: OutputRequest, timing: Timing) -> list[Tensor]:
    """In upstream's names; of the drafts that were tried, the share that was right."""
    numbers = {
        "kv_cache_alloc_new_blocks": ("INT32", timing.prompt_blocks),
        "kv_cache_reused_blocks": ("INT32", timing.reused_blocks),
        "kv_cache_alloc_total_blocks": ("INT32", timing.allocated_blocks),
        "arrival_time_ns": ("INT64", timing.arrived_ns),
        "first_scheduled_time_ns": ("INT64", timing.first_scheduled_ns),
        "first_token_time_ns": ("INT64", timing.first_token_ns),
        "last_token_time_ns": ("INT64", timing.last_token_ns),
        "acceptance_rate": (
            "FP32",
            timing.accepted_draft_tokens / max(1, timing.draft_tokens),
        ),
        "total_accepted_draft_tokens": ("INT32", timing.accepted_draft_tokens),
        "total_draft_tokens": ("INT32", timing.draft_tokens),
    }
    return [
        Tensor.from_values(name, datatype, (1, 1), [value])
        for name, (datatype, value) in numbers.items()
        if name in asked.optional
    ]


def named(
    outputs: Iterable[Tensor], names: Mapping[str, str], asked: Collection[str] = ()
) -> list[Tensor]:
    """Rename fields to the model's tensors (`names`: field → tensor). What the model does not
    declare is left out, unless it was asked for by name.
    """
    kept = []
    for tensor in outputs:
        if tensor.name in names or tensor.name in asked:
            tensor.name = names.get(tensor.name, tensor.name)
            kept.append(tensor)
    return kept


def as_declared(outputs: Iterable[Tensor], config: ModelConfig) -> list[Tensor]:
    """Numbers in the type that the model declares them in: later repositories may have logits in 16
    bits.
    """
    declared = {tensor.name: tensor.datatype for tensor in config.outputs}
    return [
        _narrowed(tensor, declared[tensor.name])
        if tensor.datatype == "FP32" and declared.get(tensor.name) in ("FP16", "BF16")
        else tensor
        for tensor in outputs
    ]


def _narrowed(tensor: Tensor, datatype: str) -> Tensor:
    """Convert FP32 to FP16 or BF16, rounded to the nearest value, ties to even."""
    values = tensor.array()
    if datatype == "FP16":
        halves = values.clip(-65504.0, 65504.0).astype(DTYPES["FP16"])
    else:  # the upper half of the bits
        bits = values.view(np.uint32)
        halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(DTYPES["BF16"])
    return Tensor(tensor.name, datatype, tensor.shape, halves)

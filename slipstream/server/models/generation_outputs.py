"""The output tensors of a generation: text or ids, scores, counts and times, and the zeros older
repositories send.

Besides its text or ids a model sends what its configuration declares. An output with a flag of its
own (`return_…`) is sent when a request sets the flag; where the model declares the output but not
the flag, always. A flag may also come as a parameter, to a model that declares neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from slipstream.engine.messages import Scores, Timing
from slipstream.engine.sampling_params import SamplingParams
from slipstream.repository.config import ModelConfig
from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.fields.values import RequestFields
from slipstream.server.kserve.joining import one_after_another
from slipstream.server.kserve.tensors import DTYPES, Tensor
from slipstream.server.models.embeddings import unit_length

_BLOCKS = ("return_kv_cache_reuse_stats", "return_perf_metrics")
_PERFORMANCE = ("return_perf_metrics",)
EMBEDDINGS = "embeddings"
# An optional output → the flags that ask for it.
FLAGS: Mapping[str, tuple[str, ...]] = {
    EMBEDDINGS: ("return_embeddings",),
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
_ZERO = np.zeros(1, DTYPES["FP32"])  # data of outputs that are not requested
_TIMED = frozenset(name for name, flags in FLAGS.items() if "return_perf_metrics" in flags)


# Outputs that each sequence has, with the values that fill shorter rows. All others belong to the
# request.
_ROWS = {
    "output_ids": -1,
    "sequence_length": 0,
    "cum_log_probs": 0.0,
    "output_log_probs": 0.0,
    "generation_logits": 0.0,
    "output_top_ids": 0,
    "output_top_log_probs": 0.0,
    "num_output_tokens": 0,
    "finish_reason": b"",
    "text_output": b"",
}


@dataclass(frozen=True)
class OutputRequest:
    """The outputs that a request asks for besides its text or ids."""

    sampling: SamplingParams
    optional: frozenset[str]  # outputs of FLAGS
    placeholders: bool  # outputs that are not requested are sent as zeros
    unit_length: bool = False  # embeddings are divided by their length

    @cached_property
    def by_name(self) -> Collection[str]:
        """Outputs that are sent even where the model does not declare them."""
        tops = {"output_top_ids", "output_top_log_probs"} if self.sampling.top_log_probs else set()
        return self.optional | tops | {"sequence_index"}

    @property
    def has_final_values(self) -> bool:
        """Return whether the last response of a stream is sent even where it has no text."""
        return bool(self.optional - {"prompt_log_probs"})

    @property
    def wants_logits(self) -> bool:
        return self.sampling.context_logits or self.sampling.generation_logits

    @cached_property
    def has_values(self) -> bool:
        """Return whether responses have values beside the text or ids, other than placeholders."""
        sampling = self.sampling
        scored = sampling.log_probs or sampling.top_log_probs > 0
        return scored or self.wants_logits or bool(self.optional)

    def complete_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with which the engine computes these outputs."""
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
        requested = any(flag in fields and fields[flag].value for flag in flags)
        has_flag = any(flag in inputs or flag in fields for flag in flags)
        if requested or (name in outputs and not has_flag):
            optional.add(name)
    return OutputRequest(sampling, frozenset(optional), placeholders)


@dataclass(slots=True, kw_only=True)
class Completion(TextOutput):
    """All outputs of one sequence so far, merged."""

    end_ids: frozenset[int] = frozenset()  # tokens that end the text and do not belong to it
    normalise: bool = False  # cum_log_probs is divided by the length
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    scores: Scores = field(default_factory=Scores)
    # log-probability of a beam with its end token, which is not among the tokens
    total: float | None = None
    scored: int = 0  # tokens whose scores were sent
    # the scores of the prompt were sent, or another sequence sends them
    prompt_scored: bool = False

    def add(self, output: TextOutput) -> TextOutput:
        """Merge an output, without the token that ended the text. Return the output."""
        self.drop_end(output)
        self.merge(output)
        self.text += output.text
        self.prompt_tokens = output.prompt_tokens
        return output

    def drop_end(self, output: TextOutput) -> None:
        """Remove the token that ended the text from an output."""
        if output.finish_reason == "stop" and output.tokens and output.tokens[-1] in self.end_ids:
            output.tokens = output.tokens[:-1]
            if output.log_probs is not None:
                output.log_probs = output.log_probs[: len(output.tokens)]
        if output.top_log_probs is not None:
            output.top_log_probs = output.top_log_probs[: len(output.tokens)]

    def split_beams(self) -> list[Completion]:
        """Return a completion for each beam of a search, or this one."""
        if not self.beams:
            return [self]
        # a search that was cancelled has the same reason for all beams
        finished = self.finish_reason in ("stop", "length")
        return [
            replace(
                self,
                tokens=beam.tokens,
                log_probs=beam.log_probs,
                text=beam.text,
                total=beam.total_log_prob,
                scores=replace(self.scores, generation_logits=beam.generation_logits),
                finish_reason=beam.finish_reason if finished else self.finish_reason,
            )
            for beam in self.beams
        ]

    @property
    def logits_bytes(self) -> int:
        return len(self.scores.context_logits) + len(self.scores.generation_logits)

    @property
    def cumulative(self) -> float:
        total = sum(self.log_probs) if self.total is None else self.total
        return total / len(self.log_probs) if self.normalise and self.log_probs else total


def side_outputs(wanted: OutputRequest, completion: Completion) -> list[Tensor]:
    """Return the outputs beside the text or ids, by field name, for the tokens since the last call.

    A stream calls this for each response.
    """
    start = completion.scored
    completion.scored = len(completion.tokens)
    outputs = [
        *_log_probs(wanted, completion, start),
        *_logits(wanted, completion, start),
        *_counts(wanted, completion),
    ]
    if completion.timing is not None:
        outputs += _performance(wanted, completion.timing)
    return outputs


def _log_probs(wanted: OutputRequest, completion: Completion, start: int) -> list[Tensor]:
    outputs: list[Tensor] = []
    sampling = wanted.sampling
    if sampling.log_probs:
        values = completion.log_probs[start:]
        outputs.append(Tensor.from_values("cum_log_probs", "FP32", (1, 1), [completion.cumulative]))
        outputs.append(Tensor.from_values("output_log_probs", "FP32", (1, 1, len(values)), values))
    elif wanted.placeholders:
        outputs.append(Tensor("cum_log_probs", "FP32", (1, 1), _ZERO))
        outputs.append(Tensor("output_log_probs", "FP32", (1, 1, 1), _ZERO))
    if sampling.top_log_probs:
        tops = completion.top_log_probs[start:]
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


def _logits(wanted: OutputRequest, completion: Completion, start: int) -> list[Tensor]:
    """Return the logits of the prompt with the first response, and those of each new token."""
    outputs: list[Tensor] = []
    sampling = wanted.sampling
    scores = completion.scores
    if sampling.context_logits and not completion.prompt_scored:
        values = np.frombuffer(scores.context_logits, DTYPES["FP32"])
        positions = max(1, completion.prompt_tokens)
        outputs.append(
            Tensor("context_logits", "FP32", (1, positions, len(values) // positions), values)
        )
    elif wanted.placeholders:
        outputs.append(Tensor("context_logits", "FP32", (1, 1, 1), _ZERO))
    if sampling.generation_logits:
        count = len(completion.tokens) - start
        values = np.frombuffer(scores.generation_logits, DTYPES["FP32"])
        width = len(values) // count if count else 0
        outputs.append(Tensor("generation_logits", "FP32", (1, 1, count, width), values))
        scores.generation_logits = b""
    elif wanted.placeholders:
        outputs.append(Tensor("generation_logits", "FP32", (1, 1, 1, 1), _ZERO))
    if "prompt_log_probs" in wanted.optional and not completion.prompt_scored:
        outputs.append(
            Tensor.from_values(
                "prompt_log_probs",
                "FP32",
                (1, len(scores.prompt_log_probs)),
                scores.prompt_log_probs,
            )
        )
    completion.prompt_scored = True
    return outputs


def _counts(wanted: OutputRequest, completion: Completion) -> list[Tensor]:
    counts = {
        "num_input_tokens": completion.prompt_tokens,
        "num_output_tokens": len(completion.tokens),
        "num_cached_tokens": completion.cached_tokens,
    }
    outputs = [
        Tensor.from_values(name, "INT32", (1, 1), [value])
        for name, value in counts.items()
        if name in wanted.optional
    ]
    if EMBEDDINGS in wanted.optional:
        vector = np.frombuffer(completion.scores.pooled, DTYPES["FP32"])
        vector = unit_length(vector) if wanted.unit_length else vector
        outputs.append(Tensor(EMBEDDINGS, "FP32", (1, len(vector)), vector))
    if "finish_reason" in wanted.optional:
        outputs.append(
            Tensor("finish_reason", "BYTES", (1, 1), [completion.finish_reason.encode()])
        )
    return outputs


def _performance(wanted: OutputRequest, timing: Timing) -> list[Tensor]:
    """Return the performance metrics under TensorRT-LLM's names."""
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
        if name in wanted.optional
    ]


def rename_and_filter(
    outputs: Iterable[Tensor], names: Mapping[str, str], by_name: Collection[str] = ()
) -> list[Tensor]:
    """Rename fields to the model's outputs (`names`: field → output).

    Outputs that the model does not declare are left out, unless they are in `by_name`.
    """
    kept = []
    for tensor in outputs:
        if tensor.name in names or tensor.name in by_name:
            tensor.name = names.get(tensor.name, tensor.name)
            kept.append(tensor)
    return kept


def declared_16_bit_outputs(config: ModelConfig) -> dict[str, str]:
    """Return the outputs that a model declares with 16-bit types, as later repositories do."""
    return {
        tensor.name: tensor.datatype
        for tensor in config.outputs
        if tensor.datatype in ("FP16", "BF16")
    }


def convert_to_16_bit(outputs: Iterable[Tensor], datatypes: Mapping[str, str]) -> list[Tensor]:
    """Convert FP32 outputs to the 16-bit types in `datatypes`, by output name."""
    return [
        _narrowed(tensor, datatypes[tensor.name])
        if tensor.datatype == "FP32" and tensor.name in datatypes
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


def sequence_index(index: int) -> Tensor:
    return Tensor.from_values("sequence_index", "INT32", (1, 1), [index])


def stack_sequences(sequences: Sequence[list[Tensor]]) -> list[Tensor]:
    """Return the outputs of all sequences as one list of tensors, one row per sequence."""
    if len(sequences) == 1:
        return sequences[0]
    by_name: dict[str, list[Tensor]] = {}
    for sequence in sequences:
        for tensor in sequence:
            by_name.setdefault(tensor.name, []).append(tensor)
    return [_stack(by_name[first.name]) if first.name in _ROWS else first for first in sequences[0]]


def _stack(column: Sequence[Tensor]) -> Tensor:
    """Stack [1, 1, length, …] of each to [1, sequences, longest, …]; texts become [sequences]."""
    first = column[0]
    if first.name == "text_output":
        texts = [tensor.strings()[0] for tensor in column]
        return Tensor(first.name, first.datatype, (len(column),), texts)
    shapes = [tensor.shape[2:] for tensor in column]
    longest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    data = one_after_another(column, (1, *longest), _ROWS[first.name])
    return Tensor(first.name, first.datatype, (1, len(column), *longest), data)

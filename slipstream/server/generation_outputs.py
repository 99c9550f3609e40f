"""The output tensors of a generation: text or ids, log-probabilities, and the zeros older repositories send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slipstream.server.tensors import Tensor, single
from slipstream.server.text.pipeline import TextDelta


@dataclass
class Progress:
    """What a generation has produced so far, as the outputs need it."""

    end_ids: frozenset[int]  # tokens that end the text and are not part of it
    normalise: bool  # cum_log_probs is divided by the length
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str = ""

    def add(self, delta: TextDelta) -> TextDelta:
        """Take a delta in; the answer is the same without the token that ended the text."""
        if delta.finish_reason == "stop" and delta.tokens and delta.tokens[-1] in self.end_ids:
            delta.tokens = delta.tokens[:-1]
            delta.log_probs = delta.log_probs[: len(delta.tokens)] if delta.log_probs is not None else None
        self.tokens += delta.tokens
        self.log_probs += delta.log_probs or []
        self.text += delta.text
        return delta

    @property
    def cumulative(self) -> float:
        total = sum(self.log_probs)
        return total / len(self.log_probs) if self.normalise and self.log_probs else total


def log_prob_outputs(asked: bool, placeholders: bool, progress: Progress, news: Iterable[float]) -> list[Tensor]:
    """By field name. `asked`: return_log_probs was true; logits are not computed here and are always zeros."""
    outputs = []
    if asked:
        values = [single(value) for value in news]
        outputs.append(Tensor("cum_log_probs", "FP32", (1, 1), [single(progress.cumulative)]))
        outputs.append(Tensor("output_log_probs", "FP32", (1, 1, len(values)), values))
    elif placeholders:
        outputs.append(Tensor("cum_log_probs", "FP32", (1, 1), [0.0]))
        outputs.append(Tensor("output_log_probs", "FP32", (1, 1, 1), [0.0]))
    if placeholders:
        outputs.append(Tensor("context_logits", "FP32", (1, 1, 1), [0.0]))
        outputs.append(Tensor("generation_logits", "FP32", (1, 1, 1, 1), [0.0]))
    return outputs


def named(outputs: Iterable[Tensor], names: Mapping[str, str]) -> list[Tensor]:
    """Rename fields to the model's tensors (`names`: field → tensor); what the model does not declare is left out."""
    kept = []
    for tensor in outputs:
        if tensor.name in names:
            tensor.name = names[tensor.name]
            kept.append(tensor)
    return kept

"""One answer for the several sequences of a request: the tensors of each, one row a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.server.kserve.joining import one_after_another
from slipstream.server.kserve.tensors import Tensor

# Tensors of which each sequence has its own, with what fills a shorter row; all others are the
# request's.
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


def sequence_index(index: int) -> Tensor:
    return Tensor.from_values("sequence_index", "INT32", (1, 1), [index])


def stacked(sequences: Sequence[list[Tensor]]) -> list[Tensor]:
    """The outputs of each sequence, made one."""
    if len(sequences) == 1:
        return sequences[0]
    outputs = []
    by_name = [{tensor.name: tensor for tensor in sequence} for sequence in sequences]
    for first in sequences[0]:
        column = [tensors[first.name] for tensors in by_name if first.name in tensors]
        outputs.append(_stack(column) if first.name in _ROWS else first)
    return outputs


def _stack(column: Sequence[Tensor]) -> Tensor:
    """[1, 1, length, …] of each → [1, sequences, longest, …]; texts stay a list: [sequences]."""
    first = column[0]
    if first.name == "text_output":
        texts = [tensor.strings()[0] for tensor in column]
        return Tensor(first.name, first.datatype, (len(column),), texts)
    longest = tuple(
        max(sizes) for sizes in zip(*(tensor.shape[2:] for tensor in column), strict=True)
    )
    data = one_after_another(column, (1, *longest), _ROWS[first.name])
    return Tensor(first.name, first.datatype, (1, len(column), *longest), data)

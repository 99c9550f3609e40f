"""Prompt tuning: a table of embeddings that a request brings, for the tokens of its prompt beyond
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.engine.request import PromptTable
from slipstream.model.spec import ModelSpec
from slipstream.server.fields.limits import FieldValue
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.tensors import Tensor

MOST_TABLE_BYTES = 64 << 20  # of a request, each of whose sequences has its own
LARGEST_VALUE = 65504.0  # of a half; a model's own embeddings are near 1


def prompt_table(
    fields: Mapping[str, FieldValue], spec: ModelSpec, sequences: int = 1
) -> PromptTable | None:
    given, size = fields.get("prompt_embedding_table"), fields.get("prompt_vocab_size")
    rows = int(size.value) if size is not None and size.value is not None else 0
    if given is None or given.value is None:
        if rows:
            raise InferenceError(
                f"{size.name if size else ''} is {rows}, but there is no prompt_embedding_table"
            )
        return None
    *_, there, width = given.tensor.shape
    if width != spec.hidden_size:
        raise InferenceError(
            f"{given.name} has rows of {width} numbers, the model's hidden size is {spec.hidden_size}"
        )
    if rows > there:
        raise InferenceError(
            f"{given.name} has {there} rows, fewer than the prompt_vocab_size of {rows}"
        )
    if (taken := there * width * 4 * sequences) > MOST_TABLE_BYTES:
        text = (
            f"{given.name} takes {taken >> 20} MiB, over the bound of {MOST_TABLE_BYTES >> 20} MiB"
        )
        raise InferenceError(text)
    values = _float32(given.tensor)[: (rows or there) * width * 4]
    if not _moderate(values):
        raise InferenceError(
            f"{given.name} must hold finite numbers between {-LARGEST_VALUE:g} and {LARGEST_VALUE:g}"
        )
    return PromptTable(spec.vocab_size, rows or there, values)


def refuse_table(fields: Mapping[str, FieldValue], engine: str) -> None:
    """A text has only tokens of the vocabulary, so that a table could have no effect on it."""
    for field in ("prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_id"):
        given = fields.get(field)
        if given is not None and given.value not in (None, 0):
            text = f"{given.name} works with token ids beyond the vocabulary, which a text cannot have: send it and "
            raise InferenceError(text + f"the ids to '{engine}'")


def table_salt(fields: Mapping[str, FieldValue]) -> str:
    """The ids that tell prompts with the same table apart; the table itself is told apart by its
    content.

    What comes before it is a tenant's own salt, which it must not run into.
    """
    given = fields.get("prompt_table_extra_ids")
    ids = given.tensor.values() if given is not None else []
    return "\0" + ",".join(map(str, ids)) if ids else ""


def _float32(tensor: Tensor) -> bytes:
    if tensor.datatype == "BF16":  # the upper half of a float32
        return (tensor.array().astype("<u4") << 16).tobytes()
    return tensor.array().astype("<f4").tobytes()


def _moderate(values: bytes) -> bool:
    """Nothing that makes keys and values which are not finite."""
    import numpy as np

    # nan is not
    return bool((np.abs(np.frombuffer(values, dtype=np.float32)) <= LARGEST_VALUE).all())

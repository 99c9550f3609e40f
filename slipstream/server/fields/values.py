"""The fields of a Triton request: read them, check them against the table of request fields, and
turn them into sampling parameters.

Fields go by the names of the generate endpoint; `repository/roles.py` translates the tensors of
each release's repositories into them. An error uses the name that the client used.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.engine.constraints.guided import KINDS
from slipstream.engine.sampling_params import Guide, SamplingParams
from slipstream.repository.config import ModelConfig
from slipstream.request_fields.field import PYTHON_TYPES, Range, Words
from slipstream.request_fields.sampling_rules import triton_temperature
from slipstream.request_fields.table import ALIASES, BY_PARAMETER, FIELDS
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.kserve.tensors import Tensor

# The only supported value of the parameter request_type. The others are for disaggregated serving.
_WHOLE = "context_and_generation"
_PARAMETER_TYPES: Mapping[str, tuple[type, ...]] = {
    "BOOL": (bool,),
    "INT32": (int,),
    "UINT64": (int,),
    "FP32": (int, float),
    "BYTES": (str,),
}

MESSAGES = "messages"
UNDECLARED = (
    "A conversation is taken by models whose config.pbtxt declares the input "
    '{ name: "messages" data_type: TYPE_STRING dims: [ 1 ] optional: true }.'
)
_TABLE_FIELDS = ("prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_id")

_CHECKED_AT_ONCE = 4096  # numbers

NEVER = -1  # value of end_id: no token ends the text

EncodeWord = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A field of a request: the name that the client used and its tensor."""

    name: str
    tensor: Tensor

    @property
    def value(self) -> Any:
        """Return the first value of the tensor, None if it is empty."""
        return self.tensor.first


class RequestFields(Mapping[str, FieldValue]):
    """The fields of one request, within their bounds, by the names of the field table.

    The getters return a default for a field that is missing or has no value.
    """

    def __init__(self, fields: dict[str, FieldValue]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> FieldValue:
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def given(self, name: str) -> FieldValue | None:
        """Return the field if it has a value."""
        field = self._fields.get(name)
        return None if field is None or field.value is None else field

    def value(self, name: str, default: Any = None) -> Any:
        """Return the first value of a field."""
        field = self.given(name)
        return default if field is None else field.value

    def integer(self, name: str, default: int = 0) -> int:
        return int(self.value(name, default))

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.value(name, default))

    def text(self, name: str) -> str:
        """Return the first text of a field, empty if there is none."""
        return self._fields[name].tensor.text() if name in self._fields else ""

    def texts(self, name: str) -> list[str]:
        return self._fields[name].tensor.texts() if name in self._fields else []

    def numbers(self, name: str) -> list[Any]:
        """Return all numbers of a field."""
        return self._fields[name].tensor.values() if name in self._fields else []

    def require(self, name: str, label: str) -> FieldValue:
        """Return a field that must have a value. `label` is the name that the client knows.

        Triton checks that required inputs are sent, but not that they have values.
        """
        field = self.given(name)
        if field is None:
            raise InferenceError(f"{label} is required")
        return field


def check_batch(request: InferRequest, config: ModelConfig) -> None:
    """Refuse a request with several prompts: in-flight batching combines requests instead."""
    if config.max_batch_size > 0 and any(
        tensor.shape[0] != 1 for tensor in request.inputs.values()
    ):
        raise InferenceError("Inflight batching backend expects requests with batch size of 1.")


def read_request_fields(request: InferRequest, names: Mapping[str, str]) -> RequestFields:
    """Return the fields of a request after checking their bounds. `names`: input → field."""
    fields = {
        names.get(name, name): FieldValue(name, tensor) for name, tensor in request.inputs.items()
    }
    for name, value in request.parameters.items():
        field = ALIASES.get(name, name)
        if name in BY_PARAMETER and field not in fields:
            tensor = _parameter_tensor(name, BY_PARAMETER[name].datatype, value)
            fields[field] = FieldValue(name, tensor)
    for field, given in fields.items():
        _check(field, given)
    request_type = request.parameters.get("request_type", _WHOLE)
    if request_type != _WHOLE:
        raise InferenceError(
            f"request_type {request_type!r} is not supported by this server: "
            "it computes prompt and output itself",
            Code.UNSUPPORTED,
        )
    return RequestFields(fields)


def _parameter_tensor(name: str, datatype: str, value: Any) -> Tensor:
    """Return the tensor of a value that a client sent as a request parameter."""
    if type(value) not in _PARAMETER_TYPES[datatype]:
        raise InferenceError(f"{name} must be of type {datatype}, got {value!r}")
    # Wide types keep the number as it was sent, so that an error can quote it.
    wide = {"INT32": "INT64", "FP32": "FP64"}.get(datatype, datatype)
    try:
        item = value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError:  # other texts would become equal if they were replaced
        raise InferenceError(f"{name} must be UTF-8 text") from None
    try:
        return Tensor.from_values(name, wide, (1, 1), [item])
    except OverflowError:
        raise InferenceError(f"{name} must be of type {datatype}, got {value!r}") from None


def _check(name: str, given: FieldValue) -> None:
    field = FIELDS.get(name)
    if field is None:
        raise InferenceError(f"{given.name} is not supported by this server", Code.UNSUPPORTED)
    bound = field.triton_bound or field.bound
    if isinstance(bound, Range):
        _check_numbers(bound, given)
    elif isinstance(bound, Words):
        _check_words(bound, given)
    elif field.unsupported_reason and _asks_for_something(given):
        raise InferenceError(
            f"{given.name} is not supported by this server: {field.unsupported_reason}",
            Code.UNSUPPORTED,
        )


def _asks_for_something(given: FieldValue) -> bool:
    return given.value is not None and given.value is not False and given.value != b""


def _check_numbers(bound: Range, given: FieldValue) -> None:
    data = given.tensor.data
    if (
        len(data) > 16
        and isinstance(data, np.ndarray)
        and np.isfinite(data).all()
        and not bound.problem(data.min().item())
        and not bound.problem(data.max().item())
    ):
        return  # fast path for tensors as long as the vocabulary
    for start in range(0, len(data), _CHECKED_AT_ONCE):
        values = data[start : start + _CHECKED_AT_ONCE]
        numbers: list[Any] = values.tolist() if isinstance(values, np.ndarray) else values
        for value in numbers:
            problem = bound.problem(value)
            if problem:
                raise InferenceError(f"{given.name} {problem}, got {value}")


def _check_words(bound: Words, given: FieldValue) -> None:
    words = given.tensor.strings()
    if len(words) > bound.count:
        raise InferenceError(
            f"{given.name} must hold at most {bound.count} words, got {len(words)}"
        )
    longest = max((len(word) for word in words), default=0)
    if longest > bound.bytes:
        raise InferenceError(
            f"a word of {given.name} must have at most {bound.bytes} bytes, got {longest}"
        )


def check_tokens(prompt: Sized, longest: int) -> None:
    if len(prompt) > longest:
        raise too_long(len(prompt), longest)


def too_long(tokens: int, longest: int) -> InferenceError:
    return InferenceError(f"Prompt length ({tokens}) exceeds maximum input length ({longest}).")


def check_prompt_length(
    given: FieldValue, max_input_tokens: int, surely_exceeds: Callable[[int, int], bool]
) -> None:
    """Reject, without tokenizing it, a text that has too many tokens.

    `surely_exceeds`: the method of the tokenizer.
    """
    size = len(given.value)
    if surely_exceeds(size, max_input_tokens):
        text = f"Prompt length (over {max_input_tokens}, {given.name} has {size} bytes)"
        raise InferenceError(f"{text} exceeds maximum input length ({max_input_tokens}).")


def check_prompt(
    fields: RequestFields, names: Mapping[str, str], parameters: Mapping[str, Any]
) -> None:
    """Check that exactly one field has the prompt. `names`: field → input of the model."""
    text = fields.get("text_input")
    messages = fields.get(MESSAGES)
    if messages is None and MESSAGES in parameters:
        raise InferenceError(f"{MESSAGES} is not an input of this model. {UNDECLARED}")
    if text is not None and messages is not None:
        raise InferenceError(
            f"{text.name} and {messages.name} cannot be given together: send one of them"
        )
    if fields.given("text_input") is None and fields.given(MESSAGES) is None:
        known = [names[field] for field in ("text_input", MESSAGES) if field in names]
        raise InferenceError(f"{' or '.join(known)} is required")


def refuse_prompt_table(fields: RequestFields, engine: str) -> None:
    """Reject a prompt table on a text model, whose prompts have no ids beyond the vocabulary."""
    for field in _TABLE_FIELDS:
        if fields.value(field, 0) != 0:
            raise InferenceError(
                f"{fields[field].name} works with token ids beyond the vocabulary, which a text "
                f"cannot have: send it and the ids to '{engine}'"
            )


# -- sampling parameters


def sampling_params(fields: RequestFields, encode_word: EncodeWord) -> SamplingParams:
    """Return the sampling parameters of a request. `encode_word` returns the tokens of a text.

    `triton_temperature` decides whether it samples. A request without a seed gets a random one.
    """
    values: dict[str, Any] = {"max_tokens": 0}
    for name, given in fields.items():
        field = FIELDS[name]
        value = given.value if field.copied_unchanged else None
        if value is not None:
            values[field.parameter] = PYTHON_TYPES[field.datatype](value)
    if "seed" not in values:
        values["seed"] = secrets.randbits(64)
    values["temperature"] = triton_temperature(values)
    if values.get("top_p", 0.0) <= 0.0:
        values["top_p"] = 1.0  # off
    end_id = fields.integer("end_id", NEVER)
    return SamplingParams(
        **values,
        end_ids=() if end_id == NEVER else (end_id,),
        logit_bias=_logit_bias(fields, encode_word),
        guide=_guide(fields),
    )


def sequence_count(fields: RequestFields) -> int:
    """Return how many answers to the prompt are requested."""
    return fields.integer("num_return_sequences", 1)


def cache_salt(fields: RequestFields) -> str:
    """Return the salt. Requests with different salts share no cached blocks."""
    return fields.text("cache_salt")


def never_ends(fields: RequestFields) -> bool:
    """Return whether the request says that no token ends the text."""
    return bool(fields.value("end_id") == NEVER)


def _guide(fields: RequestFields) -> Guide | None:
    kind = fields.text("guided_decoding_guide_type")
    guide = fields.text("guided_decoding_guide")
    if not kind and not guide:
        return None
    if kind not in KINDS:
        raise InferenceError(
            f"guided_decoding_guide_type must be one of {', '.join(KINDS)}, got '{kind}'"
        )
    if not guide and kind != "json":
        raise InferenceError(
            f"guided_decoding_guide is required where guided_decoding_guide_type is {kind}"
        )
    return Guide(kind, guide)


def _logit_bias(fields: RequestFields, encode_word: EncodeWord) -> tuple[tuple[int, float], ...]:
    """Return the bias of tokens. A word's weight is added at each of its tokens, as upstream."""
    words = fields.texts("embedding_bias_words")
    weights = fields.numbers("embedding_bias_weights")
    if len(words) != len(weights):
        raise InferenceError(
            "embedding_bias_words must have same dimension as embedding_bias_weights, "
            f"got {len(words)} words and {len(weights)} weights"
        )
    bias: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        for token in encode_word(word) if word else []:
            bias[token] = bias.get(token, 0.0) + weight
    for token, weight in enumerate(fields.numbers("embedding_bias")):
        if weight:
            bias[token] = bias.get(token, 0.0) + weight
    return tuple(bias.items())


def bias_words_size(fields: RequestFields) -> int:
    """Return the bytes of the words that `sampling_params` tokenizes."""
    given = fields.get("embedding_bias_words")
    return 0 if given is None else sum(map(len, given.tensor.strings()))


def read_words(fields: RequestFields, field: str, comma_separated: bool) -> list[str]:
    """Return the words of a list. The first releases sent one text with commas between words."""
    texts = fields.texts(field)
    if comma_separated:
        texts = [word.strip() for word in ",".join(texts).split(",")]
    return [word for word in texts if word]


def unpack_words(tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the words of the engine's layout [2, L]: all ids, then the ends of words, then -1."""
    values = tensor.values()
    length = len(values) // 2
    ids = values[:length]
    words = []
    start = 0
    for end in values[length:]:
        if end < 0:
            break
        if not start <= end <= length:
            raise InferenceError(
                f"{tensor.name}: the offsets must not decrease, and must lie within its ids"
            )
        words.append(tuple(ids[start:end]))
        start = end
    return [word for word in words if word]


def pack_words(words: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """Return (L, values) of words in the engine's layout [2, L]. The reverse of `unpack_words`."""
    ids = list(itertools.chain.from_iterable(words))
    ends = list(itertools.accumulate(len(word) for word in words))
    length = max(1, len(ids), len(ends))
    return length, ids + [0] * (length - len(ids)) + ends + [-1] * (length - len(ends))

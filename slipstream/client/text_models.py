"""Text to tokens and back, with a local tokenizer or with the server's text models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy

from slipstream.client.connection import Connection, Request, ServerError
from slipstream.client.tensors import Array, first_text, scalar, texts


class Prompt(NamedTuple):
    tokens: list[int]
    end_id: int | None
    pad_id: int | None


class Tokenizer(Protocol):
    eos_id: int | None
    pad_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class LocalTokenizer:
    """A tokenizer in the client. It adds the tokens at the start that the tokenizer adds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Prompt:
        end_id = self._tokenizer.eos_id
        pad_id = self._tokenizer.pad_id
        tokens = self._tokenizer.encode(text)
        return Prompt(tokens, end_id, end_id if pad_id is None else pad_id)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


class ServerTokenizer:
    """The models `preprocessing` and `postprocessing` of the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def encode(self, text: str) -> Prompt:
        request = Request("preprocessing", preprocessing_inputs([text], 1))
        outputs = self._connection.infer(request).outputs
        count = int(outputs["REQUEST_INPUT_LEN"][0][0])
        tokens = [int(token) for token in outputs["INPUT_ID"][0][:count]]
        end_id, pad_id = (_first_number(outputs.get(name)) for name in ("OUT_END_ID", "OUT_PAD_ID"))
        return Prompt(tokens, end_id, pad_id)

    def decode(self, tokens: list[int]) -> str:
        return postprocess(self._connection, *token_arrays(tokens))


TextModels = LocalTokenizer | ServerTokenizer


def _first_number(array: Array | None) -> int | None:
    return None if array is None else int(array.reshape(-1)[0])


def preprocessing_inputs(
    prompts: Sequence[str],
    output_length: int,
    bad_words: Sequence[str] = ("",),
    stop_words: Sequence[str] = ("",),
) -> dict[str, Array]:
    """Return the tensors for the model `preprocessing`. All prompts have the same word lists."""
    batch = len(prompts)
    return {
        "QUERY": texts(*([prompt] for prompt in prompts)),
        "REQUEST_OUTPUT_LEN": numpy.repeat(scalar(output_length), batch, axis=0),
        "BAD_WORDS_DICT": texts(*[list(bad_words)] * batch),
        "STOP_WORDS_DICT": texts(*[list(stop_words)] * batch),
    }


def token_arrays(tokens: list[int]) -> tuple[Array, Array]:
    """Return the ids [1, 1, n] and the length [1, 1] for the model `postprocessing`."""
    return numpy.array([[tokens]], dtype=numpy.int32), scalar(len(tokens))


def postprocess(
    connection: Connection, ids: Array, lengths: Array, model: str = "postprocessing"
) -> str:
    """Return the text of ids [1, 1, n].

    The tensors that the model requires differ between releases, so they are tried in turn.
    """
    required = {"TOKENS_BATCH": ids}
    sized = {**required, "SEQUENCE_LENGTH": lengths}
    with_log_probs = {
        **sized,
        "CUM_LOG_PROBS": numpy.zeros((1, 1), dtype=numpy.float32),
        "OUTPUT_LOG_PROBS": numpy.zeros((1, 1, 1), dtype=numpy.float32),
    }
    first_error: ServerError | None = None
    for inputs in (sized, with_log_probs, required):
        try:
            answer = connection.infer(Request(model, inputs, outputs=("OUTPUT",)))
            return first_text(answer.outputs["OUTPUT"])
        except ServerError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error

"""Text to tokens and back for a client: with a tokenizer of its own, or by asking the server's text
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy

from slipstream.client.connection import Connection, Request, ServerError
from slipstream.client.tensors import Array, texts


class Prompt(NamedTuple):
    tokens: list[int]
    end_id: int | None
    pad_id: int | None


class Tokenizer(Protocol):
    eos_id: int | None
    pad_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class LocalWords:
    """A tokenizer of the client's own; begin-of-text tokens are added, as a tokenizer does by
    default.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Prompt:
        end, pad = self._tokenizer.eos_id, self._tokenizer.pad_id
        return Prompt(self._tokenizer.encode(text), end, pad if pad is not None else end)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


class ServerWords:
    """The models `preprocessing` and `postprocessing` of the server, for a client that was given no
    tokenizer.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def encode(self, text: str) -> Prompt:
        length = numpy.ones((1, 1), dtype=numpy.int32)
        answer = self._connection.infer(
            Request(
                "preprocessing",
                {
                    "QUERY": texts([text]),
                    "REQUEST_OUTPUT_LEN": length,
                    "BAD_WORDS_DICT": texts([""]),
                    "STOP_WORDS_DICT": texts([""]),
                },
            )
        ).outputs
        count = int(answer["REQUEST_INPUT_LEN"][0][0])
        ends = [
            int(answer[name].reshape(-1)[0]) if name in answer else None
            for name in ("OUT_END_ID", "OUT_PAD_ID")
        ]
        return Prompt([int(token) for token in answer["INPUT_ID"][0][:count]], *ends)

    def decode(self, tokens: list[int]) -> str:
        ids = numpy.array([[tokens]], dtype=numpy.int32)
        lengths = numpy.array([[len(tokens)]], dtype=numpy.int32)
        return postprocess(self._connection, ids, lengths)


def postprocess(
    connection: Connection, ids: Array, lengths: Array, model: str = "postprocessing"
) -> str:
    """The text of ids [1, 1, n]. Which other tensors the model must be given changed from release
    to release.
    """
    required = {"TOKENS_BATCH": ids}
    sized = {**required, "SEQUENCE_LENGTH": lengths}
    passed_through = {
        **sized,
        "CUM_LOG_PROBS": numpy.zeros((1, 1), dtype=numpy.float32),
        "OUTPUT_LOG_PROBS": numpy.zeros((1, 1, 1), dtype=numpy.float32),
    }
    refusal: ServerError | None = None
    for inputs in (sized, passed_through, required):
        try:
            answer = connection.infer(Request(model, inputs, outputs=("OUTPUT",)))
            return bytes(answer.outputs["OUTPUT"].reshape(-1)[0]).decode(errors="replace")
        except ServerError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


Words = LocalWords | ServerWords

"""Long JSON is read in pieces with the result of the decoder that reads it at once."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from slipstream.server.kserve import long_json, triton_json
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.long_json import (
    LONG_JSON,
    LongArray,
    PieceReader,
    TooManyElements,
    decode_json,
)
from slipstream.server.kserve.tensors import read_values

SCALARS = [1, -2.5, 0, 10**20, True, False, None, "a", 'é\n"\\x', "😀😀", -1, 1e5]
DAMAGES = ["", ",", "[", "]", "}", '"', "\\", "1", "e", "."]


def value(draw: random.Random, depth: int = 5) -> Any:
    kind = draw.random()
    if depth == 0 or kind < 0.4:
        return draw.choice(SCALARS)
    if kind < 0.75:
        return [value(draw, depth - 1) for _ in range(draw.randrange(6))]
    if kind < 0.85:
        return [draw.randrange(-5, 500) for _ in range(draw.randrange(40))]
    return {str(key): value(draw, depth - 1) for key in range(draw.randrange(5))}


def read(text: str) -> Any:
    return PieceReader(text, json.JSONDecoder(), dict, 400, False).read()


def read_or_refuse(reader: Any, text: str) -> Any:
    try:
        return reader(text)
    except ValueError:
        return ValueError


@pytest.mark.parametrize("piece", [16, 40, 200])
def test_pieces_of_any_size_give_the_same_value(monkeypatch, piece):
    monkeypatch.setattr(long_json, "_PIECE", piece)
    draw = random.Random(piece)
    for _ in range(500):
        expected = value(draw)
        text = json.dumps(
            expected, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, None, 1])
        )
        assert read(text) == expected
        place = draw.randrange(len(text))
        damaged = text[:place] + draw.choice(DAMAGES) + text[place + draw.randrange(2) :]
        assert str(read_or_refuse(read, damaged)) == str(read_or_refuse(json.loads, damaged))


ESCAPES = ["a", "é", r"\n", r"\"", r"\\", r"\u00e9", r"\ud83d\ude00", r"\ud83d", r"\ude00", r"\/"]


class RecordingDecoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        decoded, end = super().raw_decode(s, idx)
        self.longest = max(self.longest, end - idx)
        return decoded, end


def test_long_strings_of_escapes_are_decoded_in_pieces(monkeypatch):
    monkeypatch.setattr(long_json, "_PIECE", 40)
    draw = random.Random(1)
    for _ in range(300):
        escapes = draw.sample(ESCAPES, draw.randint(1, len(ESCAPES)))
        text = '"' + "".join(draw.choices(escapes, k=200)) + '"'
        decoder = RecordingDecoder()
        assert PieceReader(text, decoder, dict, 400, False).read() == json.loads(text)
        assert decoder.longest <= 42
        damaged = text[: draw.randrange(1, len(text))]
        assert read_or_refuse(read, damaged) == read_or_refuse(json.loads, damaged)


def test_half_a_surrogate_pair_is_found_at_the_border_of_two_pieces():
    for padding in range(30):
        text = " " * (2 * LONG_JSON - padding) + r'"\ud800"'
        with pytest.raises(ValueError, match="surrogates not allowed"):
            decode_json(text.encode())


@pytest.mark.parametrize("datatype", ["INT32", "UINT8", "INT64", "UINT64", "FP32", "BOOL", "BYTES"])
def test_tensors_of_long_arrays_are_those_of_short_ones(monkeypatch, datatype):
    def numbers(text: str, parse: Any) -> Any:
        try:
            return list(read_values("x", datatype, parse(text.encode())))
        except InferenceError as error:
            return error.message

    monkeypatch.setattr(long_json, "_PIECE", 30)
    draw = random.Random(7)
    kinds: list[list[Any]] = [
        [1, -300, 70000],
        [2**31, 2**63, 2**64, -(2**63), 5],
        [0.5, 1e39, 3],
        [1, 0.5, True, "a", None],
        [True, False],
    ]
    for _ in range(300):
        scalars = draw.choice(kinds)

        def array(depth: int, scalars: list[Any] = scalars) -> list[Any]:
            return [
                array(depth - 1) if depth and draw.random() < 0.6 else draw.choice(scalars)
                for _ in range(draw.randrange(1, 30))
            ]

        text = json.dumps(array(draw.randrange(3)))
        expected = numbers(text, triton_json.parse_json)
        assert numbers(text, triton_json._parse_long_json) == expected


def test_a_long_array_of_integers_holds_no_python_objects():
    text = f"[[{','.join(['11'] * 100_000)}]]"
    (found,) = triton_json.parse_json(text.encode())
    assert isinstance(found, LongArray)
    assert found.count == 100_000
    assert all(isinstance(piece, np.ndarray) for piece in found.pieces)


def test_errors_of_long_bodies_have_tritons_text_and_place():
    body = b'{"text_input":"' + b"a" * LONG_JSON + b'",}'
    with pytest.raises(
        InferenceError, match=f"Missing a name for object member. at {LONG_JSON + 17}"
    ):
        triton_json.parse_json(body)


@pytest.mark.parametrize(
    "text", ['"\\ud800"', "NaN", '"\x01"', "[1,]", "{} {}", "01", "", "[" * 500 + "]" * 500]
)
def test_what_msgspec_refuses_is_refused_in_pieces(text):
    body = f"[{json.dumps('a' * LONG_JSON)},{text}]".encode()
    with pytest.raises(ValueError):
        decode_json(body)


def test_arrays_of_requests_without_tensors_have_a_bound():
    with pytest.raises(TooManyElements, match="an array of over 1048576 elements"):
        decode_json(b"[" + b",".join([b"1"] * (1 << 20)) + b",1]")
    members = ",".join(f'"{index}":1' for index in range((1 << 16) + 1))
    with pytest.raises(TooManyElements, match="an object of over 65536 members"):
        decode_json(f"{{{members}}}".encode())

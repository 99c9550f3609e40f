"""JSON is read and written as rapidjson does."""

from __future__ import annotations

import json
import math
import struct
from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.server.kserve import triton_json as json_reader
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.triton_json import (
    MAX_DEPTH,
    ExactReader,
    Members,
    Values,
    parse_json,
    write_double,
    write_parts,
    write_string,
)

texts = st.text(st.characters(exclude_categories=["Cs"]))  # without unpaired surrogates
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(texts, children, max_size=4),
    max_leaves=10,
)


def plain(value: object) -> object:
    if isinstance(value, Members):
        return {name: plain(child) for name, child in value}
    return [plain(child) for child in value] if isinstance(value, list) else value


@settings(deadline=None)
@given(values, st.booleans())
def test_both_readers_read_written_json(value: object, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert plain(parse_json(body)) == value
    assert plain(ExactReader(body).parse_document()) == value


@settings(deadline=None)
@given(st.binary(max_size=40) | st.text('{}[]":,\\u0dtruefalsn1.e-+ ', max_size=30).map(str.encode))
@example(b'{"a":"\\ud83d"}')
@example(b"[1e999]")
@example(b"[NaN,Infinity,-Inf]")
def test_fast_and_exact_readers_agree(body: bytes) -> None:
    def outcome(read: object) -> str:
        try:
            return repr(plain(read()))  # type: ignore[operator]
        except InferenceError as error:
            return error.message

    assert outcome(lambda: parse_json(body)) == outcome(ExactReader(body).parse_document)


@pytest.mark.parametrize(
    ("body", "text", "offset"),
    [
        (b"", "The document is empty.", 0),
        (b" \t\r\n", "The document is empty.", 4),
        (b"{}x", "The document root must not be followed by other values.", 2),
        (b"nul", "Invalid value.", 3),
        (b"trxe", "Invalid value.", 2),
        (b"+1", "Invalid value.", 0),
        (b"-", "Invalid value.", 1),
        (b"Nan", "Invalid value.", 2),
        (b"{1:2}", "Missing a name for object member.", 1),
        (b'{"a" 1}', "Missing a colon after a name of object member.", 5),
        (b'{"a":1 "b":2}', "Missing a comma or '}' after an object member.", 7),
        (b"[1 2]", "Missing a comma or ']' after an array element.", 3),
        (b"[1,]", "Invalid value.", 3),
        (rb'"\u12x4"', "Incorrect hex digit after \\u escape in string.", 1),
        (rb'"\ud800\u0041"', "The surrogate pair in string is invalid.", 1),
        (rb'"a\q"', "Invalid escape character in string.", 2),
        (b'"abc', "Missing a closing quotation mark in string.", 4),
        (b'"a\nb"', "Invalid escape character in string.", 2),
        (b"[1e309]", "Number too big to be stored in double.", 1),
        (b"[1" + b"0" * 5000 + b"]", "Number too big to be stored in double.", 1),
        (b"1.", "Miss fraction part in number.", 2),
        (b"1e+", "Miss exponent in number.", 3),
        (b"01", "The document root must not be followed by other values.", 1),
        (b"\xef\xbb\xbf{", "Missing a name for object member.", 4),
    ],
)
def test_error_texts_and_offsets(body: bytes, text: str, offset: int) -> None:
    with pytest.raises(InferenceError) as caught:
        parse_json(body)
    assert caught.value.message == f"failed to parse the request JSON buffer: {text} at {offset}"
    assert caught.value.status == 500


def test_json_beyond_the_standard_is_accepted_as_by_rapidjson() -> None:
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]
    assert parse_json(b'"\xff\xfe"').encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert parse_json(b"[1]\0garbage") == [1]
    half = parse_json(rb'"a\udc00"').encode("utf-8", "surrogateescape")
    assert half == "a\udc00".encode("utf-8", "surrogatepass")
    assert math.isnan(parse_json(b"NaN"))
    assert parse_json(b"[Inf,-Infinity]") == [math.inf, -math.inf]
    assert list(parse_json(b'{"a":1,"a":2}')) == [("a", 1), ("a", 2)]


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_depth_is_bounded(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"1}"
    deep = opening * MAX_DEPTH + (b"" if opening == b"[" else b"1") + closing[-1:] * MAX_DEPTH
    parse_json(deep)
    for levels in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(InferenceError, match=f"More than {MAX_DEPTH} levels"):
            parse_json(opening * levels)
    too_deep = (
        opening * (MAX_DEPTH + 1)
        + (b"" if opening == b"[" else b"1")
        + closing[-1:] * (MAX_DEPTH + 1)
    )
    with pytest.raises(InferenceError, match=f"More than {MAX_DEPTH} levels"):
        parse_json(too_deep)


def test_long_prompt_with_brackets_and_escapes_stays_on_the_fast_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_reader, "ExactReader", None)
    text = "[{ \u00e9 }]" * 1000
    assert parse_json(json.dumps({"text_input": text}).encode()) == [("text_input", text)]


@settings(deadline=None)
@given(st.floats())
def test_doubles_are_written_so_that_they_read_back(number: float) -> None:
    written = float(write_double(number).decode().replace("Infinity", "inf"))
    assert struct.pack("d", written) == struct.pack("d", number) or math.isnan(number)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.0"),
        (3.0, "3.0"),
        (0.10000000149011612, "0.10000000149011612"),
        (1e20, "100000000000000000000.0"),
        (1e21, "1e21"),
        (1.5e22, "1.5e22"),
        (0.000001, "0.000001"),
        (1e-7, "1e-7"),
        (-2.5e-10, "-2.5e-10"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
    ],
)
def test_doubles_are_formatted_as_by_rapidjson(number: float, text: str) -> None:
    assert write_double(number) == text.encode()


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_become_a_string_that_reads_back(data: bytes) -> None:
    written = write_string(data)
    assert ExactReader(written).parse_string().encode("utf-8", "surrogateescape") == data
    assert not any(byte < 0x20 for byte in written)


def test_long_lists_are_written_like_short_ones() -> None:
    many = array("f", [0.5, -1.25, 3.0] * 50_000)
    written = [b"".join(write_parts([Values(given)])) for given in (many, [], [True, None, b"a"])]
    assert written == [b",".join([b"0.5,-1.25,3.0"] * 50_000), b"", b'true,null,"a"']

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slipstream.weights.parameters import TensorSlot
from slipstream.weights.tensor_file import (
    TensorFileError,
    file_size,
    header_bytes,
    read_header,
    write_tensors,
)

LAYOUT = {
    "a": TensorSlot("F32", (2, 3)),
    "empty": TensorSlot("F32", (0,)),
    "b": TensorSlot("I8", (5,)),
}
A, B = np.arange(6, dtype=np.float32), np.arange(5, dtype=np.int8)


def test_a_file_streamed_in_pieces_is_read_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "file"
    counts: list[int] = []
    digest = write_tensors(path, LAYOUT, [("a", A[:2]), ("a", A[2:]), ("b", B)], counts.append)
    stored = load_file(path)
    assert stored["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert stored["b"].tolist() == [0, 1, 2, 3, 4]
    assert stored["empty"].shape == (0,)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (counts, file_size(LAYOUT)) == ([8, 16, 5], path.stat().st_size)
    assert len(header_bytes(LAYOUT)) % 64 == 0


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file(
        {"x": torch.zeros(3, 2, dtype=torch.bfloat16), "y": torch.zeros((), dtype=torch.int64)},
        path,
    )
    header = read_header(path)
    assert header.slots == {"x": TensorSlot("BF16", (3, 2)), "y": TensorSlot("I64", ())}
    assert header.file_bytes == path.stat().st_size


@pytest.mark.parametrize(
    "pieces",
    [
        [("b", B), ("a", A)],
        [("a", A), ("a", A), ("b", B)],
        [("a", A), ("b", np.arange(6, dtype=np.int8))],
        [("a", A), ("c", B)],
    ],
)
def test_pieces_out_of_order_repeated_too_long_or_unknown_are_refused(
    tmp_path: Path, pieces: list
) -> None:
    with pytest.raises(ValueError, match="twice, out of order or too long"):
        write_tensors(tmp_path / "file", LAYOUT, pieces)


def test_tensors_that_were_not_written_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not written: b"):
        write_tensors(tmp_path / "file", LAYOUT, [("a", A)])


def _header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def _escaped_entries(count: int) -> bytes:
    entries = (
        f'"{position}":{{"dtype":"U8","shape":[0],"data\\u005foffsets":[0,0]}}'
        for position in range(count)
    )
    return b"{" + ",".join(entries).encode() + b"}"


def _entry(**change: object) -> bytes:
    header = json.dumps(
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut short in its header"),
        (b"PK\x03\x04 a zip file, say", "not a safetensors file"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "cut short in its header"),
        (_entry()[:-1], "holds 7 bytes of tensors where its header says 8: cut short"),
        (_entry() + b"x", "bytes follow the last tensor"),
        (_entry(shape=[3]), "does not occupy"),
        (_entry(data_offsets=[1, 9]), "does not occupy"),
        (_entry(data_offsets=[0]), "entry for t cannot be read"),
        (_entry(shape=[-2]), "entry for t cannot be read"),
        (_entry(dtype="F4"), "has type F4"),
        ((2).to_bytes(8, "little") + b"[]", "an entry of its header cannot be read"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "not JSON"),
        ((90_000).to_bytes(8, "little") + b'{"a":{"b":' + b"[" * 89_990, "not JSON"),
        (_entry(dtype=4), "an entry of its header cannot be read"),
        (_entry(shape=[1.5]), "an entry of its header cannot be read"),
        # refused before it is parsed
        (_header(b"{" * 140_000), "more than 131072 tensors"),
        (_header(b" " * (17 << 20)), "at most 16777216 are read"),
        # as written by somebody who knows which text would be counted
        (_header(_escaped_entries(140_000)), "more than 131072 tensors"),
        (_header(b'{"a": [' + b"[]," * 5_000_000), "an entry of its header cannot be read"),
    ],
)
def test_damaged_files_are_refused_with_the_reason(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(content)
    with pytest.raises(TensorFileError, match=message) as refusal:
        read_header(path)
    assert str(path) in str(refusal.value)


def test_metadata_may_have_the_names_of_a_tensors_fields(tmp_path: Path) -> None:
    path = tmp_path / "file"
    metadata = {"dtype": "float16", "shape": "2 x 3", "data_offsets": "none", "format": "pt"}
    save_file({"x": torch.zeros(3, 2)}, path, metadata)
    assert read_header(path).slots == {"x": TensorSlot("F32", (3, 2))}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_file_is_read_or_refused_without_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated"
    content = bytearray(
        header_bytes({"a": TensorSlot("F32", (2,)), "b": TensorSlot("I8", (4,))}) + bytes(12)
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        header = read_header(path)
    except TensorFileError:
        return
    assert sum(slot.nbytes for slot in header.slots.values()) < len(content)

"""Changes inputs at random: bytes, pieces that parsers know, and parts of other inputs."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fuzzing import PIECES

_PIECES = [
    *PIECES,
    b"\r\n",
    b"\x00" * 8,
    b"\xff" * 8,
    b"9" * 400,
    b"[" * 200,
    b'{"a":' * 100,
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\xf0\x9f\x98\x80",
    b"{{ ",
    b" }}",
    b"{% for a in range(9) %}",
    b"{% endfor %}",
    b"$ref",
    b"#/$defs/a",
    b"(?:",
    b"*",
    b"{0,999999}",
]


def mutate(seed: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    data = bytearray(seed)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        place = chance.randrange(len(data) + 1)
        kind = chance.randrange(6)
        if kind == 0 and data:
            data[place - 1] = chance.randrange(256)
        elif kind == 1 and data:
            data[place - 1] ^= 1 << chance.randrange(8)
        elif kind == 2:
            data[place:place] = chance.choice(_PIECES)
        elif kind == 3:
            del data[place : place + chance.choice((1, 4, 16, 64))]
        elif kind == 4:
            other = chance.choice(others)
            start = chance.randrange(len(other) + 1)
            data[place:place] = other[start : start + chance.randrange(64)]
        else:
            data[place:place] = data[place : place + chance.randrange(1, 64)]
    return bytes(data)

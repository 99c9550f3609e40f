"""Pieces of Lark grammars for answers. Marks that are special tokens are written as token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.server.text.tokenizer import Tokenizer

ANY_TEXT = r"/(.|\n)*/"


def special_ids(tokenizer: Tokenizer, marks: Sequence[str]) -> dict[str, int]:
    """Return the token ids of the marks that are special tokens."""
    found = {}
    for mark in marks:
        tokens = tokenizer.encode(mark, add_special_tokens=False)
        if len(tokens) == 1 and tokens[0] in tokenizer.special_ids:
            found[mark] = tokens[0]
    return found


def spell(text: str, ids: Mapping[str, int]) -> str:
    """Return the Lark expression of a text, with token ids for the special tokens in it."""
    if not ids:
        return _quote(text)
    marks = "|".join([re.escape(mark) for mark in ids])
    pieces = [piece for piece in re.split(f"({marks})", text) if piece]
    return " ".join([f"<[{ids[piece]}]>" if piece in ids else _quote(piece) for piece in pieces])


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def regex_literal(text: str) -> str:
    """Return a text as part of a regular expression between slashes."""
    # llguidance takes neither escaped spaces nor newlines
    lines = [re.escape(line).replace("\\ ", " ").replace("/", "\\/") for line in text.split("\n")]
    return "\\n".join(lines)


@dataclass(frozen=True)
class Frame:
    """The grammar around an answer: what comes before its calls and its text.

    `before` is reasoning. `before_text` starts the text. `not_text` is a mark that `before` starts
    with, which text may not start with: the mark would be taken for text.
    """

    before: str = ""
    before_text: str = ""
    not_text: str = ""
    rules: Sequence[str] = ()
    ids: Mapping[str, int] = field(default_factory=dict)


NO_FRAME = Frame()

"""Parse protobuf's text format, as config.pbtxt files use it, into a tree with line numbers.

schema.py lists the valid fields. An unquoted `${name}`, which protobuf rejects, is parsed as a
placeholder: templates that were not filled completely are common, and their variables have
defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MAX_DEPTH = 64  # limit on nested messages; config.pbtxt needs 6
MAX_VALUES = 20_000  # limit on fields and items of lists; the largest templates have 700
MAX_NAME_CHARACTERS = 256  # of a field's name
MAX_STRING_CHARACTERS = 65_536  # of one string as written

Kind = Literal["string", "number", "word", "placeholder"]

_TOKEN = re.compile(
    r"""
    (?P<space>(?:[ \t\r\n\f\v\ufeff]++|\#[^\n]*+)++)
  | (?P<placeholder>\$\{[^{}\s]*\})
  | (?P<number>0[xX][0-9a-fA-F]+|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?[fF]?)
  | (?P<word>[A-Za-z_][A-Za-z0-9_.]*)
  | (?P<string>"(?:[^"\\\n]++|\\[^\n])*+"|'(?:[^'\\\n]++|\\[^\n])*+')
  | (?P<mark>[{}<>\[\]:,;-])
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(
    rb"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL
)
_OCTAL = re.compile(rb"[0-7]+")
_SIMPLE_ESCAPES = {
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
    b"\\": b"\\",
    b"'": b"'",
    b'"': b'"',
    b"?": b"?",
}
_CLOSING = {"{": "}", "<": ">"}
_MAX_CHARACTERS = {
    "word": MAX_NAME_CHARACTERS,
    "number": MAX_NAME_CHARACTERS,
    "placeholder": MAX_NAME_CHARACTERS,
    "string": MAX_STRING_CHARACTERS,
}


class PbtxtError(ValueError):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(f"line {line}: {text}")
        self.line = line
        self.text = text


@dataclass(frozen=True)
class Scalar:
    kind: Kind
    text: str  # string without quotes and escapes, name of a placeholder, or the text as written
    line: int


@dataclass(frozen=True)
class Message:
    fields: tuple[Field, ...]
    line: int


@dataclass(frozen=True)
class Field:
    """One `name: value`. A list is several fields of the same name, in order."""

    name: str
    value: Scalar | Message
    line: int


EMPTY_LIST = Message((), 0)  # the value of a field written as `name: [ ]`


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def parse_pbtxt(text: str) -> Message:
    return _Parser(_tokens(text)).document()


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    line = 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PbtxtError(line, _unreadable(text[position : position + 2]))
        kind = match.lastgroup or ""
        most = _MAX_CHARACTERS.get(kind)
        if most is not None and match.end() - position > most:
            raise PbtxtError(
                line, f"a {kind} of {match.end() - position} characters; at most {most} are read"
            )
        if kind != "space":
            yield _Token(kind, match.group(), line)
        line += match.group().count("\n")
        position = match.end()
    yield _Token("end", "the end of the file", line)


def _unreadable(rest: str) -> str:
    if rest[0] in "\"'":
        return "a string is not closed on its line"
    if rest.startswith("${"):
        return "a '${' placeholder is not closed with '}'"
    return f"unexpected character {rest[0]!r}"


class _Parser:
    def __init__(self, tokens: Iterator[_Token]) -> None:
        """`tokens` are read as they are needed: a mistake ends the work on a long file."""
        self.tokens = tokens
        self.next = next(tokens)
        self.depth = 0
        self.values = 0

    def take(self) -> _Token:
        token = self.next
        if token.kind != "end":
            self.next = next(self.tokens)
        return token

    def accept(self, *marks: str) -> bool:
        if self.next.kind == "mark" and self.next.text in marks:
            self.take()
            return True
        return False

    def document(self) -> Message:
        fields = tuple(self.fields(None))
        return Message(fields, 1)

    def fields(self, closing: str | None) -> Iterator[Field]:
        while True:
            token = self.next
            if closing is not None and self.accept(closing):
                return
            if token.kind == "end":
                if closing is None:
                    return
                raise PbtxtError(token.line, f"'{closing}' is missing before the end of the file")
            if token.kind != "word":
                raise PbtxtError(token.line, f"expected the name of a field, got {token.text}")
            yield from self.field(self.take())
            self.accept(",", ";")

    def count_value(self) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            raise PbtxtError(self.next.line, f"more than {MAX_VALUES} fields and items of lists")

    def field(self, name: _Token) -> Iterator[Field]:
        self.count_value()
        colon = self.accept(":")
        if self.accept("["):
            values = list(self.list_values())
            if not values:
                yield Field(name.text, EMPTY_LIST, name.line)
            for value in values:
                yield Field(name.text, value, value.line)
        elif self.next.kind == "mark" and self.next.text in _CLOSING:
            yield Field(name.text, self.message(), name.line)
        elif not colon:
            raise PbtxtError(
                self.next.line, f"expected ':' or '{{' after '{name.text}', got {self.next.text}"
            )
        else:
            yield Field(name.text, self.scalar(), name.line)

    def list_values(self) -> Iterator[Scalar | Message]:
        while not self.accept("]"):
            self.count_value()
            if self.next.kind == "mark" and self.next.text in _CLOSING:
                yield self.message()
            else:
                yield self.scalar()
            self.accept(",")

    def message(self) -> Message:
        opening = self.take()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise PbtxtError(opening.line, f"more than {MAX_DEPTH} levels of braces")
        fields = tuple(self.fields(_CLOSING[opening.text]))
        self.depth -= 1
        return Message(fields, opening.line)

    def scalar(self) -> Scalar:
        token = self.take()
        if token.kind == "string":
            return Scalar("string", self.string(token), token.line)
        if token.kind == "placeholder":
            return Scalar("placeholder", token.text[2:-1], token.line)
        if token.kind == "number":
            return Scalar("number", token.text, token.line)
        if token.kind == "word":
            return Scalar("word", token.text, token.line)
        if token.text == "-" and self.next.kind in ("number", "word"):
            signed = self.take()
            return Scalar("number", "-" + signed.text, token.line)
        raise PbtxtError(token.line, f"expected a value, got {token.text}")

    def string(self, first: _Token) -> str:
        pieces = [_unescape(first)]
        while self.next.kind == "string":  # adjacent strings are concatenated, as in C
            self.count_value()
            pieces.append(_unescape(self.take()))
        try:
            return b"".join(pieces).decode("utf-8")
        except UnicodeDecodeError:
            raise PbtxtError(first.line, "a string is not UTF-8") from None


def _unescape(token: _Token) -> bytes:
    body = token.text[1:-1].encode("utf-8")
    if b"\\" not in body:
        return body

    def replace(match: re.Match[bytes]) -> bytes:
        escape = match.group(1)
        if escape in _SIMPLE_ESCAPES:
            return _SIMPLE_ESCAPES[escape]
        if escape[:1] == b"x" and len(escape) > 1:
            return bytes([int(escape[1:], 16)])
        if _OCTAL.fullmatch(escape) and int(escape, 8) < 256:
            return bytes([int(escape, 8)])
        if escape[:1] in b"uU" and len(escape) > 1 and int(escape[1:], 16) < 0x110000:
            return chr(int(escape[1:], 16)).encode("utf-8", "surrogatepass")
        raise PbtxtError(
            token.line, f"unknown escape '\\{escape.decode('utf-8', 'replace')}' in a string"
        )

    return _ESCAPE.sub(replace, body)

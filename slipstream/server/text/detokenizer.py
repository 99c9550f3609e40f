"""Tokens to text as they come: the joined pieces are the text of all tokens decoded at once.

There is a detokenizer for each kind of decoder in a model's files. Its work is proportional to the
new tokens. It returns a character as soon as no later token can change it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import decoders

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Backend(Protocol):
    """A tokenizer library with one vocabulary. The caller checks ids and adds special tokens."""

    special_ids: frozenset[int]
    id_limit: int  # one more than the largest id
    # tokens that the files put before and after a text
    affixes: tuple[list[int], list[int]]
    # texts of "bos_token" and others that the folder's configuration does not name
    default_names: dict[str, str]

    @property
    def decoder(self) -> decoders.Decoder | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token(self, token_id: int) -> str | None: ...
    def id_of(self, token: str) -> int | None: ...


class Detokenizer(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


def detokenizer_factory(backend: Backend) -> Callable[[], Detokenizer]:
    """Return a function that creates the detokenizer of one text."""
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        token_bytes = _TokenBytes(backend)
        return lambda: ByteLevelDetokenizer(token_bytes)
    if fallback := _byte_fallback_steps(steps):
        replacements, strip = fallback
        token_parts = _TokenParts(backend, replacements)
        return lambda: ByteFallbackDetokenizer(token_parts, *strip)
    return lambda: WindowDetokenizer(backend)


def spelling(backend: Backend) -> tuple[Callable[[int], bytes], bool] | None:
    """The bytes a token writes wherever it stands, and whether a text's first space is left out.

    None where a token's text depends on its neighbours.
    """
    steps = _decoder_steps(backend)
    if [step["type"] for step in steps] in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return _TokenBytes(backend), False
    if fallback := _byte_fallback_steps(steps):
        replacements, (stripped, count) = fallback
        parts = _TokenParts(backend, replacements)

        def token_bytes(token_id: int) -> bytes:
            part = parts(token_id)
            return bytes([part]) if isinstance(part, int) else part.encode()

        return token_bytes, stripped == " " and count > 0
    return None


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    description = json.loads(backend.decoder.__getstate__())
    return description["decoders"] if description["type"] == "Sequence" else [description]


def _byte_fallback_steps(
    steps: list[dict[str, Any]],
) -> tuple[list[tuple[str, str]], tuple[str, int]] | None:
    """Return the replacements and the (character, count) to strip of a decoder like Llama 2's.

    None: the decoder has other steps.
    """
    kinds = [step["type"] for step in steps]
    if "ByteFallback" not in kinds:
        return None
    middle = kinds.index("ByteFallback")
    before, after = steps[:middle], steps[middle + 1 :]
    if any(step["type"] != "Replace" or "String" not in step["pattern"] for step in before):
        return None
    if [step["type"] for step in after] not in (["Fuse"], ["Fuse", "Strip"]) or after[-1].get(
        "stop"
    ):
        return None
    strip = (after[-1]["content"], after[-1]["start"]) if len(after) == 2 else (" ", 0)
    return [(step["pattern"]["String"], step["content"]) for step in before], strip


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's visible character for each byte. Visible ASCII characters are unchanged."""
    visible = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + i): byte for i, byte in enumerate(hidden)
    }


class _TokenBytes:
    """Returns the bytes of a byte-level token, from a cache with an entry per token."""

    _alphabet = _byte_level_alphabet()

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes(self._backend.token(token_id) or "")
        return found

    def _bytes(self, token: str) -> bytes:
        try:
            return bytes([self._alphabet[char] for char in token])
        except KeyError:  # an added token
            return token.encode()


class ByteLevelDetokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen): bytes in, whole characters out."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._token_bytes(token_id) for token_id in ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _TokenParts:
    """Returns the text of a token, or the byte of one such as <0xE6>, from a cache."""

    def __init__(self, backend: Backend, replacements: list[tuple[str, str]]) -> None:
        self._backend = backend
        self._replacements = replacements
        self._known: dict[int, str | int] = {}

    def __call__(self, token_id: int) -> str | int:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._part(self._backend.token(token_id) or "")
        return found

    def _part(self, token: str) -> str | int:
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token)
        return int(byte.group(1), 16) if byte else token


class ByteFallbackDetokenizer:
    """SentencePiece with byte tokens (Llama 2, Mistral).

    A run of byte tokens is text only if the whole run is valid UTF-8; otherwise each byte is one
    U+FFFD. A run is therefore held back until the token after it.
    """

    def __init__(
        self, token_parts: Callable[[int], str | int], strip_char: str, strip_count: int
    ) -> None:
        self._token_parts = token_parts
        self._run = bytearray()
        self._strip_char = strip_char
        self._strip_left = strip_count  # leading characters that may still be stripped

    def push(self, ids: Sequence[int]) -> str:
        pieces: list[str] = []
        for token_id in ids:
            part = self._token_parts(token_id)
            if isinstance(part, int):
                self._run.append(part)
            else:
                pieces += (self._end_run(), part)
        return self._strip("".join(pieces))

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text


class WindowDetokenizer:
    """Any other decoder: decodes new tokens after a few old ones and returns the difference.

    This is correct for decoders that only look at a token and its neighbours.
    """

    _CONTEXT_TOKENS = 4
    _LONGEST_CHARACTER_TOKENS = 4  # a UTF-8 character has at most four bytes

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        self._pending += ids
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < self._LONGEST_CHARACTER_TOKENS:
            return ""  # it may be the beginning of a character
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._new_text())

    def _new_text(self) -> str:
        old = self._backend.decode(self._context, skip_special_tokens=False)
        return self._backend.decode(self._context + self._pending, skip_special_tokens=False)[
            len(old) :
        ]

    def _take(self, text: str) -> str:
        self._context = (self._context + self._pending)[-self._CONTEXT_TOKENS :]
        self._pending = []
        return text

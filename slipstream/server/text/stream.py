"""The text of one request as its tokens arrive: whole characters only, cut at a stop word.

There is a detokenizer for each kind of decoder in a model's files. The joined pieces are the text
of all tokens decoded at once. Its work is proportional to the new tokens, and it returns a
character as soon as no later token can change it. A stop word is found wherever its pieces are cut,
and no part of it is sent before it is complete.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import decoders

if TYPE_CHECKING:
    from slipstream.server.text.tokenizer import Tokenizer

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
    @property
    def pair_affixes(self) -> tuple[list[int], list[int], list[int]]: ...
    @property
    def longest_token(self) -> int | None: ...
    def encode(self, text: str, most: int | None = None) -> list[int]: ...
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
    """Return a function for the bytes of a token, and whether a text's first space is dropped.

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
    before = steps[:middle]
    after = steps[middle + 1 :]
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
        data = b"".join(map(self._token_bytes, ids))
        if not self._utf8.buffer:
            # most tokens are whole characters, for which this is the faster way
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        return self._utf8.decode(data)

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
        run = self._run
        self._run = bytearray()
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


# -- stop words


class StopWords:
    """An Aho-Corasick automaton of stop words, which any number of texts may share.

    A state is the longest end of the text so far that begins a stop word. Its depth is the number
    of characters that must be held back.
    """

    def __init__(self, words: Sequence[str], shown: bool = False) -> None:
        """`shown`: a text ends with the stop word that stops it."""
        self.shown = shown
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        # length of the longest stop word that ends in this state, 0 for none
        self.longest_word = [0]
        self.shorter = [0]  # state of the next longest end of the text that begins a stop word
        self.first_chars = frozenset(word[0] for word in words if word)
        for word in words:
            self._add(word)
        self._link()

    def _add(self, word: str) -> None:
        state = 0
        for char in word:
            if char not in self.children[state]:
                self.children[state][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.longest_word.append(0)
                self.shorter.append(0)
            state = self.children[state][char]
        self.longest_word[state] = len(word)

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.children[state].items():
                self.shorter[child] = self.step(self.shorter[state], char)
                self.longest_word[child] = (
                    self.longest_word[child] or self.longest_word[self.shorter[child]]
                )
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        while state and char not in self.children[state]:
            state = self.shorter[state]
        return self.children[state].get(char, 0)


class StopWordFilter:
    """Passes text on up to the first stop word, or up to its end where stop words are shown.

    The match that begins earliest wins. A match inside a longer one that is still possible waits
    for it: with "bc" and "abcd", the text "abc" is undecided.
    """

    def __init__(self, words: Sequence[str] | StopWords) -> None:
        self._automaton = words if isinstance(words, StopWords) else StopWords(words)
        self._state = 0
        self._read = 0  # characters that the automaton has read
        self._released = 0  # characters passed on
        self._held = ""  # characters held back, which follow those
        # start of the earliest stop word found so far; an earlier one may still come
        self.match_start: int | None = None
        self._match_end = 0  # end of the same stop word
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the text that can be passed on now; none once `stopped` is set."""
        if self.stopped:
            return ""
        self._held += text
        if self._state or not self._automaton.first_chars.isdisjoint(text):
            self._search(text)
        else:
            self._read += len(text)
        return self._release()

    def finish(self) -> str:
        """Return the text that was held back for a stop word that was not completed."""
        self._state = 0
        self.stopped = self.stopped or self.match_start is not None
        return self._release()

    def _search(self, text: str) -> None:
        automaton = self._automaton
        for char in text:
            self._state = automaton.step(self._state, char)
            self._read += 1
            word = automaton.longest_word[self._state]
            if word and (self.match_start is None or self._read - word < self.match_start):
                self.match_start = self._read - word
                self._match_end = self._read
            earliest_possible = self._read - automaton.depth[self._state]
            if self.match_start is not None and earliest_possible >= self.match_start:
                self.stopped = True
                return

    def _release(self) -> str:
        if self.stopped and self.match_start is not None:
            end = self._match_end if self._automaton.shown else self.match_start
            released = self._held[: end - self._released]
            self._held = ""
        else:
            cut = len(self._held) - self._automaton.depth[self._state]
            released = self._held[:cut]
            self._held = self._held[cut:]
        self._released += len(released)
        return released


class TextStream:
    """Tokens in, text out. The joined pieces are the decoded tokens up to the first stop word.

    `stopped` says whether a stop word was found. `tokens_used` is the number of tokens up to its
    end, and otherwise the number of all tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_words: Sequence[str] | StopWords = (),
        skip_special_tokens: bool = True,
        shown_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        if shown_special_ids:
            self._skipped -= shown_special_ids
        self._filter: StopWordFilter | None = None
        if stop_words:
            words = stop_words if isinstance(stop_words, StopWords) else StopWords(stop_words)
            self._filter = StopWordFilter(words) if words.first_chars else None
        self._seen = 0  # tokens
        # start of the stop word, and the number of tokens up to its end
        self._match: tuple[int, int] | None = None

    @property
    def stopped(self) -> bool:
        return self._filter is not None and self._filter.stopped

    @property
    def tokens_used(self) -> int:
        return self._match[1] if self.stopped and self._match else self._seen

    def push(self, tokens: Sequence[int]) -> str:
        self._tokenizer.check_ids(tokens)
        if self._filter is None:
            self._seen += len(tokens)
            if not self._skipped.isdisjoint(tokens):
                tokens = [token for token in tokens if token not in self._skipped]
            return self._detokenizer.push(tokens)
        pieces = []
        for token in tokens:  # one by one, to know which one completes a stop word
            if self._filter.stopped:
                break
            self._seen += 1
            if token not in self._skipped:
                pieces.append(self._pass(self._filter, self._detokenizer.push((token,))))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        rest = self._detokenizer.finish()
        if self._filter is None:
            return rest
        return self._pass(self._filter, rest) + self._filter.finish()

    def _pass(self, stop_filter: StopWordFilter, text: str) -> str:
        passed = stop_filter.push(text)
        start = stop_filter.match_start
        if start is not None and (self._match is None or self._match[0] != start):
            self._match = (start, self._seen)
        return passed

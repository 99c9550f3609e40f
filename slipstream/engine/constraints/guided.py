"""Guided decoding: outputs that match a grammar (JSON, a JSON schema, a regular expression, EBNF,
structural tags or a choice). No torch here.

The library llguidance, which the extra `guided` installs, enforces the grammars. A grammar that it
cannot enforce exactly is an error, never an approximation.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.engine.sampling_params import Guide

KINDS = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag", "choice")
NOT_INSTALLED = "guided decoding needs the library llguidance: pip install 'slipstream[guided]'"
# prefix of the engine's error messages that a guide caused
FIELD = "guided_decoding_guide: "
LONGEST_GUIDE = 1 << 20  # bytes
_NO_TOKEN_ALLOWED = "NoExtensionBias"  # the library's error text
_CACHED_GRAMMARS = 64
# Whitespace is bounded: otherwise a model might produce spaces without end.
_WHITESPACE = r"[ \n\t]{0,16}"


class GuideError(ValueError):
    """The grammar cannot be enforced. The text is written for clients."""


def check_guide(guide: Guide) -> None:
    """Raise GuideError if a grammar cannot be enforced. Needs no vocabulary, so that the server can
    check requests.
    """
    library = _library()
    grammar = _grammar(library, guide)
    wrong, messages = library.LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong or messages:
        raise GuideError(f"cannot be enforced: {_one_line('; '.join(messages))}")


class Guides:
    """Compiled grammars over one vocabulary. Compiling may take long; the result is cached."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        library = _library()
        # The end of an output is an additional token behind all others, because the end tokens
        # depend on the request.
        self._tokenizer = library.LLTokenizer(
            library.TokenizerWrapper(_LibraryTokenizer(vocabulary)), eos_token=len(vocabulary.texts)
        )
        self._compiled: OrderedDict[Guide, Any] = OrderedDict()
        self._opening = _opening_mask(vocabulary)

    def open(self, guide: Guide, end_ids: Sequence[int]) -> Guided:
        guided = Guided(self._compile(guide), self.vocabulary, end_ids, self._opening)
        # The first mask may take long, or show that the grammar is too large. So it is computed
        # here and not in the step loop.
        guided.mask([])
        if guided.error:
            raise GuideError(guided.error)
        return guided

    def _compile(self, guide: Guide) -> Any:
        matcher = self._compiled.get(guide)
        if matcher is None:
            library = _library()
            matcher = library.LLMatcher(self._tokenizer, _grammar(library, guide), log_level=0)
            if matcher.is_error():
                raise GuideError(f"{FIELD}cannot be enforced: {_reason(matcher)}")
            self._compiled[guide] = matcher
            if len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(guide)
        return matcher.deep_copy()


class Guided:
    """The state of one output in a grammar."""

    def __init__(
        self, matcher: Any, vocabulary: Vocabulary, end_ids: Sequence[int], opening: int
    ) -> None:
        self.error = ""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._ends = sum(1 << token for token in set(end_ids) if token < len(vocabulary.texts))
        self._opening = opening
        self._seen: list[int] = []  # the output tokens that the matcher has consumed
        self._allowed: int | None = None  # allowed tokens after `_seen`; None: not computed

    def mask(self, tokens: list[int]) -> bytes:
        self._follow(tokens)
        allowed = self._next()
        if self._matcher.is_accepting():
            allowed |= self._ends
        return allowed.to_bytes(self._vocabulary.mask_bytes, "little")

    def complete(self, tokens: list[int]) -> bool:
        self._follow(tokens)
        return not self.error and self._matcher.is_accepting() and self._next() == 0

    def _follow(self, tokens: list[int]) -> None:
        if tokens[: len(self._seen)] != self._seen:  # another output
            self._matcher.reset()
            self._seen = []
        new_tokens = tokens[len(self._seen) :]
        if new_tokens:
            self._allowed = None
            self._matcher.consume_tokens(new_tokens)
            self._seen = list(tokens)

    def _next(self) -> int:
        if self._allowed is None:
            if self._matcher.is_stopped():
                self._allowed = 0
            else:
                bits = int.from_bytes(self._matcher.compute_bitmask(), "little")
                self._allowed = bits & ((1 << len(self._vocabulary.texts)) - 1)
            if self._matcher.is_error():
                self.error = f"{FIELD}cannot be followed further: {_reason(self._matcher)}"
                self._allowed = 0
        return self._allowed if self._seen else self._allowed & self._opening


class _LibraryTokenizer:
    """A vocabulary in the form that the library expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [*vocabulary.texts, b"<end of the answer>"]
        self.eos_token_id = len(vocabulary.texts)
        self.special_token_ids = [*sorted(vocabulary.special), self.eos_token_id]
        self._single = {
            text: token
            for token, text in reversed(list(enumerate(vocabulary.texts)))
            if len(text) == 1
        }

    def __call__(self, text: bytes) -> list[int]:
        """Tokenise a text. The library uses it only to force tokens, which is turned off."""
        return [self._single[bytes([byte])] for byte in text if bytes([byte]) in self._single]


def _opening_mask(vocabulary: Vocabulary) -> int:
    """Return the tokens that may begin an output: none with a space, if it would be removed."""
    if not vocabulary.strips_space:
        return (1 << len(vocabulary.texts)) - 1
    bits = bytearray(vocabulary.mask_bytes)
    for token, text in enumerate(vocabulary.texts):
        if not text.startswith(b" "):
            bits[token >> 3] |= 1 << (token & 7)
    return int.from_bytes(bits, "little")


def _grammar(library: Any, guide: Guide) -> str:
    if len(guide.text) > LONGEST_GUIDE:
        raise GuideError(f"must have at most {LONGEST_GUIDE} characters, got {len(guide.text)}")
    try:
        if guide.kind in ("json", "json_schema"):
            return _json_grammar(library, guide)
        if guide.kind == "regex":
            return str(library.grammar_from("regex", guide.text))
        if guide.kind == "ebnf_grammar":
            return str(library.grammar_from("ebnf", guide.text))
        if guide.kind == "structural_tag":
            return _tag_grammar(library, guide.text)
        if guide.kind == "choice":
            return str(library.grammar_from("choice", json.dumps(_choices(guide.text))))
    except GuideError:
        raise
    except (
        ValueError,
        AssertionError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:  # the library's and json's errors for bad input
        raise GuideError(f"cannot be read: {_one_line(str(error))}") from error
    raise GuideError(f"{guide.kind!r} is not one of {', '.join(KINDS)}")


def _json_grammar(library: Any, guide: Guide) -> str:
    schema = json.loads(guide.text) if guide.kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict | bool):
        raise GuideError("a JSON schema is an object, or true")
    _check_counts(schema)
    options = {
        "lenient": False,
        "coerce_one_of": False,
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITESPACE,
    }
    return str(library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


def _check_counts(schema: Any) -> None:
    """Refuse minProperties where the library would count a repeated property twice, which JSON
    readers do not.
    """
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            least = part.get("minProperties")
            required = part.get("required")
            count = len(set(map(str, required))) if isinstance(required, list) else 0
            if isinstance(least, int) and least > max(1, count):
                raise GuideError(
                    f"minProperties {least} cannot be enforced beyond the properties that are "
                    "required"
                )
            waiting += [
                value
                for key, value in part.items()
                if key not in ("enum", "const", "default", "examples")
            ]
        elif isinstance(part, list):
            waiting += part


def _tag_grammar(library: Any, text: str) -> str:
    """Return a grammar of free text in which each trigger begins a structure with a schema."""
    document = json.loads(text)
    triggers = document["triggers"]
    tags = []
    for structure in document["structures"]:
        _check_counts(structure["schema"])
        trigger = next(
            (trigger for trigger in triggers if structure["begin"].startswith(trigger)), None
        )
        if trigger is None:
            raise GuideError(f"no trigger begins {structure['begin']!r}")
        tags.append(
            library.StructTag(
                trigger=trigger,
                begin=structure["begin"],
                grammar=structure["schema"],
                end=structure["end"],
            )
        )
    return str(library.StructTag.to_grammar(tags, assume_special=False))


def _choices(text: str) -> list[str]:
    choices: Any = json.loads(text)
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise GuideError("a choice is a JSON list of texts")
    if not choices or "" in choices:
        raise GuideError("must hold at least one text, and no empty one")
    return choices


def _reason(matcher: Any) -> str:
    """Return the matcher's error without the parser's state."""
    error = _one_line(matcher.get_error().partition("<state>")[0])
    return "no token can come next" if error == _NO_TOKEN_ALLOWED else error


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GuideError(NOT_INSTALLED) from error
    return llguidance

"""Guided decoding: outputs that match a grammar (JSON, a JSON schema, a regular expression, EBNF,
structural tags or a choice). No torch here.

The library llguidance, which the extra `guided` installs, enforces the grammars. A grammar that it
cannot enforce exactly is an error, never an approximation.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.engine.constraints.guide_memory import estimate_bytes
from slipstream.engine.constraints.library_errors import (
    one_line,
    reason,
    without_excerpt,
    without_panic,
)
from slipstream.engine.constraints.vocabulary import LongestMatch, Vocabulary, common_length
from slipstream.engine.request import Revision
from slipstream.engine.sampling_params import Guide

KINDS = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag", "choice")
# A Lark grammar that refers to other guides as @name. The server builds it; clients cannot send it.
COMPOSED = "composed"
NOT_INSTALLED = "guided decoding needs the library llguidance: pip install 'slipstream[guided]'"
# prefix of the engine's error messages that a guide caused
FIELD = "guided_decoding_guide: "
LONGEST_GUIDE = 1 << 20  # bytes
# kinds whose grammars are not the client's text
_WRITTEN_HERE = ("structural_tag", COMPOSED)
_NO_TOKEN_IDS = "no tokenizer"  # the library's warning: token ids are checked by the engine
_CACHED_GRAMMARS = 64
_CACHED_BYTES = 64 << 20  # estimated memory of compiled grammars
# tokens before a new one that are tokenised again with it
_WINDOW_TOKENS = 8
_COMMON_INDENTATION = 5  # bytes, with the line end
# last tokens of an output that may be tokenised otherwise with what follows
_HELD_TOKENS = 2
# White space in JSON: a space, or a new line with its indentation. A model that would rather end
# its answer might otherwise fill it with blank lines.
_WHITESPACE = r"( |\n[ \t]{0,16})?"

Mask = npt.NDArray[np.uint32]  # one bit for each token


class GuideError(ValueError):
    """The grammar cannot be enforced. The text is written for clients."""


def check_guide(guide: Guide) -> None:
    """Raise GuideError if a grammar cannot be enforced. Needs no vocabulary, so that the server can
    check requests.
    """
    library = _library()
    grammar = _grammar(library, guide)
    wrong, messages = library.LLMatcher.validate_grammar_with_warnings(grammar)
    messages = [message for message in messages if not message.startswith(_NO_TOKEN_IDS)]
    if wrong or messages:
        messages = [without_panic(message) for message in messages]
        if guide.kind in _WRITTEN_HERE:
            messages = [without_excerpt(message) for message in messages]
        raise GuideError(f"cannot be enforced: {one_line('; '.join(messages))}")


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
        self._compiled: OrderedDict[Guide, list[Any]] = OrderedDict()
        self._lock = threading.Lock()  # of `_compiled`: several threads compile
        self._begins_with_space = _space_mask(vocabulary) if vocabulary.strips_space else None
        self._spaces = _SpaceJoins(vocabulary)

    def open(self, guide: Guide, end_ids: Sequence[int]) -> Guided:
        matchers = [matcher.deep_copy() for matcher in self._compile(guide)]
        guided = Guided(matchers, self.vocabulary, end_ids, self._spaces, self._begins_with_space)
        # The first mask may take long, or show that the grammar is too large. So it is computed
        # here and not in the step loop.
        guided.mask([])
        if guided.error:
            raise GuideError(guided.error)
        return guided

    def _compile(self, guide: Guide) -> list[Any]:
        """Return the matcher of a grammar, and one that begins with a space if that is removed."""
        with self._lock:
            matchers = self._compiled.get(guide)
        if matchers is None:
            library = _library()
            grammars = [_grammar(library, guide)]
            if self._begins_with_space is not None:
                grammars.append(_after_space(grammars[0]))
            matchers = [
                library.LLMatcher(self._tokenizer, grammar, log_level=0) for grammar in grammars
            ]
            for matcher in matchers:
                if matcher.is_error():
                    raise GuideError(f"{FIELD}cannot be enforced: {reason(matcher)}")
        with self._lock:
            self._compiled[guide] = matchers
            self._compiled.move_to_end(guide)
            self._forget_old()
        return matchers

    def remembers(self, guide: Guide) -> bool:
        return guide in self._compiled

    def _forget_old(self) -> None:
        """Bound the compiled grammars by their number and by an estimate of their memory."""
        sizes = [
            len(matchers) * estimate_bytes(guide) for guide, matchers in self._compiled.items()
        ]
        size = sum(sizes)
        for oldest in sizes[:-1]:
            if len(self._compiled) <= _CACHED_GRAMMARS and size <= _CACHED_BYTES:
                return
            self._compiled.popitem(last=False)
            size -= oldest


class Guided:
    """The state of one output in a grammar.

    Some tokenizers write a space before every text and remove it again. Their models begin an
    output with or without one. An output that begins with a space then has a matcher of its own.
    """

    def __init__(
        self,
        matchers: Sequence[Any],
        vocabulary: Vocabulary,
        end_ids: Sequence[int],
        spaces: _SpaceJoins,
        begins_with_space: Mask | None = None,
    ) -> None:
        """matchers: of the grammar, and of the grammar after a space if that is removed"""
        self.error = ""
        self._matchers = matchers
        self._matcher = matchers[0]
        self._vocabulary = vocabulary
        self._ends = [token for token in set(end_ids) if token < len(vocabulary.texts)]
        self._spaces = spaces
        self._begins_with_space = begins_with_space  # None: no space is removed
        self._seen: list[int] = []  # the output tokens that the matcher has consumed
        self._allowed: Mask | None = None  # allowed tokens after `_seen`; None: not computed

    def mask(self, tokens: list[int]) -> bytes:
        self._follow(tokens)
        allowed = self._next()
        if self._ends and self._matcher.is_accepting():
            allowed = allowed.copy()
            for token in self._ends:
                allowed[token >> 5] |= np.uint32(1 << (token & 31))
        return allowed.tobytes()

    def complete(self, tokens: list[int]) -> bool:
        self._follow(tokens)
        return not self.error and self._matcher.is_accepting() and not self._next().any()

    def only(self, token: int) -> bytes:
        mask = np.zeros(self._vocabulary.mask_bytes // 4, dtype=np.uint32)
        mask[token >> 5] = 1 << (token & 31)
        return mask.tobytes()

    def revise(self, tokens: list[int], fixed: int) -> Revision:
        """Return the output in the tokens of the model's own tokenizer, followed by the tokens that
        the grammar forces. The first `fixed` tokens stay.
        """
        self._follow(tokens)
        forced = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        end = len(self._vocabulary.texts)
        if end in forced:  # no token spells what comes next
            forced = forced[: forced.index(end)]
        special = self._vocabulary.special
        text = next((place for place, token in enumerate(forced) if token in special), len(forced))
        revised = self._to_canonical([*tokens, *forced[:text]], len(tokens), fixed)
        revised += forced[text:]
        return Revision(revised, self._count_settled(revised, fixed))

    def _count_settled(self, tokens: list[int], fixed: int) -> int:
        """Return how many tokens stay whatever comes next: not the last ones, nor white space
        before them, because tokenizers join white space with what follows.
        """
        settled = max(fixed, len(tokens) - _HELD_TOKENS)
        texts = self._vocabulary.texts
        while settled > fixed and texts[tokens[settled - 1]].isspace():
            settled -= 1
        return settled

    def _to_canonical(self, tokens: list[int], known: int, fixed: int) -> list[int]:
        """Return the tokenizer's own tokens of the same text. Only the end of it can differ: the
        tokens after `known`, and some before it, are new.
        """
        for window in _windows(known):
            start = self._after_special(tokens, window)
            try:
                text = self._vocabulary.spell(tokens[start:]).decode()
            except UnicodeDecodeError:
                continue  # begins or ends within a character
            own = self._vocabulary.encode(text)
            if own is None:
                return tokens
            same = common_length(list(own), tokens[start:])
            if same == len(own):
                return tokens
            begins = start == 0 or start > window
            if same > 0 or begins:  # otherwise the text before it matters
                return tokens if start + same < fixed else [*tokens[:start], *own]
        return tokens

    def _after_special(self, tokens: list[int], start: int) -> int:
        """Return the place after the last special token from `start` on, or else `start`."""
        special = self._vocabulary.special
        places = range(len(tokens) - 1, start - 1, -1)
        return next((place + 1 for place in places if tokens[place] in special), start)

    def _follow(self, tokens: list[int]) -> None:
        """Bring the matcher to the state after these tokens."""
        same = common_length(tokens, self._seen)
        if same < len(self._seen):  # another output, or a revised one
            self._allowed = None
            if self._matcher.is_stopped() or not self._matcher.rollback(len(self._seen) - same):
                self._matcher.reset()
                same = 0
        if same == 0 and tokens and self._begins_with_space is not None:
            self._matcher = self._matchers[self._vocabulary.texts[tokens[0]].startswith(b" ")]
        if same < len(tokens):
            self._allowed = None
            self._matcher.consume_tokens(tokens[same:])
        self._seen = list(tokens)

    def _next(self) -> Mask:
        """Return one bit for each token that the grammar allows next."""
        if self._allowed is None:
            if self._begins_with_space is None or self._seen:
                self._allowed = self._compute_mask(self._matcher)
                self._exclude_joined_space(self._allowed)
            else:
                plain, after_space = map(self._compute_mask, self._matchers)
                spaces = self._begins_with_space
                self._allowed = (plain & ~spaces) | (after_space & spaces)
            if self._matcher.is_error():
                self.error = f"{FIELD}cannot be followed further: {reason(self._matcher)}"
            elif not self._allowed.any() and not self._matcher.is_accepting():
                self.error = f"{FIELD}cannot be followed further: no token can come next"
        return self._allowed

    def _exclude_joined_space(self, mask: Mask) -> None:
        """Exclude white space that the tokenizer would have joined with the last token, unless only
        that may follow. A model that may not end its answer often adds white space piece by piece.
        """
        joined = self._spaces.after(self._seen[-1]) if self._seen else None
        if joined is not None and (mask & ~joined).any():
            mask &= ~joined

    def _compute_mask(self, matcher: Any) -> Mask:
        mask = np.zeros(self._vocabulary.mask_bytes // 4, dtype=np.uint32)
        if not matcher.is_stopped():
            computed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
            if not matcher.is_error():
                mask[:] = computed[: len(mask)]
                _clear_from(mask, len(self._vocabulary.texts))  # the library's end token
        return mask


class _SpaceJoins:
    """The white space that a tokenizer joins with a token before it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._spaces = [token for token, text in enumerate(vocabulary.texts) if text.isspace()]
        self._after: dict[int, Mask | None] = {}
        for token in self._spaces:  # a step waits for the others when they first occur
            if len(vocabulary.texts[token]) <= _COMMON_INDENTATION:
                self.after(token)

    def after(self, token: int) -> Mask | None:
        """Return the tokens of white space that are never found after this one; None: no token."""
        if token not in self._after:
            self._after[token] = self._find(token)
        return self._after[token]

    def _find(self, token: int) -> Mask | None:
        texts = self._vocabulary.texts
        if not texts[token][-1:].isspace():
            return None
        mask = np.zeros(self._vocabulary.mask_bytes // 4, dtype=np.uint32)
        for space in self._spaces:
            joined = (texts[token] + texts[space]).decode(errors="replace")
            own = self._vocabulary.encode(joined)
            if own is not None and tuple(own) != (token, space):
                mask[space >> 5] |= np.uint32(1 << (space & 31))
        return mask if mask.any() else None


def _windows(tokens: int) -> Iterator[int]:
    """Yield where the end of an output may begin, nearest first."""
    size = _WINDOW_TOKENS
    while size < tokens:
        yield tokens - size
        size *= 2
    yield 0


def _clear_from(mask: Mask, first: int) -> None:
    """Clear the bits from `first` on."""
    word = first >> 5
    if word < len(mask):
        mask[word] &= np.uint32((1 << (first & 31)) - 1)
        mask[word + 1 :] = 0


class _LibraryTokenizer:
    """A vocabulary in the form that the library expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [*vocabulary.texts, b"<end of the answer>"]
        self.eos_token_id = len(vocabulary.texts)
        self.special_token_ids = [*sorted(vocabulary.special), self.eos_token_id]
        self._encode = vocabulary.encode
        self._longest_match = LongestMatch(vocabulary)

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that the grammar forces. They spell exactly this text: the
        library does not check it.
        """
        tokens = self._encode(text.decode())
        if tokens is None:
            tokens = self._longest_match.encode(text)
        # No token spells the text: the end token is never allowed in the middle of an output.
        return [self.eos_token_id] if tokens is None else list(tokens)


def _space_mask(vocabulary: Vocabulary) -> Mask:
    """Return one bit for each token that begins with a space."""
    mask = np.zeros(vocabulary.mask_bytes // 4, dtype=np.uint32)
    for token, text in enumerate(vocabulary.texts):
        if text.startswith(b" "):
            mask[token >> 5] |= np.uint32(1 << (token & 31))
    return mask


def _after_space(grammar: str) -> str:
    """Return the grammar of a space and then this grammar."""
    inner: dict[str, Any] = {"lark_grammar": grammar}
    if grammar.startswith("{"):
        inner = json.loads(grammar)["grammars"][0]
    outer = {"lark_grammar": 'start: " " @answer'}
    return json.dumps({"grammars": [outer, inner | {"name": "answer"}]})


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
        if guide.kind == COMPOSED:
            return _composed_grammar(library, guide.text)
    except GuideError:
        raise
    except (
        ValueError,
        AssertionError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:  # the library's and json's errors for bad input
        raise GuideError(f"cannot be read: {one_line(str(error))}") from error
    raise GuideError(f"{guide.kind!r} is not one of {', '.join(KINDS)}")


def _json_grammar(library: Any, guide: Guide) -> str:
    schema = json.loads(guide.text) if guide.kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict | bool):
        raise GuideError("a JSON schema is an object, or true")
    check_counts(schema)
    options = {
        "lenient": False,
        "coerce_one_of": False,
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITESPACE,
    }
    return str(library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


def check_counts(schema: Any) -> None:
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
        check_counts(structure["schema"])
        trigger = next(
            (trigger for trigger in triggers if structure["begin"].startswith(trigger)), None
        )
        if trigger is None:
            raise GuideError(f"has no trigger that begins {structure['begin'][:80]!r}")
        tags.append(
            library.StructTag(
                trigger=trigger,
                begin=structure["begin"],
                grammar=structure["schema"],
                end=structure["end"],
            )
        )
    return str(library.StructTag.to_grammar(tags, assume_special=False))


def compose(lark: str, guides: Mapping[str, Guide]) -> Guide:
    """Return a guide that is a Lark grammar. It refers to the other guides as @name."""
    parts = {name: [guide.kind, guide.text] for name, guide in guides.items()}
    return Guide(COMPOSED, json.dumps({"lark": lark, "guides": parts}))


def _composed_grammar(library: Any, text: str) -> str:
    document = json.loads(text)
    grammars = [{"name": COMPOSED, "lark_grammar": document["lark"]}]
    for name, (kind, part) in document["guides"].items():
        grammar = _grammar(library, Guide(kind, part))
        if grammar.startswith("{"):
            (described,) = json.loads(grammar)["grammars"]
            grammars.append({**described, "name": name})
        else:
            grammars.append({"name": name, "lark_grammar": grammar})
    return json.dumps({"grammars": grammars})


def _choices(text: str) -> list[str]:
    choices: Any = json.loads(text)
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise GuideError("a choice is a JSON list of texts")
    if not choices or "" in choices:
        raise GuideError("must hold at least one text, and no empty one")
    return choices


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GuideError(NOT_INSTALLED) from error
    return llguidance

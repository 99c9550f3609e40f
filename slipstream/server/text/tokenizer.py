"""Text to tokens and back, from a model's own files and without transformers.

Two libraries do the work behind one interface, `Backend`: tokenizers and SentencePiece.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from sentencepiece import SentencePieceProcessor
from tokenizers import decoders, models, pre_tokenizers

from slipstream.server.text.folder import (
    AddedToken,
    TokenizerError,
    TokenizerFolder,
    read_tokenizer_folder,
)
from slipstream.server.text.longest_token import LONGEST_TOKEN, TooManyTokens, longest_token
from slipstream.server.text.stream import (
    Backend,
    Detokenizer,
    detokenizer_factory,
    spelling,
)
from slipstream.server.text.threads import LARGE_SIZE, THREAD_ABOVE_SIZE

_LONGEST_REASON = 300  # characters of an error of the library
_GPT2_END = "<|endoftext|>"  # bos, eos and unk token of GPT-2, unless configured otherwise
WORD_MARK = "▁"  # SentencePiece's space
# ModelProto.normalizer_spec.add_dummy_prefix = false, as protobuf. Appended to a model, it replaces
# the model's own value: repeated messages of one field are merged.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


def load_backend(folder: TokenizerFolder) -> Backend:
    if folder.has("tokenizer.json"):
        return JsonBackend(_read_tokenizer_json(folder.path / "tokenizer.json"), folder)
    if folder.has("tokenizer.model"):
        return SentencePieceBackend(folder)
    if folder.has("vocab.json") and folder.has("merges.txt"):
        return _gpt2_backend(folder)
    raise TokenizerError(
        f"{folder.path} has no tokenizer: expected tokenizer.json, tokenizer.model, or vocab.json "
        "with merges.txt"
    )


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises bare Exception for every kind of bad file
        raise TokenizerError(f"{path} is not a tokenizer file: {_brief(problem)}") from problem


def _brief(problem: Exception) -> str:
    """Return the beginning of an error of the library, which may quote the whole file."""
    text = " ".join(str(problem)[: 2 * _LONGEST_REASON].split())
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…"


def _gpt2_backend(folder: TokenizerFolder) -> JsonBackend:
    name = folder.config.get("tokenizer_class", "GPT2Tokenizer")
    if name not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        # Other tokenizers split the text differently first, and vocab.json does not say how.
        raise TokenizerError(
            f"{folder.path}: a {name} needs tokenizer.json; vocab.json and merges.txt do not "
            "suffice"
        )
    try:
        model = models.BPE.from_file(
            str(folder.path / "vocab.json"), str(folder.path / "merges.txt")
        )
    except Exception as problem:  # as above
        raise TokenizerError(
            f"{folder.path}: vocab.json or merges.txt is damaged: {_brief(problem)}"
        ) from problem
    tokenizer = tokenizers.Tokenizer(model)
    prefix_space = bool(folder.config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    unnamed = [
        name for name in ("bos_token", "eos_token", "unk_token") if name not in folder.named_tokens
    ]
    if unnamed:
        tokenizer.add_special_tokens([_GPT2_END])
    return JsonBackend(tokenizer, folder, dict.fromkeys(unnamed, _GPT2_END))


class JsonBackend:
    """A tokenizer.json, or its equivalent, with the tokenizers library."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        folder: TokenizerFolder,
        default_names: dict[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.default_names = default_names or {}
        tokenizer.no_truncation()  # a file may have the settings of a training run
        tokenizer.no_padding()
        self._add_tokens(folder)
        added = tokenizer.get_added_tokens_decoder()
        self.decoder = tokenizer.decoder
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.id_limit = max(
            [tokenizer.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)]
        )
        self.affixes = self._find_affixes()

    def _add_tokens(self, folder: TokenizerFolder) -> None:
        """Add the tokens that only the configuration names or declares special."""
        present = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        missing = [t for _, t in sorted(folder.added_tokens.items()) if t.content not in present]
        self._tokenizer.add_tokens([_library_token(token) for token in missing])
        known = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in known if token.special}
        named = [token for token in folder.special_tokens if token.content not in special]
        self._tokenizer.add_special_tokens([_library_token(token) for token in named])

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the post-processor puts before and after a text."""
        probe = "a"
        plain = self._tokenizer.encode(probe, add_special_tokens=False).ids
        whole = self._tokenizer.encode(probe, add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        raise TokenizerError("the tokenizer's post-processor changes the tokens of the text itself")

    @property
    def pair_affixes(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens that the post-processor puts before, between and after two texts."""
        probe = "a"
        plain = self._tokenizer.encode(probe, add_special_tokens=False).ids
        whole = self._tokenizer.encode(probe, probe, add_special_tokens=True).ids
        size = len(plain)
        places = [i for i in range(len(whole) - size + 1) if whole[i : i + size] == plain]
        first = places[0]
        second = places[-1]
        return whole[:first], whole[first + size : second], whole[second + size :]

    @property
    def longest_token(self) -> int | None:
        return longest_token(self._tokenizer)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        if len(text) <= THREAD_ABOVE_SIZE:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # The library's `encode` holds the interpreter's lock, and so the event loop, to its end.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        if most is not None and len(encoded) > most:
            raise TooManyTokens(len(encoded))
        return encoded.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(ids) <= THREAD_ABOVE_SIZE:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        # as above
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)


def _library_token(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        special=token.special,
        lstrip=token.strips_left,
        rstrip=token.strips_right,
        normalized=token.normalized,
        single_word=token.single_word,
    )


class SentencePieceBackend:
    """A tokenizer.model, such as Llama's: SentencePiece encodes the text between added tokens.

    SentencePiece puts a space before a text. Only the beginning of a text gets one. The text after
    an added token gets one only where the configuration says `legacy`.
    """

    longest_token = None  # an unknown text of any length is one token

    def __init__(self, folder: TokenizerFolder) -> None:
        model = (folder.path / "tokenizer.model").read_bytes()
        self._processor = _load_sentencepiece(model, folder.path)
        self._continuing = _load_sentencepiece(model + _NO_DUMMY_PREFIX, folder.path)
        self._legacy = bool(folder.config.get("legacy", False))
        self._tokens = [
            self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())
        ]
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens)}
        self.default_names = self._names()
        specials = self._control_ids()
        self._added = self._place_added_tokens(folder, specials)  # longest first
        self._splitter = _splitter(self._added)
        self.special_ids = frozenset(specials)
        self.id_limit = len(self._tokens)
        self.decoder = _llama_decoder(strips_space=self._prefixes_space(folder))
        self.affixes = (
            self._affix(folder, "bos", default=True),
            self._affix(folder, "eos", default=False),
        )

    def _names(self) -> dict[str, str]:
        sp = self._processor
        ids = {
            "bos_token": sp.bos_id(),
            "eos_token": sp.eos_id(),
            "unk_token": sp.unk_id(),
            "pad_token": sp.pad_id(),
        }
        return {name: self._tokens[token_id] for name, token_id in ids.items() if token_id >= 0}

    def _affix(self, folder: TokenizerFolder, name: str, default: bool) -> list[int]:
        text = folder.token_text(f"{name}_token") or self.default_names.get(f"{name}_token")
        wanted = folder.config.get(f"add_{name}_token", default)
        return [self._ids[text]] if wanted and text is not None else []

    def _control_ids(self) -> set[int]:
        sp = self._processor
        return {i for i in range(sp.get_piece_size()) if sp.is_control(i) or sp.is_unknown(i)}

    def _prefixes_space(self, folder: TokenizerFolder) -> bool:
        configured = folder.config.get("add_prefix_space")
        return (
            self._processor.normalize("a") == WORD_MARK + "a"
            if configured is None
            else bool(configured)
        )

    @property
    def pair_affixes(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens before, between and after two texts: each has those of one text."""
        prefix, suffix = self.affixes
        return prefix, [*suffix, *prefix], suffix

    def _place_added_tokens(self, folder: TokenizerFolder, specials: set[int]) -> list[AddedToken]:
        """Give each added token the id of the files or the vocabulary, or the next free one."""
        placed = {self._tokens[i]: AddedToken(self._tokens[i], special=True) for i in specials}
        for token_id, token in sorted(folder.added_tokens.items()):
            self._place(token, token_id)
            placed[token.content] = token
        for token in folder.special_tokens:
            if token.content not in self._ids:
                self._place(token, len(self._tokens))
            placed[token.content] = token
        specials |= {self._ids[token.content] for token in placed.values() if token.special}
        return sorted(
            (t for t in placed.values() if t.content), key=lambda token: -len(token.content)
        )

    def _place(self, token: AddedToken, token_id: int) -> None:
        self._tokens.extend([""] * (token_id + 1 - len(self._tokens)))
        self._tokens[token_id] = token.content
        self._ids[token.content] = token_id

    def encode(self, text: str, most: int | None = None) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self._splitter.finditer(text) if self._splitter else ():
            token = self._added[(match.lastindex or 1) - 1]
            before = text[position : match.start()]
            ids += self._encode_between(
                before.rstrip() if token.strips_left else before, first=position == 0
            )
            ids.append(self._ids[token.content])
            position = match.end()
        return ids + self._encode_between(text[position:], first=position == 0)

    def _encode_between(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        processor = self._processor if first or self._legacy else self._continuing
        ids: list[int] = processor.encode(text)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        tokens = [self._tokens[i] for i in ids if i not in skipped and i < len(self._tokens)]
        return self.decoder.decode(tokens)

    def token(self, token_id: int) -> str | None:
        return self._tokens[token_id] if token_id < len(self._tokens) else None

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)


def _load_sentencepiece(model: bytes, path: Path) -> SentencePieceProcessor:
    try:
        return SentencePieceProcessor(model_proto=model)
    except RuntimeError as problem:
        raise TokenizerError(
            f"{path / 'tokenizer.model'} is not a SentencePiece model: {problem}"
        ) from problem


def _splitter(added: list[AddedToken]) -> re.Pattern[str] | None:
    """Return a pattern with a group for each token. The caller strips the space on the left."""
    groups = [
        f"({re.escape(token.content)})" + (r"\s*" if token.strips_right else "") for token in added
    ]
    return re.compile("|".join(groups)) if groups else None


def _llama_decoder(strips_space: bool) -> decoders.Decoder:
    steps = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if strips_space else steps
    )


class Tokenizer:
    """The tokenizer of a model."""

    def __init__(self, folder: TokenizerFolder, backend: Backend) -> None:
        self._backend = backend
        self._new_detokenizer = detokenizer_factory(backend)
        spelled = spelling(backend)
        # the bytes of a token; None: they depend on its neighbours
        self.token_bytes = spelled[0] if spelled else None
        self.strips_space = bool(spelled and spelled[1])  # the first space of a text is dropped
        # Chat templates see these by name: bos_token, eos_token, ...
        configured = {name: token.content for name, token in folder.named_tokens.items()}
        self.named_tokens = backend.default_names | configured
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        self.pad_id = self._id_of("pad_token")
        self.end_ids = list(
            dict.fromkeys([*([] if self.eos_id is None else [self.eos_id]), *folder.end_ids])
        )
        self.special_ids = backend.special_ids
        self.vocab_size = backend.id_limit
        # A model may have more output rows than its tokenizer has tokens. Those have no text.
        self._id_limit = max(backend.id_limit, folder.model_vocab_size)
        self._prefix, self._suffix = self._affixes(folder)
        self.chat_templates = folder.chat_templates
        # whether texts that are pooled end with the end-of-text token
        self._adds_eos = bool(folder.config.get("add_eos_token"))
        # most characters that one token stands for
        self.longest_token = backend.longest_token or LONGEST_TOKEN

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        description = read_tokenizer_folder(Path(folder))
        return cls(description, load_backend(description))

    def _id_of(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self._backend.id_of(text)

    def _affixes(self, folder: TokenizerFolder) -> tuple[list[int], list[int]]:
        prefix, suffix = self._backend.affixes
        if (
            folder.config.get("add_bos_token")
            and self.bos_id is not None
            and self.bos_id not in prefix
        ):
            prefix = [self.bos_id, *prefix]
        return prefix, suffix

    @property
    def affixes(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text that is pooled.

        They are those of `encode`, and the end-of-text token where the files ask for one.
        """
        return self._prefix, self._with_eos(self._suffix)

    @property
    def pair_affixes(self) -> tuple[list[int], list[int], list[int]]:
        """The special tokens before, between and after two texts that are pooled."""
        before, between, after = self._backend.pair_affixes
        missing = [token for token in self._prefix if token not in self._backend.affixes[0]]
        if self._adds_eos and self.eos_id is not None and self.eos_id not in between:
            between = [self.eos_id, *between]
        return [*missing, *before], between, self._with_eos(after)

    def _with_eos(self, suffix: list[int]) -> list[int]:
        if not self._adds_eos or self.eos_id is None or self.eos_id in suffix:
            return suffix
        return [*suffix, self.eos_id]

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Return the tokens of a text. A beginning-of-text token in the text is not repeated.

        Raise TooManyTokens where a long text has more than `most` tokens.
        """
        try:
            text.encode()  # the libraries cannot encode half of a surrogate pair
        except UnicodeEncodeError as problem:
            raise TokenizerError(
                f"the text is not valid Unicode at character {problem.start}"
            ) from problem
        try:
            ids = self._backend.encode(text, most)
        except TooManyTokens as error:
            affixes = len(self._prefix) + len(self._suffix) if add_special_tokens else 0
            raise TooManyTokens(error.count + affixes) from None
        if not add_special_tokens:
            return ids
        prefix = self._prefix
        if ids and self.bos_id is not None and ids[0] == self.bos_id:
            prefix = [token_id for token_id in prefix if token_id != self.bos_id]
        return [*prefix, *ids, *self._suffix]

    def surely_exceeds(self, characters: int, tokens: int) -> bool:
        """Return whether a text of this many characters has more than this many tokens.

        A text of moderate length is tokenized first, so that its error has the number of tokens.
        """
        longest = self.longest_token
        if characters <= LARGE_SIZE:
            longest = max(longest, LONGEST_TOKEN)
        return characters > tokens * longest

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.check_ids(ids)
        return self._backend.decode(ids, skip_special_tokens)

    def token(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; empty for an id without a token."""
        return self._backend.token(token_id) or ""

    def detokenizer(self) -> Detokenizer:
        """Return a decoder for the tokens of one text. The caller skips special tokens."""
        return self._new_detokenizer()

    def check_ids(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self._id_limit:
                raise TokenizerError(
                    f"token id {token_id} is not in the vocabulary (0 to {self._id_limit - 1})"
                )

"""The two libraries that cut text into tokens, behind one surface: tokenizers and SentencePiece."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers
from sentencepiece import SentencePieceProcessor
from tokenizers import decoders, models, pre_tokenizers

from slipstream.server.text.folder import AddedToken, TokenizerError, TokenizerFolder

_GPT2_END = "<|endoftext|>"  # its bos, eos and unk token, where the configuration names no others
WORD_MARK = "▁"  # how SentencePiece writes a space


class Backend(Protocol):
    """Tokens of one vocabulary. Ids are checked by the caller; `encode` adds nothing to the text's
    own tokens.
    """

    special_ids: frozenset[int]
    id_limit: int  # one more than the largest id
    # what the files put before and after a text; ([], []) when nothing
    affixes: tuple[list[int], list[int]]
    # "bos_token" and the like, for what the folder's configuration does not name
    default_names: dict[str, str]

    @property
    def decoder(self) -> decoders.Decoder | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token(self, token_id: int) -> str | None: ...
    def id_of(self, token: str) -> int | None: ...


def load_backend(folder: TokenizerFolder) -> Backend:
    if folder.has("tokenizer.json"):
        return JsonBackend(_read_tokenizer_json(folder.path / "tokenizer.json"), folder)
    if folder.has("tokenizer.model"):
        return SentencePieceBackend(folder)
    if folder.has("vocab.json") and folder.has("merges.txt"):
        return _gpt2_backend(folder)
    raise TokenizerError(
        f"{folder.path} has no tokenizer: expected tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
    )


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises bare Exception for every kind of bad file
        raise TokenizerError(f"{path} is not a tokenizer file: {problem}") from problem


def _gpt2_backend(folder: TokenizerFolder) -> JsonBackend:
    name = folder.config.get("tokenizer_class", "GPT2Tokenizer")
    if name not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        # Others cut the text differently before the merges apply, and vocab.json does not say how.
        raise TokenizerError(
            f"{folder.path}: a {name} needs tokenizer.json; vocab.json and merges.txt do not suffice"
        )
    try:
        model = models.BPE.from_file(
            str(folder.path / "vocab.json"), str(folder.path / "merges.txt")
        )
    except Exception as problem:  # as above
        raise TokenizerError(
            f"{folder.path}: vocab.json or merges.txt is damaged: {problem}"
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
    """A tokenizer.json (or what was built like one) run by the tokenizers library."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        folder: TokenizerFolder,
        default_names: dict[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.default_names = default_names or {}
        tokenizer.no_truncation()  # a file may carry its training run's settings
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
        """The configuration may name tokens, or call tokens special, where tokenizer.json does not."""
        present = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        missing = [t for _, t in sorted(folder.added_tokens.items()) if t.content not in present]
        self._tokenizer.add_tokens([_library_token(token) for token in missing])
        known = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in known if token.special}
        named = [token for token in folder.special_tokens if token.content not in special]
        self._tokenizer.add_special_tokens([_library_token(token) for token in named])

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        """Ask the post-processor once what it puts around a text."""
        probe = "a"
        plain = self._tokenizer.encode(probe, add_special_tokens=False).ids
        whole = self._tokenizer.encode(probe, add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        raise TokenizerError("the tokenizer's post-processor changes the tokens of the text itself")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

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
    """A tokenizer.model, as Llama's: added tokens are cut out first, SentencePiece does the text
    between.

    SentencePiece puts a space before a text. Only the text's very beginning gets one; after an
    added token the text goes on as it is, unless the configuration says `legacy`.
    """

    def __init__(self, folder: TokenizerFolder) -> None:
        model = (folder.path / "tokenizer.model").read_bytes()
        self._processor = _load_sentencepiece(model, folder.path)
        self._continuing = _load_sentencepiece(model, folder.path)
        self._continuing.override_normalizer_spec(add_dummy_prefix=False)
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

    def _place_added_tokens(self, folder: TokenizerFolder, specials: set[int]) -> list[AddedToken]:
        """Give every added token its id: the files' own, the vocabulary's, or the next free one."""
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

    def encode(self, text: str) -> list[int]:
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
        return (self._processor if first or self._legacy else self._continuing).encode(text)

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
    """One group a token, so that a match tells which. The space on the left is cut by the caller."""
    groups = [
        f"({re.escape(token.content)})" + (r"\s*" if token.strips_right else "") for token in added
    ]
    return re.compile("|".join(groups)) if groups else None


def _llama_decoder(strips_space: bool) -> decoders.Decoder:
    steps = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if strips_space else steps
    )

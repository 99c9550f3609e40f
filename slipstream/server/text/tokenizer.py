"""Text to tokens and back, from a model's own files and without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream.server.text.backends import Backend, load_backend
from slipstream.server.text.detokenizer import Detokenizer, detokenizer_factory, spelling
from slipstream.server.text.folder import TokenizerError, TokenizerFolder, read_tokenizer_folder


class Tokenizer:
    """What a model's tokenizer files say. Everything is worked out at load; calls cost only their
    text.
    """

    def __init__(self, folder: TokenizerFolder, backend: Backend) -> None:
        self._backend = backend
        self._new_detokenizer = detokenizer_factory(backend)
        spelled = spelling(backend)
        # what a token writes; None: its neighbours have a say
        self.token_bytes = spelled[0] if spelled else None
        self.strips_space = bool(spelled and spelled[1])  # of a text's first space
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
        # A model may have more output rows than its tokenizer has tokens; those ids stand for no
        # text.
        self._id_limit = max(backend.id_limit, folder.model_vocab_size)
        self._prefix, self._suffix = self._affixes(folder)
        self.chat_templates = folder.chat_templates

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
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens; a beginning-of-text token that the text brings itself is not added
        again.
        """
        try:
            text.encode()  # half a surrogate pair is the one thing the libraries cannot take
        except UnicodeEncodeError as problem:
            raise TokenizerError(
                f"the text is not valid Unicode at character {problem.start}"
            ) from problem
        ids = self._backend.encode(text)
        if not add_special_tokens:
            return ids
        prefix = self._prefix
        if ids and self.bos_id is not None and ids[0] == self.bos_id:
            prefix = [token_id for token_id in prefix if token_id != self.bos_id]
        return [*prefix, *ids, *self._suffix]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.check_ids(ids)
        return self._backend.decode(ids, skip_special_tokens)

    def detokenizer(self) -> Detokenizer:
        """A decoder that takes the tokens of one text bit by bit; special tokens are the caller's
        to skip.
        """
        return self._new_detokenizer()

    def check_ids(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self._id_limit:
                raise TokenizerError(
                    f"token id {token_id} is not in the vocabulary (0 to {self._id_limit - 1})"
                )

"""The text of each token of a tokenizer, for constraints on the text of an answer."""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def read_vocabulary(folder: str | Path, size: int) -> Vocabulary | None:
    """Return the texts of `size` tokens; None where the tokenizer is missing or cannot tell."""
    try:
        tokenizer = Tokenizer.load(Path(folder))
    except TokenizerError as error:
        # clients do not see this: it has a path
        logger.warning("no constraints on answers: %s", error)
        return None
    return tokenizer_vocabulary(tokenizer, size)


def tokenizer_vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary | None:
    """Return the texts of `size` tokens; None where a text depends on the token's neighbours."""
    spell = tokenizer.token_bytes
    if spell is None:
        return None
    texts = [spell(token) if token < tokenizer.vocab_size else b"" for token in range(size)]
    special = frozenset(token for token in tokenizer.special_ids if token < size)
    nothing = frozenset(token for token, text in enumerate(texts) if not text)
    return Vocabulary(texts, special | nothing, tokenizer.strips_space)

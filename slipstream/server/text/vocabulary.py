"""What each token of a model's tokenizer writes, for whatever must know the text of an answer
before it is there.
"""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def read_vocabulary(folder: str | Path, size: int) -> Vocabulary | None:
    """Of a model with `size` outputs; None where its tokenizer is missing or cannot tell."""
    try:
        tokenizer = Tokenizer.load(Path(folder))
    except TokenizerError as error:
        # a client need not know where files lie
        logger.warning("no constraints on answers: %s", error)
        return None
    return vocabulary_of(tokenizer, size)


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary | None:
    """None where a token's text depends on its neighbours."""
    spell = tokenizer.token_bytes
    if spell is None:
        return None
    texts = [spell(token) if token < tokenizer.vocab_size else b"" for token in range(size)]
    special = frozenset(token for token in tokenizer.special_ids if token < size)
    nothing = frozenset(token for token, text in enumerate(texts) if not text)
    return Vocabulary(texts, special | nothing, tokenizer.strips_space)

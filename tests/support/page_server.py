"""A whole server whose engine says texts that the test gives: its tokens are pieces of them.

The scripted engine answers token N with N + 1, N + 2, … So a question that is one token of the
vocabulary is answered with the tokens after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from tiny_server import TinyServer, make_repository

FIRST = 100  # token of the first question
TEMPLATE = "{{ messages[-1].content }}"
# a text is one word, which is a token or unknown
WHOLE_TEXT = {
    "type": "Split",
    "pattern": {"String": "\u0000"},
    "behavior": "Removed",
    "invert": False,
}


class PageServer:
    """Answers each question of `texts` with its text, and any other with numbers."""

    def __init__(self, folder: Path, texts: Mapping[str, str], *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        repository = make_repository(folder)
        self.tokens = {}  # by question: the number of tokens of its answer
        words = [f" {number}" for number in range(FIRST)]
        for question, text in texts.items():
            words.append(question)
            pieces = cut(text, words)
            self.tokens[question] = len(pieces)
            words += pieces
        write_tokenizer(folder / "engines" / "fine", words)
        self._server = TinyServer(repository, folder / "temporary", *options).wait_started()
        self.url = f"{self._server.url}/"

    def close(self) -> None:
        self._server.close()


def cut(text: str, taken: list[str]) -> list[str]:
    """Return the text in pieces of few words that are no tokens yet."""
    pieces: list[str] = []
    waiting = ""
    for word in re.findall(r"\s*\S+", text):
        waiting += word
        if waiting not in taken and waiting not in pieces:
            pieces.append(waiting)
            waiting = ""
    if waiting:
        pieces[-1] += waiting
    return pieces


def write_tokenizer(engine: Path, words: list[str]) -> None:
    file = engine / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = {word: token for token, word in enumerate(words)}
    tokenizer["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]}
    tokenizer["pre_tokenizer"] = WHOLE_TEXT
    tokenizer["decoder"] = {"type": "Fuse"}
    file.write_text(json.dumps(tokenizer))
    (engine / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))

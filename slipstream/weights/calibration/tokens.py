"""The text of a calibration as windows of tokens."""

from __future__ import annotations

from tokenizers import Tokenizer

from slipstream.weights.calibration.settings import WINDOW_TOKENS, Calibration
from slipstream.weights.sources.source import Source, SourceError

_LEAST_WINDOW = 64  # tokens; what is left of a text is run if it has as many


def token_windows(source: Source, calibration: Calibration) -> list[list[int]]:
    """Return the windows of the text. They are spread over it if it has more than are wanted.

    Raises SourceError if the model has no tokenizer that can be read, or if tokens are unknown.
    """
    content = source.tokenizer_files().get("tokenizer.json")
    if content is None:
        raise SourceError(
            f"{source.label}: has no tokenizer.json, which {calibration.method} needs to run its "
            "calibration text; use --quantize int4"
        )
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises no narrower class
        raise SourceError(f"{source.label}: tokenizer.json: damaged: {error}") from error
    tokens = tokenizer.encode(calibration.content, add_special_tokens=False).ids
    if unknown := [token for token in tokens if token >= source.spec.vocab_size]:
        raise SourceError(
            f"{source.label}: its tokenizer gives token {max(unknown)}, its vocabulary has "
            f"{source.spec.vocab_size}"
        )
    size = min(WINDOW_TOKENS, source.spec.max_positions)
    windows = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    if len(windows) > 1 and len(windows[-1]) < _LEAST_WINDOW:
        windows.pop()
    if not tokens:
        raise SourceError(f"{source.label}: its tokenizer finds no token in the calibration text")
    step = max(1, len(windows) / calibration.windows)
    return [windows[int(number * step)] for number in range(int(len(windows) / step))]

"""What a calibrated quantisation needs: its method and a text. Needs no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slipstream.weights.home import expand_home
from slipstream.weights.sources.source import SourceError

METHODS = ("awq", "gptq")
# Round to nearest in the same blocks: what the methods are compared with. Needs no text.
NEAREST = "nearest"
WINDOW_TOKENS = 512  # tokens that are run together
DEFAULT_WINDOWS = 128
_OWN_TEXT = Path(__file__).parent / "text.txt"


@dataclass(frozen=True)
class Calibration:
    """A method of quantisation and the text that it observes the model on."""

    method: str  # one of METHODS, or NEAREST
    text: Path | None = None  # None: the text of the package
    windows: int = DEFAULT_WINDOWS  # most windows of WINDOW_TOKENS that are run

    @cached_property
    def content(self) -> str:
        """The text. Raises SourceError if the file cannot be read as text, or is empty."""
        path = _OWN_TEXT if self.text is None else expand_home(self.text, "--calib-dataset")
        try:
            content = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SourceError(
                f"{path}: cannot be read: {error.strerror}; calibration takes a text file"
            ) from error
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{path}: not a UTF-8 text, which calibration needs ({error.reason} at byte "
                f"{error.start})"
            ) from error
        if not content.strip():
            raise SourceError(f"{path}: empty: calibration needs a text")
        return content

    def fingerprint(self) -> str:
        """Return a text that changes with the result."""
        if self.method == NEAREST:
            return NEAREST
        digest = hashlib.sha256(self.content.encode()).hexdigest()
        return f"{self.method}:{self.windows}:{digest}"

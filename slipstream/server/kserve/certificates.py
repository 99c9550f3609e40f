"""The files of a server's TLS certificate, which may be replaced while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

_T = TypeVar("_T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CertificateFiles:
    """PEM files: a certificate, with those that it derives from, its key, and those of clients."""

    certificate: Path
    key: Path
    root: Path | None = None  # the certificate that those of clients must derive from

    def stamp(self) -> object:
        """Return what changes with the files. Raises OSError where one is missing."""
        files = filter(None, (self.certificate, self.key, self.root))
        states = [file.stat() for file in files]
        return [(state.st_ino, state.st_mtime_ns) for state in states]


class Reloaded(Generic[_T]):
    """The content of certificate files, read again when they change.

    Files that cannot be read are reported, and what was read before is kept: they may be in the
    middle of a change.
    """

    def __init__(self, files: CertificateFiles, read: Callable[[CertificateFiles], _T]) -> None:
        """`read` raises OSError or ValueError where it cannot read them."""
        self._files = files
        self._read = read
        self._stamp = files.stamp()
        self.value = read(files)

    def refresh(self) -> bool:
        """Read the files again if they have changed; return whether there is a new value."""
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return False
            self._stamp = stamp  # one line for each change
            self.value = self._read(self._files)
        except (OSError, ValueError) as error:
            logger.error(
                "the TLS certificate %s cannot be read again, the former one is used: %s",
                self._files.certificate,
                error,
            )
            return False
        logger.info("the TLS certificate %s was read again", self._files.certificate)
        return True

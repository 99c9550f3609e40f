"""The repositories that commands have written or served: their engines must not be removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipstream.weights.cache.locks import locked
from slipstream.weights.home import slipstream_home
from slipstream.weights.whole_file import write_whole

DEFAULT_REPOSITORY = Path("~/models")


def served_repositories() -> Path:
    """Return the folder of the repositories that `slipstream start MODEL` writes."""
    return slipstream_home() / "repositories"


def remember_repository(repository: Path) -> None:
    """Note that a repository may need engines of the cache."""
    path = str(repository.absolute())
    if path in _remembered():
        return
    try:
        with locked("known repositories"):
            lines = [*_remembered(), path]
            write_whole(_memory(), "".join(f"{line}\n" for line in lines))
    except OSError:
        return  # where nothing can be written, no engine can be removed either


def _memory() -> Path:
    return slipstream_home() / "known-repositories.txt"


def _remembered() -> list[str]:
    file = _memory()
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def used_repositories() -> Iterator[Path]:
    """Yield the repositories that may need engines of the cache, each once."""
    places = [Path(line) for line in _remembered()]
    places.append(DEFAULT_REPOSITORY.expanduser().absolute())
    places += sorted(served_repositories().glob("*"))
    yield from dict.fromkeys(place for place in places if place.is_dir())

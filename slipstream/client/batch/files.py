"""The input and output files of a batch: one JSON object per line, in OpenAI's batch format.

The output file is also the record of what is done. A run that is repeated reads it, and sends only
the requests that have no result yet. Each result is one write of a whole line, so a run that is
killed leaves at most a torn last line, which the next run removes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

_BEGINNING = b'{"id":"batch_req_'  # of each line of an output file
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class BatchFileError(Exception):
    """A file of a batch that cannot be used. The text is one line that says where."""


class BatchRequest(msgspec.Struct):
    """A line of the input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw

    def problem(self) -> str:
        """Return why the request cannot be sent; empty: it can."""
        if self.method != "POST":
            return f"method must be POST, not {self.method}"
        if self.url not in URLS:
            return f"url must be one of {', '.join(URLS)}, not {self.url}"
        body = msgspec.json.decode(self.body)
        if not isinstance(body, dict):
            return "body must be an object"
        if body.get("stream"):
            return "stream is not supported in a batch: leave it out"
        return ""


@dataclass(frozen=True)
class BatchResult:
    """A line of the output file."""

    custom_id: str
    status: int | None  # of the response; None: the request was not sent
    body: bytes = b""  # of the response, JSON
    problem: str = ""  # why the request was not sent

    @property
    def failed(self) -> bool:
        return self.status is None or self.status >= 400

    def line(self) -> bytes:
        response: dict[str, Any] | None = None
        error: dict[str, Any] | None = None
        if self.status is None:
            error = {"code": "invalid_request", "message": self.problem}
        else:
            document, raw = _read_body(self.body)
            identity = document.get("id") if document is not None else None
            response = {"status_code": self.status, "request_id": identity or "", "body": raw}
            if self.failed:
                error = _error(self.status, document)
        result = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }
        return msgspec.json.encode(result) + b"\n"


def _read_body(body: bytes) -> tuple[Mapping[str, Any] | None, msgspec.Raw | str]:
    """Return the response's object, if it is one, and what stands in the result."""
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None, body.decode(errors="replace")
    return document if isinstance(document, dict) else None, msgspec.Raw(body.strip())


def _error(status: int, document: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the error of a response: the server's own, or its status."""
    given = document.get("error") if document is not None else None
    if not isinstance(given, dict):
        given = {}
    code = given.get("code") or given.get("type") or str(status)
    return {"code": code, "message": given.get("message") or f"the server answered {status}"}


class BatchInput:
    """The requests of an input file, which is checked as a whole first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, int] = {}  # custom_id → offset of its line
        self._read()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> Sequence[str]:
        return list(self._places)

    def requests(self, done: Mapping[str, bool]) -> Iterator[BatchRequest]:
        """Yield the requests that are not done, in their order."""
        with self._path.open("rb") as file:
            for identity, offset in self._places.items():
                if identity not in done:
                    file.seek(offset)
                    yield msgspec.json.decode(file.readline(), type=BatchRequest)

    def _read(self) -> None:
        offset = 0
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self._add(number, offset, line)
                    offset += len(line)
        except OSError as error:
            raise BatchFileError(f"{self._path}: {error.strerror}") from error
        if not self._places:
            raise BatchFileError(f"{self._path} has no requests")

    def _add(self, number: int, offset: int, line: bytes) -> None:
        place = f"{self._path} line {number}"
        try:
            request = msgspec.json.decode(line, type=BatchRequest)
            msgspec.json.decode(request.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BatchFileError(f"{place} is no request of a batch: {error}") from error
        if request.custom_id in self._places:
            raise BatchFileError(f"{place}: custom_id '{request.custom_id}' occurs before")
        self._places[request.custom_id] = offset


class _ResultLine(msgspec.Struct):
    """What is read again of an output file's line."""

    custom_id: str
    response: dict[str, msgspec.Raw] | None
    error: dict[str, msgspec.Raw] | None


class BatchOutput:
    """The results, in an output file that one process writes."""

    def __init__(self, path: Path, retry_failed: bool = False) -> None:
        """retry_failed: remove the results of failed requests first"""
        self.done: dict[str, bool] = {}  # custom_id → whether the request succeeded
        self._path = path
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise BatchFileError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise BatchFileError(f"{path} is written by another process") from error
        try:
            self._read()
            if retry_failed and not all(self.done.values()):
                self._remove_failed()
        except BaseException:
            self._file.close()
            raise

    def write(self, result: BatchResult) -> None:
        line = result.line()
        if self._file.write(line) != len(line):
            raise BatchFileError(f"{self._path}: the disk is full")
        self.done[result.custom_id] = not result.failed

    def reasons(self, wanted: Collection[str]) -> Counter[str]:
        """Return why requests have failed, by the messages of their errors, with their numbers."""
        found: Counter[str] = Counter()
        with self._path.open("rb") as file:
            for line in file:
                result = msgspec.json.decode(line, type=_ResultLine)
                if result.error is not None and result.custom_id in wanted:
                    found[str(msgspec.json.decode(result.error["message"]))] += 1
        return found

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        """Read what is done, and remove a result that was being written."""
        offset = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place = f"{self._path} line {number}"
                if not line.endswith(b"\n") and line.startswith(_BEGINNING[: len(line)]):
                    self._file.truncate(offset)
                    return
                offset += len(line)
                try:
                    result = msgspec.json.decode(line, type=_ResultLine)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise BatchFileError(
                        f"{place} is no result of a batch ({error}); give another output file"
                    ) from error
                if result.custom_id in self.done:
                    raise BatchFileError(f"{place}: custom_id '{result.custom_id}' occurs before")
                self.done[result.custom_id] = result.error is None

    def _remove_failed(self) -> None:
        """Write the successful results to a new file, and put it in the place of this one."""
        kept = self._path.with_name(f"{self._path.name}.kept")
        with self._path.open("rb") as old, kept.open("wb") as new:
            fcntl.flock(new, fcntl.LOCK_EX)
            for line in old:
                if msgspec.json.decode(line, type=_ResultLine).error is None:
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
            kept.replace(self._path)
            replaced = self._path.open("a+b", buffering=0)
        fcntl.flock(replaced, fcntl.LOCK_EX)
        self._file.close()
        self._file = replaced
        self.done = {identity: True for identity, succeeded in self.done.items() if succeeded}

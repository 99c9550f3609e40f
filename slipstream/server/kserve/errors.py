"""Triton's error codes and their HTTP statuses."""

from __future__ import annotations

import asyncio
from enum import Enum


class Code(Enum):
    UNKNOWN = "unknown"
    INTERNAL = "internal"
    NOT_FOUND = "not found"
    INVALID_ARG = "invalid argument"
    UNAVAILABLE = "unavailable"
    UNSUPPORTED = "unsupported"
    ALREADY_EXISTS = "already exists"
    CANCELLED = "cancelled"


STATUS = {Code.INTERNAL: 500, Code.NOT_FOUND: 404, Code.UNAVAILABLE: 503, Code.UNSUPPORTED: 501}


class InferenceError(Exception):
    """The failure of a request: raised before the model runs, or part of the model's response."""

    def __init__(self, message: str, code: Code = Code.INVALID_ARG) -> None:
        super().__init__(message)
        self.message = message
        self.code = code

    @property
    def status(self) -> int:
        return STATUS.get(self.code, 400)


class PlainTextError(InferenceError):
    """An error that Triton sends as text/plain over HTTP: found before the body is read, or by the
    model and its backend.
    """


class Unavailable(InferenceError):
    """The request is valid but cannot be served now. A later attempt may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.UNAVAILABLE)


class ServerFault(InferenceError):
    """The request is valid, and no request of its kind can be served: the server is at fault."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.INTERNAL)


def error_type(error: BaseException) -> str:
    """Return the name of the error's code or class, a word from a small set."""
    if isinstance(error, InferenceError):
        return error.code.name
    if isinstance(error, asyncio.CancelledError):
        return Code.CANCELLED.name
    return type(error).__name__


class NeedsPrimary(Exception):
    """Only the primary front end has what this request needs: a secondary one forwards it.

    Raised before the request is counted and before its response begins.
    """


class QueueFull(Unavailable):
    """The model's queue has reached its configured limit."""

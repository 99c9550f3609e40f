"""Errors as Triton names them, and the HTTP status each of them has."""

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
    """A request failed. Raised before a model runs it is the request's own fault; from a model it
    is an answer.
    """

    def __init__(self, message: str, code: Code = Code.INVALID_ARG) -> None:
        super().__init__(message)
        self.message = message
        self.code = code

    @property
    def status(self) -> int:
        return STATUS.get(self.code, 400)


class Unavailable(InferenceError):
    """Nothing is wrong with the request, but nobody can work on it now. Trying again later may
    help.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.UNAVAILABLE)


def error_type(error: BaseException) -> str:
    """One word for it, of the few that there are."""
    if isinstance(error, InferenceError):
        return error.code.name
    return (
        Code.CANCELLED.name if isinstance(error, asyncio.CancelledError) else type(error).__name__
    )


class QueueFull(Unavailable):
    """So many wait already that the model's configuration allows no more."""

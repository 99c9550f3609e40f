"""Errors in Anthropic's format."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from slipstream.server.openai.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


NO_THREADS = "thread_unsupported_request"  # code of the error about conversations on the server


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def error_body(problem: ApiError, request_id: str) -> bytes:
    """Return the body of an error response, which is also the data of an error event."""
    kind = _TYPES.get(problem.status, "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": problem.message}
    if problem.code == NO_THREADS:
        error["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

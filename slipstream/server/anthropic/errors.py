"""Errors in Anthropic's format."""

from __future__ import annotations

import secrets

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


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def error_body(problem: ApiError, request_id: str) -> bytes:
    """Return the body of an error response, which is also the data of an error event."""
    kind = _TYPES.get(problem.status, "invalid_request_error")
    error = {"type": kind, "message": problem.message}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

"""Calls of /v1/responses and of chat completions that must have the same answer."""

from __future__ import annotations

from typing import Any

from openai_server import Serving


def respond(serving: Serving, given: Any = "Hello there", **fields: Any) -> Any:
    """Create a response of at most 12 greedy tokens."""
    return serving.client.responses.create(
        **{"model": "chat", "input": given, "temperature": 0, "max_output_tokens": 12, **fields}
    )


def chatted(serving: Serving, messages: Any, **fields: Any) -> Any:
    """Complete a conversation by at most 12 greedy tokens."""
    return serving.client.chat.completions.create(
        **{"model": "chat", "messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    )

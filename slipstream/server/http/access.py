"""Whether an HTTP request may call an API."""

from __future__ import annotations

from slipstream.server.http.exchange import TEXT, Exchange
from slipstream.server.kserve.access import Access


class Refused(Exception):
    """A request that is refused by its head: a wrong method or a missing key."""

    def __init__(self, status: int, message: str, content_type: bytes = TEXT) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.content_type = content_type


def check_access(access: Access, api: str, exchange: Exchange) -> None:
    """Raise Refused where the request may not call this API."""
    if not access.guarded and api not in access.http_restrictions:
        return

    def read_header(name: str) -> str | None:
        value = exchange.header(name.encode("latin-1", "replace"))
        return value.decode("latin-1") if value else None

    refusal = access.refuse_http(api, read_header)
    if refusal is not None:
        raise Refused(refusal.status, refusal.message)
    access.note_tenant(read_header)

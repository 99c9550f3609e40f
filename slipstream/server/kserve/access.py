"""Access control for HTTP and gRPC: API keys for the whole server, and Triton's restricted APIs.

Without keys all calls are allowed, as with Triton. With a key every call needs one, but health
probes only with `health_needs_key`. The calls that change or reveal the server itself (repository
control, logging, trace, shared memory) need the admin key if there is one. The admin key allows all
calls.

With several API keys each one is a tenant. Tenants do not share cached blocks: the latency of a
response must not reveal the prompts of others. Their keys do not allow the calls of the admin key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

Api = Literal[
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
]
APIS: tuple[str, ...] = get_args(Api)
ADMIN_APIS = frozenset({"model-repository", "shared-memory", "trace", "logging"})
GRPC_RESTRICTED_PREFIX = "triton-grpc-protocol-"
BEARER = "bearer "

TENANT: ContextVar[str] = ContextVar("tenant", default="")  # tenant of the current request

# returns the value of a header or metadata entry by its name in lower case
Header = Callable[[str], str | None]


@dataclass(frozen=True)
class Restriction:
    header: str  # name of the header in the spelling of the flag, for the error text
    value: str


@dataclass(frozen=True)
class Refusal:
    """The reason why a call is refused.

    For gRPC, 503 is UNAVAILABLE, 401 UNAUTHENTICATED and 403 PERMISSION_DENIED.
    """

    status: int
    message: str


@dataclass(frozen=True)
class Access:
    api_key: str = field(default="", repr=False)  # one key or several, one per line
    admin_key: str = field(default="", repr=False)
    http_restrictions: Mapping[str, Restriction] = field(default_factory=dict, repr=False)  # by API
    grpc_restrictions: Mapping[str, Restriction] = field(default_factory=dict, repr=False)

    health_needs_key: bool = False
    guarded: bool = field(init=False, repr=False)  # whether any call needs a key

    def __post_init__(self) -> None:
        object.__setattr__(self, "guarded", bool(self.api_key or self.admin_key))

    @cached_property
    def api_keys(self) -> tuple[str, ...]:
        return tuple(key for line in self.api_key.splitlines() if (key := line.strip()))

    def note_tenant(self, header: Header) -> None:
        """Set the tenant of an accepted request for the code that handles it."""
        if len(self.api_keys) > 1:
            TENANT.set(
                hashlib.sha256((_key(header) or "").encode("utf-8", "surrogateescape")).hexdigest()
            )

    def _is_api_key(self, given: str | None) -> bool:
        # compares with all keys, so that the time reveals nothing
        return sum(_same(given, key) for key in self.api_keys) > 0

    def refuse_http(self, api: str, header: Header) -> Refusal | None:
        restriction = self.http_restrictions.get(api)
        if restriction is not None and not _same(
            header(restriction.header.lower()), restriction.value
        ):
            return Refusal(403, f"This API is restricted, expecting header '{restriction.header}'")
        return self._refuse(api, header)

    def refuse_grpc(self, api: str, header: Header) -> Refusal | None:
        restriction = self.grpc_restrictions.get(api)
        if restriction is not None:
            name = GRPC_RESTRICTED_PREFIX + restriction.header
            if not _same(header(name.lower()), restriction.value):
                return Refusal(503, f"This protocol is restricted, expecting header '{name}'")
        return self._refuse(api, header)

    def _refuse(self, api: str, header: Header) -> Refusal | None:
        if not self.guarded or (api == "health" and not self.health_needs_key):
            return None
        given = _key(header)
        if self.admin_key and _same(given, self.admin_key):
            return None
        if api in ADMIN_APIS:
            if not self.admin_key and len(self.api_keys) == 1 and self._is_api_key(given):
                # a single key allows all calls; with several, no tenant is an administrator
                return None
            return Refusal(403 if given else 401, "This API needs the admin key")
        if self._is_api_key(given):
            return None
        return Refusal(401, "This server needs an API key")


def _key(header: Header) -> str | None:
    authorization = header("authorization") or ""
    if authorization.lower().startswith(BEARER):
        return authorization[len(BEARER) :].strip()
    return header("x-api-key") or header("api-key")


def _same(given: str | None, expected: str) -> bool:
    """Compare in constant time, so that a key cannot be found letter by letter."""
    return given is not None and hmac.compare_digest(
        given.encode("utf-8", "surrogateescape"), expected.encode()
    )


def parse_restrictions(texts: list[str]) -> dict[str, Restriction]:
    """Return the restrictions of texts like `inference,model-config:api-key=secret`.

    Raises ValueError that says what is wrong.
    """
    restrictions: dict[str, Restriction] = {}
    for text in texts:
        apis, colon, pair = text.partition(":")
        header, equals, value = pair.partition("=")
        if not (colon and equals and header.strip() and value.strip()):
            raise ValueError(f"'{text}' must be <API>[,<API>...]:<header>=<value>")
        for api in (part.strip() for part in apis.split(",")):
            if api not in APIS:
                raise ValueError(f"unknown API '{api}', there are: {', '.join(APIS)}")
            if api in restrictions:
                raise ValueError(f"API '{api}' is restricted more than once")
            restrictions[api] = Restriction(header.strip(), value.strip())
    return restrictions

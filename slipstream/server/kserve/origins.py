"""The web pages that may use the server: its host names, and the origins it accepts.

A browser sends requests for any page that its user visits, also to servers that only this machine
reaches. The headers `Origin` and `Sec-Fetch-Site` name the page's origin, and a page cannot set
them. Other clients send neither. A page can also make its own host name resolve to this machine
(DNS rebinding). Its requests then look like those of the server's own pages, but their `Host` is
the name of another site.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

ANY = "*"
_OWN_SITE = ("same-origin", "none")  # values of Sec-Fetch-Site; none: the user's own doing


@dataclass(frozen=True)
class OriginPolicy:
    # only this machine reaches the server, so its names are known
    local: bool = False
    hosts: tuple[str, ...] = ()  # further names of the server, in lower case; `*`: any
    origins: tuple[str, ...] = ()  # origins of pages that may use the server; `*`: any

    def knows_host(self, host: str) -> bool:
        """Return whether the server answers to the name in a `Host` header.

        An address cannot be rebound, so all are known.
        """
        if not self.local or not host or ANY in self.hosts:
            return True
        name = _without_port(host).lower().rstrip(".")
        own = ("localhost", socket.gethostname().lower(), *self.hosts)
        return name in own or name.endswith(".localhost") or _is_address(name)

    def accepts(self, origin: str, host: str, fetch_site: str) -> bool:
        """Return whether a page of this origin may use the server. `host`: the `Host` header."""
        if self.names(origin) or fetch_site in _OWN_SITE:
            return True
        # browsers send Sec-Fetch-Site only over TLS and to this machine
        return not fetch_site and urlsplit(origin).netloc.lower() == host.lower()

    def names(self, origin: str) -> bool:
        """Return whether an option names this origin."""
        return bool(origin) and (origin.lower() in self.origins or ANY in self.origins)


def read_origin(text: str) -> str:
    """Return an origin like `https://example.com:8443`, or `*`, in lower case.

    Raises ValueError that says what is wrong.
    """
    origin = text.strip().lower().rstrip("/")
    parts = urlsplit(origin)
    if origin != ANY and (not parts.scheme or origin != f"{parts.scheme}://{parts.netloc}"):
        raise ValueError(
            f"'{text}' is not an origin: give the scheme, the host and the port, if it is not the "
            "usual one, such as https://example.com, or * for all pages"
        )
    return origin


def _without_port(host: str) -> str:
    if host.startswith("["):  # an IPv6 address
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


@lru_cache(maxsize=256)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

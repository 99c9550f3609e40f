"""The pages that the server has for a browser: a chat at `/`, its routes at `/docs`. Each is one
file, and fetches only from the server it came from: its headers let a browser hold it to that.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from importlib import resources

from starlette.responses import HTMLResponse

PAGES = {"/": "chat.html", "/docs": "docs.html"}


def page(file: str) -> Callable[[], HTMLResponse]:
    text = resources.files("slipstream.server.http").joinpath(file).read_text("utf-8")
    headers = {
        "content-security-policy": _policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return lambda: HTMLResponse(text, headers=headers)


def _policy(text: str) -> str:
    """Its own scripts and styles run, by their hashes; nothing else does, and nobody may put it in
    a frame.
    """
    return (
        f"default-src 'none'; script-src {_hashes(text, 'script')}; style-src {_hashes(text, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(text: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)

"""`/v2/health/live` of a rank host, for the liveness probe of its pod."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LIVE = "/v2/health/live"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer 200 to the live probe, and 400 to all else: the leader serves."""
        self.send_response(200 if self.path == LIVE else 400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *values: object) -> None:
        """Write no line for a request."""


def answer_live_probe(address: str, port: int) -> ThreadingHTTPServer:
    """Answer at this address in a thread. Raises OSError if the port is in use."""
    server = ThreadingHTTPServer((address, port), _Handler)
    threading.Thread(target=server.serve_forever, name="live probe", daemon=True).start()
    return server

"""A proxy in front and the server see the same requests, whatever a client sends.

nginx and HAProxy pass what they accept to the server over connections that they keep. A request
that the server takes for two, or a body that it takes for a request, would be one that the proxy
has not seen: it could pass the proxy's rules, and its response would go to another client.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from http_support import RunningServer

from gates.proxies import PROXIES, VARIANTS, Proxy
from gates.smuggling_corpus import TWO_REQUESTS, corpus
from gates.table import Row
from slipstream.server.http.exchange import TEXT, ClientGone, Exchange

_STATUS = re.compile(rb"HTTP/1\.[01] ([2-5])\d\d ")  # without 100 Continue
_MOST_SECONDS = 4.0  # until the proxy has logged a request: its timeouts are 2 and 3 s


class _Server:
    """Counts the requests that it handles, and those that it refuses because it cannot read them.

    The tap in front of it sees refusals: an error status, or a connection that the server closes.
    """

    def __init__(self) -> None:
        self.handled = 0
        self.refused = 0
        self.unanswered = 0  # handled, and without a response so far

    async def handle(self, exchange: Exchange) -> None:
        self.handled += 1
        self.unanswered += 1
        with suppress(ClientGone):
            body = await exchange.read_body(1 << 20)
            self.unanswered -= 1
            await exchange.respond(200, b"%d" % len(body), TEXT)

    @property
    def seen(self) -> int:
        return self.handled + self.refused


class _Connection:
    """What the tap knows of one connection."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._kept = b""
        self._awaits_response = False
        self._client_gone = False

    def sent(self, data: bytes) -> None:
        self._client_gone = not data
        self._awaits_response = self._awaits_response or bool(data)

    def answered(self, data: bytes) -> None:
        self._kept = self._kept[-20:] + data
        for status in _STATUS.findall(self._kept):
            self._awaits_response = False
            self._server.refused += status in b"45"
        self._kept = _STATUS.sub(b"", self._kept)

    def closed_by_server(self) -> None:
        if not self._awaits_response or self._client_gone:
            return
        if self._server.unanswered:
            self._server.unanswered -= 1
        else:
            self._server.refused += 1


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    """`long`: also through proxies that pass more than by default, and a row for each case."""
    server = _Server()
    with RunningServer(server.handle) as running:
        async with _tap(running.port, server) as port:
            for name, start in PROXIES.items():
                if shutil.which(name) is None:
                    rows.append(Row(name, f"not installed: apt-get install {name}", None))
                    continue
                for variant, options in VARIANTS[name].items():
                    if variant and not long:
                        continue
                    place = folder / f"{name}{variant}".replace(" ", "-")
                    place.mkdir()
                    with start(place, port, options) as proxy:
                        found = await asyncio.to_thread(_try_all, server, proxy)
                    rows.append(_compare(f"{name}{variant}", found))
            rows.append(await asyncio.to_thread(_count, port, server))


@asynccontextmanager
async def _tap(target: int, server: _Server) -> AsyncIterator[int]:
    """Forward connections to the server and count its responses."""

    async def copy(
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        note: Callable[[bytes], None],
    ) -> None:
        with suppress(OSError):  # an end that has gone
            while data := await reader.read(1 << 16):
                note(data)
                writer.write(data)
                await writer.drain()
            note(b"")
            writer.write_eof()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(server)
        above_reader, above_writer = await asyncio.open_connection("127.0.0.1", target)
        sending = asyncio.ensure_future(copy(reader, above_writer, connection.sent))
        await copy(above_reader, writer, connection.answered)
        connection.closed_by_server()
        sending.cancel()
        await asyncio.wait([sending])
        above_writer.close()
        writer.close()

    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(forward(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _try_all(server: _Server, proxy: Proxy) -> dict[str, tuple[int, int]]:
    """Return for each case how many requests the proxy has passed and the server has seen."""
    found = {}
    for name, pieces in corpus().items():
        passed, seen = proxy.passed(), server.seen
        _send(proxy.port, pieces)
        deadline = time.monotonic() + _MOST_SECONDS
        while time.monotonic() < deadline and proxy.passed() - passed != server.seen - seen:
            time.sleep(0.02)
        found[name] = (proxy.passed() - passed, server.seen - seen)
    return found


def _compare(name: str, found: dict[str, tuple[int, int]]) -> Row:
    differ = {case: counts for case, counts in found.items() if counts[0] != counts[1]}
    passed = sum(counts[0] for counts in found.values())
    seen = sum(counts[1] for counts in found.values())
    refused = sum(counts == (0, 0) for counts in found.values())
    text = f"{len(found)} cases, {refused} refused by the proxy; "
    text += f"it passed {passed} requests, the server saw {seen}"
    for case, (there, here) in differ.items():
        text += f"; {case}: passed {there}, seen {here}"
    return Row(name, text, not differ and passed > 0)


def _send(port: int, pieces: list[bytes]) -> bytes:
    """Send with pauses and read until the other end has nothing more to say."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        try:
            for number, piece in enumerate(pieces):
                if number:
                    connection.settimeout(0.2)
                    with suppress(TimeoutError):  # it waits for the rest
                        received += connection.recv(1 << 16)
                connection.sendall(piece)
            connection.settimeout(0.25)
            while data := connection.recv(1 << 16):
                received += data
        except OSError:
            pass  # closed, or silent: the other end has answered all that it saw
    return received


def _count(port: int, server: _Server) -> Row:
    """Without a proxy: no case is more than the requests that it is written as."""
    wrong = []
    for name, pieces in corpus().items():
        handled = server.handled
        _send(port, pieces)
        if server.handled - handled > (2 if name in TWO_REQUESTS else 1):
            wrong.append(name)
    found = f"{len(wrong)} of {len(corpus())} handled as more than is written {' '.join(wrong)}"
    return Row("without a proxy", found.rstrip(), not wrong)

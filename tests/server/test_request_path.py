"""The path of one streamed generate request: the modules of the server that run for it, and the
async iterators that each of its tokens passes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tiny_server import HERE, MODEL, make_repository

from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.kserve.health import ServerState
from slipstream.server.options import Port, ServerOptions
from slipstream.server.services import Services

SERVER = str(Path(sys.modules[Services.__module__].__file__ or "").parent)
MAX_MODULES = 34
BODY = b'{"text_input": "5", "max_tokens": 5, "stream": true}'
REQUEST = (
    f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: localhost\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n"
).encode() + BODY


@contextmanager
def recorded_modules() -> Iterator[set[str]]:
    """Yield the set of the server's modules in which a function starts or goes on."""
    modules: set[str] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SERVER):
            modules.add(frame.f_code.co_filename.removeprefix(SERVER + "/"))

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield modules
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def stream(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += await reader.read(1 << 16)
    writer.close()
    return received


def test_modules_that_run_for_a_streamed_generate(tmp_path):
    repository = make_repository(tmp_path)

    async def run() -> set[str]:
        command = (sys.executable, str(HERE / "scripted_engine.py"))
        engines = EnginePool({}, Supervision(), command)
        closed = Port(0, open=False)
        options = ServerOptions((repository,), grpc=closed, metrics=closed)
        services = Services(options, engines, ServerState(engines), [])
        loader = services.loader
        reading = loader.read()
        assert await services.load(list(reading.repository.models), reading) == {}
        listening = socket.create_server(("127.0.0.1", 0))
        await services.open(listening, None)
        port = listening.getsockname()[1]
        await stream(port)  # what is built with the first request is not counted
        with recorded_modules() as modules:
            answer = await stream(port)
        await services.close()
        await engines.stop()
        assert answer.count(b"data: ") == 5, answer
        return modules

    modules = asyncio.run(run())
    assert len(modules) <= MAX_MODULES, sorted(modules)

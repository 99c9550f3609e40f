"""The path of one streamed generate request: the modules of the server that run for it, and the
async iterators that each of its tokens passes.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

from tiny_server import HERE, MODEL, make_repository

from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.frontends.ports import Ports
from slipstream.server.kserve.health import ServerState
from slipstream.server.options import Port, ServerOptions
from slipstream.server.services import Services

SERVER = str(Path(sys.modules[Services.__module__].__file__ or "").parent)
MAX_MODULES = 20
# the watchdog looks at the processes of an engine four times a second, whatever the requests do
WATCHDOG = {"engine_link/child.py", "log/process_state.py", "engine_link/silence.py"}
MAX_ITERATORS = 5
ITERATORS = [
    "metrics/statistics.py CountedResponses.__anext__",
    "models/generating.py GeneratingModel.answer",
    "text/pipeline.py TextGenerator.generate",
    "engine_link/mailbox.py InFlightRequest.__anext__",
]
MERGED = "text/sequences.py merge_streams"  # for requests with several sequences


@dataclass
class Recording:
    """The server's functions that were called or resumed."""

    functions: set[CodeType] = field(default_factory=set)

    @property
    def modules(self) -> set[str]:
        return {_module(code) for code in self.functions}

    @property
    def iterators(self) -> set[str]:
        """The async generators, and the `__anext__` of other async iterators."""
        return {
            f"{_module(code)} {code.co_qualname}"
            for code in self.functions
            if code.co_flags & inspect.CO_ASYNC_GENERATOR or code.co_name == "__anext__"
        }


def _module(code: CodeType) -> str:
    return code.co_filename.removeprefix(SERVER + "/")


@contextmanager
def recording() -> Iterator[Recording]:
    found = Recording()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SERVER):
            found.functions.add(frame.f_code)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[int]:
    """Serve the scripted engine, which runs in a process of its own; yield the HTTP port."""
    engines = EnginePool({}, Supervision(), (sys.executable, str(HERE / "scripted_engine.py")))
    closed = Port(0, open=False)
    options = ServerOptions((make_repository(folder),), Port(0), closed, closed)
    services = Services(options, engines, ServerState(engines), [])
    reading = services.loader.read()
    assert await services.load(list(reading.repository.models), reading) == {}
    ports = Ports(options.http, closed, closed)
    await services.open(ports)
    try:
        assert ports.http is not None
        yield ports.http.getsockname()[1]
    finally:
        await services.close()
        ports.close()
        await engines.stop()


async def record_second_request(folder: Path, **fields: object) -> tuple[Recording, bytes]:
    """Stream a request twice over one connection. Record the second, when all is set up."""
    # the seed makes each step of the scripted engine take 20 ms, so that tokens arrive one by one
    given = {"text_input": "5", "max_tokens": 5, "stream": True, "seed": 20, **fields}
    body = json.dumps(given)
    head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: localhost\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    async with serving(folder) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def stream() -> bytes:
            writer.write(request)
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += await reader.read(1 << 16)
            return received

        await stream()
        with recording() as found:
            answer = await stream()
        writer.close()
    return found, answer


async def test_a_streamed_generate_runs_code_of_few_modules(tmp_path):
    found, answer = await record_second_request(tmp_path)
    assert answer.count(b"data: ") > 1, answer
    modules = found.modules - WATCHDOG
    assert len(modules) <= MAX_MODULES, "\n".join(sorted(modules))


async def test_each_token_of_a_stream_passes_four_async_iterators(tmp_path):
    found, answer = await record_second_request(tmp_path)
    assert answer.count(b"data: ") > 1, answer
    assert found.iterators == set(ITERATORS)


async def test_several_sequences_add_one_async_iterator(tmp_path):
    found, answer = await record_second_request(tmp_path, num_return_sequences=2)
    assert answer.count(b"data: ") > 2, answer
    assert found.iterators == {*ITERATORS, MERGED}
    assert len(found.iterators) <= MAX_ITERATORS

"""One process of the load generator: `python -m serving.load_worker`, started by `load.py`.

It reads its share of the requests, connects, prints `ready`, waits for the common start, and prints
the times of every answer as JSON.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import sys
import time
from collections import deque
from typing import Any

import uvloop

from serving.cells import GRPC, Answer
from serving.connections import EventStream, GrpcStream, StreamConnection


class Worker:
    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._grpc = plan["api"] == GRPC
        bodies = (self._body(text) for text in plan["bodies"])
        self._waiting = deque(enumerate(bodies))
        self._answers: list[Answer | None] = [None] * len(plan["bodies"])
        self._free: list[StreamConnection] = []
        self._all: list[StreamConnection] = []
        self._left = len(plan["bodies"])
        self._complete = asyncio.Event()

    def _body(self, text: str) -> bytes:
        return base64.b64decode(text) if self._grpc else text.encode()

    async def connect(self) -> None:
        for _ in range(self._plan["connections"]):
            self._free.append(await self._connection())

    async def _connection(self) -> StreamConnection:
        event_loop = asyncio.get_running_loop()
        _, made = await event_loop.create_connection(
            GrpcStream if self._grpc else lambda: EventStream(self._plan["path"]),
            self._plan["host"],
            self._plan["port"],
        )
        self._all.append(made)
        return made

    async def run(self, begin: float) -> None:
        """Send all requests from the time `begin` on, and wait for their answers."""
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        due = self._plan["due"]
        senders = self._send_at_times(begin, due) if due else self._keep_in_flight()
        try:
            async with asyncio.timeout(self._plan["limit"]):
                await senders
                await self._complete.wait()
        except TimeoutError:
            for connection in self._all:
                connection.fail(f"no complete answer within {self._plan['limit']:g} s")

    async def _keep_in_flight(self) -> None:
        free, self._free = self._free, []
        for connection in free:
            self._send_next(connection)

    async def _send_at_times(self, begin: float, due: list[float]) -> None:
        for offset in due:
            await asyncio.sleep(max(0.0, begin + offset - time.monotonic()))
            self._send_next(self._free.pop() if self._free else await self._connection())

    def _send_next(self, connection: StreamConnection) -> None:
        if self._waiting:
            number, body = self._waiting.popleft()
            connection.send(
                body,
                self._plan["tokens"],
                lambda answer: self._take(number, connection, answer),
            )

    def _take(self, number: int, connection: StreamConnection, answer: Answer) -> None:
        self._answers[number] = answer
        self._left -= 1
        if not self._left:
            self._complete.set()
        elif connection.closed:
            self._replace(connection)
        elif self._plan["due"]:
            self._free.append(connection)
        else:
            self._send_next(connection)

    def _replace(self, lost: StreamConnection) -> None:
        """Fail the next request if its connection is lost, so that every request has an answer."""
        if self._plan["due"] or not self._waiting:
            return
        number, _ = self._waiting.popleft()
        now = time.monotonic_ns()
        failed = Answer(now, now, now, [], 0, 0, "the connection is closed")
        self._take(number, lost, failed)

    def result(self, began: float, used: float) -> dict[str, Any]:
        now = time.monotonic_ns()
        missing = Answer(now, now, now, [], 0, 0, "not answered")
        return {
            "cpu_seconds": time.process_time() - used,
            "seconds": time.monotonic() - began,
            "answers": [vars(one or missing) for one in self._answers],
        }


async def main() -> None:
    plan = json.loads(sys.stdin.readline())
    worker = Worker(plan)
    await worker.connect()
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    begin = float(await asyncio.to_thread(sys.stdin.readline))
    used = time.process_time()
    await worker.run(begin)
    result = worker.result(begin, used)
    print("done", flush=True)
    json.dump(result, sys.stdout)
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())

"""An event loop in a thread, for callers without one or inside their own, and streams for both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class EventLoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._event_loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._event_loop.run_forever, name="llm", daemon=True
        )
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Return the coroutine's result. An exception such as Ctrl-C here cancels it."""
        if self._event_loop.is_closed():
            coroutine.close()
            raise RuntimeError("this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._event_loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def closed(self) -> bool:
        return self._event_loop.is_closed()

    def close(self) -> None:
        if self._event_loop.is_closed():
            return
        self._event_loop.call_soon_threadsafe(self._event_loop.stop)
        self._thread.join()
        self._event_loop.close()


class TextStream:
    """The pieces of one completion, for `for` and for `async for`.

    `close` and `aclose` cancel the request. So does leaving the loop early, once nothing refers to
    the stream.
    """

    def __init__(self, pieces: AsyncGenerator[str, None], caller: EventLoopThread) -> None:
        self._pieces = pieces
        self._caller = caller
        self._in_thread: bool | None = None  # which of the two loops reads it; None: none yet

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        self._begin(in_thread=True)
        piece = self._caller.run(_next(self._pieces))
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Cancel the request. Nothing happens if the stream has ended or not begun."""
        if self._in_thread and not self._caller.closed:
            self._caller.run(self._pieces.aclose())

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> str:
        self._begin(in_thread=False)
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Cancel the request. Nothing happens if the stream has ended or not begun."""
        await self._pieces.aclose()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _begin(self, in_thread: bool) -> None:
        if self._in_thread not in (None, in_thread):
            raise RuntimeError("a stream is read by `for` or by `async for`, not by both")
        self._in_thread = in_thread


async def _next(pieces: AsyncGenerator[str, None]) -> str | None:
    return await anext(pieces, None)

"""Responses that are generated in the background, while clients poll for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from slipstream.server.http.exchange import RETRY_AFTER
from slipstream.server.openai.calls import Document
from slipstream.server.openai.errors import ApiError, as_api_error
from slipstream.server.openai.generation import CallAnswers
from slipstream.server.openai.responses.writer import ResponseWriter
from slipstream.server.text.threads import in_thread_if_long

MAX_RUNNING = 256

Save = Callable[[Document], None]


@dataclass
class BackgroundRuns:
    """The running responses, by id. No connection bounds them, so their number is bounded here."""

    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def start(self, answers: CallAnswers, writer: ResponseWriter, save: Save) -> Document:
        """Start to generate a response. Return it as it is now."""
        if len(self._tasks) >= MAX_RUNNING:
            raise ApiError(
                f"background: there are {MAX_RUNNING} responses in the background already",
                "background",
                status=429,
                headers=(RETRY_AFTER,),
            )
        queued = writer.unfinished("queued")
        save(queued)
        task = asyncio.create_task(_run(answers, writer, save))
        self._tasks[writer.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(writer.id, None))
        return queued

    async def cancel(self, identity: str) -> bool:
        """Cancel a response. Return whether it was running."""
        task = self._tasks.get(identity)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()


async def _run(answers: CallAnswers, writer: ResponseWriter, save: Save) -> None:
    try:
        async with aclosing(answers.outputs()) as arrivals:
            started = False
            async for _ in arrivals:
                if not started:
                    save(writer.unfinished("in_progress"))
                    started = True
        tokens = len(answers.choices[0].tokens)
        await in_thread_if_long(tokens, writer.finished, answers)
    except Exception as error:
        writer.failed(as_api_error(error, writer.id))

"""One instance of a Python model: `python -m slipstream.server.python_models.worker ORDERS EVENTS
PARENT`.

The server starts and watches it. ORDERS and EVENTS are the numbers of inherited sockets, PARENT is
the server's process id. Repository code runs only in this process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.server.log.parent_death import die_with
from slipstream.server.python_models.backend_config import ModelConfig
from slipstream.server.python_models.backend_requests import InferenceRequest, ResponseSender
from slipstream.server.python_models.backend_tensors import InferenceResponse, TritonError
from slipstream.server.python_models.channel import Channel
from slipstream.server.python_models.frames import (
    Execute,
    Executed,
    Log,
    Order,
    Response,
    Start,
    Started,
    StartFailed,
    Stop,
)

SEARCH_PATH = Path(__file__).parent / "search_path"


class Worker:
    def __init__(self, channel: Channel, start: Start) -> None:
        self._channel = channel
        self._start = start
        self._repository = Path(start.model_folder).parent
        self._model: Any = None

    def begin(self) -> bool:
        """Import the model and initialize it. Reports a failure to the server and returns False."""
        try:
            model_class = load_model_class(self._start)
            arguments, config = self._complete(model_class)
            self._model = model_class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(arguments)
        except Exception as error:
            self._log("the model did not start")
            self._channel.send(StartFailed(self.describe(error)))
            return False
        self._channel.send(Started(config))
        return True

    def _complete(self, model_class: Any) -> tuple[dict[str, str], str]:
        arguments = dict(self._start.arguments)
        complete = getattr(model_class, "auto_complete_config", None)
        if complete is None or not self._start.complete_config:
            return arguments, ""
        completed = complete(ModelConfig(json.loads(arguments["model_config"])))
        if not isinstance(completed, ModelConfig):
            raise TypeError("auto_complete_config must return the configuration it was given")
        arguments["model_config"] = json.dumps(completed.as_dict(), separators=(",", ":"))
        return arguments, arguments["model_config"]

    def serve(self, orders: Iterator[Order]) -> None:
        for order in orders:
            if isinstance(order, Execute):
                accepted = self._channel.accept(order.requests)
                requests = [InferenceRequest.from_frame(frame, self._channel) for frame in accepted]
                self._channel.send(Executed(self._execute(requests) if requests else []))
            elif isinstance(order, Stop):
                if hasattr(self._model, "finalize"):
                    self._model.finalize()
                return

    def _execute(self, requests: list[InferenceRequest]) -> list[Response]:
        """Run the model; return the responses that are still to be sent."""
        try:
            answers = self._model.execute(requests)
            if not isinstance(answers, list) and inspect.isawaitable(answers):
                answers = asyncio.run(_wait(answers))
            if not self._start.decoupled:
                return _frames(requests, answers)
            if answers is not None:
                raise TypeError(
                    "execute of a decoupled model must return None; "
                    "responses go through the senders"
                )
            return []
        except Exception as error:
            self._log("execute failed", requests)
            text = f"Failed to process the request(s) for model '{self._start.instance}', message: "
            failed = InferenceResponse([], TritonError(text + self.describe(error)))
            senders = [request.get_response_sender() for request in requests]
            return [sender.frame(failed, final=True) for sender in senders if not sender.closed]

    def _log(self, what: str, requests: Sequence[InferenceRequest] = ()) -> None:
        """Write the exception that is being handled to the server's log."""
        ids = ", ".join(request.request_id() for request in requests if request.request_id())
        self._channel.send(
            Log("E", f"{what}:\n{traceback.format_exc().rstrip()}", self._start.instance, ids)
        )

    def describe(self, error: Exception) -> str:
        """Return type, text and traceback, innermost first; paths start at the repository."""
        text = f"{type(error).__name__}: {error}"
        frames = [
            entry
            for entry in traceback.extract_tb(error.__traceback__)
            if not _is_ours(entry.filename)
        ]
        if not frames:
            return text
        lines = [
            f"  {self._place(entry.filename)}({entry.lineno}): {entry.name}\n"
            for entry in reversed(frames)
        ]
        return text + "\n\nAt:\n" + "".join(lines)

    def _place(self, filename: str) -> str:
        """Return the path in the repository; for a file elsewhere only its name."""
        try:
            return str(Path(filename).relative_to(self._repository))
        except ValueError:
            return Path(filename).name


def _frames(requests: list[InferenceRequest], answers: Any) -> list[Response]:
    """Return the frames of what `execute` returned, after checking all of it."""
    if answers is None:
        answers = [None] * len(requests)
    if not isinstance(answers, list):
        raise TypeError(
            f"execute must return a list of InferenceResponse, not {type(answers).__name__}"
        )
    if len(answers) != len(requests):
        raise ValueError(
            f"execute got {len(requests)} requests but returned {len(answers)} responses"
        )
    left: list[tuple[ResponseSender, InferenceResponse]] = []
    for request, answer in zip(requests, answers, strict=True):
        sender = request.get_response_sender()
        if not sender.closed:
            if not isinstance(answer, InferenceResponse):
                raise TypeError(
                    f"execute must return InferenceResponse objects, not {type(answer).__name__}"
                )
            left.append((sender, answer))
    return [sender.frame(answer, final=True) for sender, answer in left]


def _is_ours(filename: str) -> bool:
    return Path(filename).parent == Path(__file__).parent or filename.startswith("<frozen ")


async def _wait(answers: Any) -> Any:
    return await answers


def load_model_class(start: Start) -> Any:
    """Return the class of the model's file. Like upstream, its folders come last on the path."""
    file = Path(start.file)
    sys.path = [str(SEARCH_PATH), *sys.path, str(file.parent), start.model_folder]
    specification = importlib.util.spec_from_file_location("model", file)
    if specification is None or specification.loader is None or not file.is_file():
        raise FileNotFoundError(
            f"there is no {file.name} in version {file.parent.name} of the model"
        )
    module = importlib.util.module_from_spec(specification)
    sys.modules["model"] = module
    specification.loader.exec_module(module)
    model_class = getattr(module, "TritonPythonModel", None)
    if model_class is None:
        raise AttributeError(f"{file.name} has no class TritonPythonModel")
    if not hasattr(model_class, "execute"):
        raise AttributeError("TritonPythonModel has no method execute")
    return model_class


def _show_warning(
    channel: Channel,
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    *more: Any,
) -> None:
    channel.send(Log("W", f"{category.__name__}: {message}", f"{Path(filename).name}:{lineno}"))


def main() -> int:
    *sockets, parent_process = map(int, sys.argv[1:])
    if not die_with(parent_process):
        return 1
    channel = Channel(*(socket.socket(fileno=descriptor) for descriptor in sockets))
    channel.listen()
    warnings.showwarning = partial(_show_warning, channel)
    orders = channel.orders()
    start = next(orders)
    if not isinstance(start, Start):
        return 1
    worker = Worker(channel, start)
    if not worker.begin():
        return 1
    worker.serve(orders)
    return 0


def run() -> None:
    """Run `main`, then exit at once: a model's threads must not keep the process alive."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()

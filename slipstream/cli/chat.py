"""`slipstream chat`: a conversation with a model of a running server, in the terminal or through a
pipe.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.keys import read_api_key
from slipstream.cli.log import CONTROL, log
from slipstream.cli.server_address import add_address, address_of
from slipstream.client.connection import HttpConnection, ServerError

PROMPT = ">>> "
_TICK_SECONDS = 0.2
_HOW = "Ctrl-C stops an answer, /clear forgets what was said, /exit or Ctrl-D ends."
_COMMAND = re.compile(r"/[a-z]+")
# are in every repository, beside the model under its own name
_CUSTOMARY = ("ensemble", "tensorrt_llm_bls")


class Conversation:
    """What was said so far, on this side of the connection: the server keeps nothing."""

    def __init__(self, connection: HttpConnection, model: str, system: str | None) -> None:
        self._connection = connection
        # Small models, which people try first, lose themselves where anything but the likeliest is
        # drawn.
        self._settings = {"model": model, "temperature": 0, "stream": True}
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.cut_short = False  # the last answer, by the end of the context
        self.clear()

    def clear(self) -> None:
        self._messages = list(self._beginning)

    def answer(self, question: str) -> Generator[str, None, None]:
        """The pieces of an answer. One that is stopped half-way is a part of the conversation as
        far as it came.
        """
        messages = [*self._messages, {"role": "user", "content": question}]
        body = {**self._settings, "messages": messages}
        said, self.cut_short = "", False
        try:
            with contextlib.closing(
                self._connection.events("/v1/chat/completions", body)
            ) as events:
                for piece, end in (choice for event in events for choice in _choices(event)):
                    self.cut_short = end == "length"
                    if piece:
                        said += piece
                        yield piece
        finally:
            if said:
                self._messages = [*messages, {"role": "assistant", "content": said}]


def _choices(event: Any) -> list[tuple[str, Any]]:
    """What each of an event's choices adds to the answer, and why it ends there."""
    try:
        return [
            (str(choice["delta"].get("content") or ""), choice["finish_reason"])
            for choice in event["choices"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError("what answers there is not OpenAI's API") from error


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "slipstream chat",
        description=f"Talk to a model of a running server. {_HOW} What comes through "
        "a pipe is answered line by line.",
    )
    parser.add_argument(
        "-m", "--model", help="The model to talk to (default: the first with a name of its own)."
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="A system message for the conversation to begin with."
    )
    parser.add_argument(
        "--api-key",
        type=Path,
        metavar="FILE",
        help="A file with the server's key; else SLIPSTREAM_API_KEY is it.",
    )
    add_address(parser, "8000")
    given = parser.parse(arguments)
    address = address_of(given, 8000)
    with contextlib.closing(HttpConnection(address, read_api_key(given.api_key))) as connection:
        try:
            model = _chosen(connection.models(), given.model)
            conversation = Conversation(connection, model, given.system)
            _accept_any_bytes()
            if sys.stdin.isatty():
                print(f"This is {CONTROL.sub('', model)} at {address}. {_HOW}\n")
                _talk(conversation)
            else:
                _answer_lines(conversation)
        except ServerError as error:
            raise CommandError(str(error)) from error
    return 0


def _chosen(models: dict[str, str], wanted: str | None) -> str:
    """The model that is wanted or, of those that are no adapters, the one that somebody has named."""
    own = sorted(
        (name for name, parent in models.items() if not parent), key=lambda name: name in _CUSTOMARY
    )
    if wanted is not None and wanted not in models:
        raise CommandError(
            f"there is no model '{wanted}' to talk to; there are: {', '.join(models) or 'none'}"
        )
    if not own:
        raise CommandError(
            "the server has no model to talk to: none of its models makes text from text"
        )
    return wanted or own[0]


def _accept_any_bytes() -> None:
    """What is typed or piped is not always UTF-8, and not every terminal has all that a model
    writes.
    """
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _answer_lines(conversation: Conversation) -> None:
    for line in sys.stdin:
        if not _heed(line.strip(), conversation, end="\n"):
            return


def _talk(conversation: Conversation) -> None:
    # some Pythons are built without it, and edit lines less well
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            with _ticking():
                line = input(PROMPT)
        except (EOFError, KeyboardInterrupt) as leaving:
            print()
            if isinstance(leaving, EOFError):
                return
            continue  # only the line that was typed is given up
        try:
            with _ticking():
                if not _heed(line.strip(), conversation, end="\n\n"):
                    return
        except KeyboardInterrupt:
            continue  # only the answer ends
        except ServerError as error:
            log("ERROR", str(error))


@contextlib.contextmanager
def _ticking() -> Iterator[None]:
    """A Ctrl-C that comes just before a read begins is seen when that read ends; each tick of a
    clock ends one.
    """
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, _TICK_SECONDS, _TICK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _heed(line: str, conversation: Conversation, end: str) -> bool:
    """Answer, or do as told; False where the conversation is over."""
    if line == "/exit":
        return False
    if line == "/clear":
        conversation.clear()
    elif _COMMAND.fullmatch(line):
        log("ERROR", f"there is no {line}: {_HOW}")
    elif line:
        _print(conversation.answer(line), end)
        if conversation.cut_short:
            log("ERROR", "the answer ends here because the context is full; /clear makes room")
    return True


def _print(pieces: Generator[str, None, None], end: str) -> None:
    """As they come. Leaving early closes them, by which the server knows that nobody reads on."""
    shown, ending = sys.stdout.isatty(), ""
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                ending = end
                sys.stdout.write(CONTROL.sub("", piece) if shown else piece)
                sys.stdout.flush()
        ending = end
    except KeyboardInterrupt:
        ending = ending or "\n"
        raise
    finally:
        sys.stdout.write(ending)
        sys.stdout.flush()

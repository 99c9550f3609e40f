"""`slipstream chat`: a conversation with a model of a running server, in the terminal or through a
pipe.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import (
    add_address,
    add_api_key,
    closing_connection,
    server_address,
)
from slipstream.cli.keys import read_api_key
from slipstream.cli.log import CONTROL, log
from slipstream.client.connection import HttpConnection, ServerError

PROMPT = ">>> "
_TICK_SECONDS = 0.2
_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"
_HELP = "Ctrl-C stops an answer, /clear starts a new conversation, /exit or Ctrl-D quits."
_COMMAND = re.compile(r"/[a-z]+")
# models that every repository has beside the one with a name of its own
_STANDARD_NAMES = ("ensemble", "tensorrt_llm_bls")


class Piece(NamedTuple):
    """A piece of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class Conversation:
    """The messages so far. The client keeps them: the server keeps nothing."""

    def __init__(self, connection: HttpConnection, model: str, system: str | None) -> None:
        self._connection = connection
        # greedy: small models, which people try first, often lose the thread when sampled
        self._settings = {"model": model, "temperature": 0, "stream": True}
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.cut_short = False  # the last answer ended because the context was full
        self.clear()

    def clear(self) -> None:
        self._messages = list(self._beginning)

    def answer(self, question: str) -> Generator[Piece, None, None]:
        """Yield the pieces of an answer. A stopped answer stays in the conversation as it is."""
        messages = [*self._messages, {"role": "user", "content": question}]
        body = {**self._settings, "messages": messages}
        said = ""
        self.cut_short = False
        stream = self._connection.events("/v1/chat/completions", body)
        try:
            with contextlib.closing(stream) as events:
                for choice in itertools.chain.from_iterable(map(_choices, events)):
                    self.cut_short = choice.finish_reason == "length"
                    if choice.reasoning:
                        yield Piece(choice.reasoning, is_reasoning=True)
                    if choice.text:
                        said += choice.text
                        yield Piece(choice.text)
        finally:
            if said:
                self._messages = [*messages, {"role": "assistant", "content": said}]


class _Choice(NamedTuple):
    text: str
    reasoning: str
    finish_reason: Any


def _choices(event: Any) -> list[_Choice]:
    try:
        return [
            _Choice(
                str(choice["delta"].get("content") or ""),
                str(choice["delta"].get("reasoning_content") or ""),
                choice["finish_reason"],
            )
            for choice in event["choices"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError("the server's answer is not one of OpenAI's API") from error


def create_parser() -> Parser:
    parser = Parser(
        "slipstream chat",
        f"Chat with a model of a running server. {_HELP} Lines from a pipe are answered in order.",
    )
    parser.add_argument(
        "-m",
        "--model",
        help="Name of the model (default: the first that is not an ensemble or BLS model).",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="System message at the start of the conversation."
    )
    add_api_key(parser)
    add_address(parser, "8000")
    return parser


def run(given: Namespace) -> int:
    address = server_address(given, 8000)
    connection = HttpConnection(address, read_api_key(given.api_key))
    with closing_connection(connection):
        model = _choose_model(connection.models(), given.model)
        conversation = Conversation(connection, model, given.system)
        _accept_any_bytes()
        if sys.stdin.isatty():
            print(f"This is {CONTROL.sub('', model)} at {address}. {_HELP}\n")
            _talk(conversation)
        else:
            _answer_lines(conversation)
    return 0


def _choose_model(models: dict[str, str], wanted: str | None) -> str:
    """Return the wanted model, else the first that is no adapter and has a name of its own."""
    own = sorted(
        (name for name, parent in models.items() if not parent),
        key=lambda name: name in _STANDARD_NAMES,
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
    """Replace invalid UTF-8 in the input, and what the terminal cannot show in the output."""
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _answer_lines(conversation: Conversation) -> None:
    for line in sys.stdin:
        if not _handle_line(line.strip(), conversation, end="\n"):
            return


def _talk(conversation: Conversation) -> None:
    # line editing; some Pythons are built without it
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            with _interruptible():
                line = input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue  # discards the typed line
        try:
            with _interruptible():
                if not _handle_line(line.strip(), conversation, end="\n\n"):
                    return
        except KeyboardInterrupt:
            continue  # stops the answer
        except ServerError as error:
            log("ERROR", str(error))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let a timer interrupt blocking reads.

    A Ctrl-C that arrives just before a read starts is noticed only when that read returns.
    """
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, _TICK_SECONDS, _TICK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _handle_line(line: str, conversation: Conversation, end: str) -> bool:
    """Answer a message or run a command. Returns False at the end of the conversation."""
    if line == "/exit":
        return False
    if line == "/clear":
        conversation.clear()
    elif _COMMAND.fullmatch(line):
        log("ERROR", f"there is no command {line}: {_HELP}")
    elif line:
        _print(conversation.answer(line), end)
        if conversation.cut_short:
            log("ERROR", "the answer ends here because the context is full; /clear makes room")
    return True


def _print(pieces: Generator[Piece, None, None], end: str) -> None:
    """Print the pieces as they arrive. Closing them early makes the server stop generating."""
    terminal = sys.stdout.isatty()
    ending = ""
    try:
        with contextlib.closing(pieces):
            for text in _terminal_texts(pieces) if terminal else _answer_texts(pieces):
                ending = end
                sys.stdout.write(text)
                sys.stdout.flush()
        ending = end
    except KeyboardInterrupt:
        ending = ending or "\n"
        raise
    finally:
        sys.stdout.write(ending)
        sys.stdout.flush()


def _answer_texts(pieces: Iterable[Piece]) -> Iterator[str]:
    """Yield the answer without the reasoning."""
    return (piece.text for piece in pieces if not piece.is_reasoning)


def _terminal_texts(pieces: Iterable[Piece]) -> Iterator[str]:
    """Yield the reasoning, dimmed, then the answer."""
    reasoned = False
    for piece in pieces:
        text = CONTROL.sub("", piece.text)
        if piece.is_reasoning:
            yield f"{_DIM}{text}{_PLAIN}"
        else:
            yield f"\n\n{text}" if reasoned else text
        reasoned = piece.is_reasoning

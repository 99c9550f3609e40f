"""`slipstream chat`: a conversation with a model of a running server, in the terminal or through a
pipe.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.connections import (
    add_address,
    add_api_key,
    choose_model,
    closing_connection,
    server_address,
)
from slipstream.cli.conversation import NUMBERS, SETTINGS, Conversation, Piece
from slipstream.cli.keys import read_api_key
from slipstream.cli.log import CONTROL, log
from slipstream.client.connection import HttpConnection, ServerError

PROMPT = ">>> "
_TICK_SECONDS = 0.2
_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"
_HELP = "Ctrl-C stops an answer, /clear starts a new conversation, /exit or Ctrl-D quits."
_MORE_HELP = "/help lists the other commands."
_COMMANDS = f"""\
/set NAME VALUE   change a setting: {", ".join(SETTINGS)}
/set NAME         back to the server's default, or none
/set              list all settings
/show             show the settings and the length of the conversation
/retry            ask the last question again
/save FILE        write the conversation to a file
/load FILE        continue a conversation that was saved
/clear            start a new conversation
/exit             quit; so does Ctrl-D
A line of \"\"\" begins a message of several lines, and another one ends it."""
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)
_QUOTES = '"""'
_CONTINUED = "... "


def create_parser() -> Parser:
    parser = Parser(
        "slipstream chat",
        f"Chat with a model of a running server. {_HELP} /set changes a setting such as the "
        "temperature, /retry asks again, /save and /load keep a conversation in a file, and /help "
        "lists all commands. Lines from a pipe are answered in order.",
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
        model = choose_model(connection.models(), given.model)
        conversation = Conversation(connection, model, given.system)
        _accept_any_bytes()
        if sys.stdin.isatty():
            print(f"This is {CONTROL.sub('', model)} at {address}. {_HELP} {_MORE_HELP}\n")
            _talk(conversation)
        else:
            _answer_lines(conversation)
    return 0


def _accept_any_bytes() -> None:
    """Replace invalid UTF-8 in the input, and what the terminal cannot show in the output."""
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _answer_lines(conversation: Conversation) -> None:
    lines = iter(sys.stdin)
    for line in lines:
        message = _whole_message(line, lambda: next(lines))
        if not _handle_line(message, conversation, end="\n"):
            return


def _whole_message(line: str, read: Callable[[], str]) -> str:
    """Return the message that begins with this line. `read` returns the next one, or raises
    EOFError or StopIteration.
    """
    if line.strip() != _QUOTES:
        return line.strip()
    lines: list[str] = []
    with contextlib.suppress(StopIteration, EOFError):
        while (following := read().rstrip("\n")).strip() != _QUOTES:
            lines.append(following)
    return "\n".join(lines).strip()


def _talk(conversation: Conversation) -> None:
    # line editing; some Pythons are built without it
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            with _interruptible():
                line = _whole_message(input(PROMPT), lambda: input(_CONTINUED))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue  # discards the typed line
        try:
            with _interruptible():
                if not _handle_line(line, conversation, end="\n\n"):
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
    command = _COMMAND.fullmatch(line)
    if line == "/exit":
        return False
    if command is not None:
        try:
            _run_command(command[1], (command[2] or "").strip(), conversation, end)
        except (CommandError, OSError) as error:
            log("ERROR", str(error))
    elif line:
        _answer(line, conversation, end)
    return True


def _answer(question: str, conversation: Conversation, end: str) -> None:
    _print(conversation.answer(question), end)
    if conversation.cut_short:
        log("ERROR", "the answer ends here because the context is full; /clear makes room")
    elif conversation.figures is not None and sys.stdout.isatty():
        print(f"{_DIM}{conversation.figures}{_PLAIN}\n")


def _run_command(name: str, argument: str, conversation: Conversation, end: str) -> None:
    if name == "/clear":
        conversation.clear()
    elif name == "/help":
        print(_COMMANDS)
    elif name == "/show":
        for setting, value in conversation.settings.items():
            print(f"{setting}: {value}")
        print(f"messages: {len(conversation.messages)}")
    elif name == "/set" and not argument:
        for setting in SETTINGS:
            unset = "the server's default" if setting in NUMBERS else "none"
            print(f"{setting}: {conversation.settings.get(setting, unset)}")
    elif name == "/set":
        setting, _, value = argument.partition(" ")
        conversation.set(setting, value.strip())
    elif name == "/retry":
        question = conversation.take_back()
        if question is None:
            raise CommandError("there is no question to ask again")
        _answer(question, conversation, end)
    elif name in ("/save", "/load"):
        if not argument:
            raise CommandError(f"{name} needs the name of a file")
        file = Path(argument).expanduser()
        (conversation.save if name == "/save" else conversation.load)(file)
    else:
        raise CommandError(f"there is no command {name}: {_HELP} {_MORE_HELP}")


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

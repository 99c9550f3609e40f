"""The argument parser of every command: argparse with one layout and one error style.

A long option is accepted with '-' or '_', as `--x v` or `--x=v`, and by a unique prefix. An unknown
option is an error of one line that suggests the nearest known option.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, Protocol

from slipstream.cli.log import log

MAX_FRONTENDS = 64
REPLICAS_HELP = (
    "Run this many engines of each engine model, and send each request to the one that has its "
    "prefix in the KV cache (default: the count of instance_group in config.pbtxt)"
)
RANKS_HELP = (
    "Run each engine as this many processes, each with a part of the weights, one per GPU "
    "(default: as many as the engine was built for, if there are as many GPUs; 1 on a CPU)"
)
FRONTENDS_HELP = (
    "Number of server processes that share the ports and the engines; auto: 1 on a CPU or with "
    "fewer than 8 cores, else a quarter of the cores, at most 8"
)
NO_EFFECT = "Accepted for compatibility; no effect."
_LEAST_LIKENESS = 0.6  # of an option that an error suggests
_MOST_SUGGESTED = 3
_NO_EFFECT_TITLE = "accepted for compatibility; no effect"


class CommandError(Exception):
    """A failure to report in one line. The command exits with code 1."""


class UsageError(CommandError):
    """A mistake in the command line. The command exits with code 2."""


class ArgumentContainer(Protocol):
    """A parser or one group of its options."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action: ...


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that knows its arguments and suggests a correction for a typo."""

    def __init__(self, prog: str, description: str, **settings: Any) -> None:
        self.arguments: list[argparse.Action] = []
        self._extended: list[_Group] = []  # sections that only --help-all shows
        super().__init__(prog, description=description, add_help=False, **settings)
        self.add_help_option()

    def add_help_option(self) -> None:
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        action = super().add_argument(*names, **_state_default(settings))
        self.arguments.append(action)
        return action

    def group(self, title: str, description: str | None = None) -> ArgumentContainer:
        """Return a titled section of the help, to which options can be added."""
        return _Group(self, self.add_argument_group(title, description))

    def extended_group(self, title: str, description: str | None = None) -> ArgumentContainer:
        """Return a section of the help that only `--help-all` shows."""
        if not self._extended:
            self.add_argument(
                "--help-all",
                action=_HelpAll,
                help="Show this help with all options, and exit.",
            )
        group = _Group(self, self.add_argument_group(title, description))
        self._extended.append(group)
        return group

    def alternatives(self) -> ArgumentContainer:
        """Return a group of options. At most one of them can be given."""
        return _Group(self, self.add_mutually_exclusive_group())

    def no_effect_group(self) -> ArgumentContainer:
        """Return the section for options that are accepted and ignored."""
        return self.group(_NO_EFFECT_TITLE)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments. A mistake is printed in one line and exits with code 2."""
        words = self._normalise(arguments)
        self._refuse_unknown(words)
        known, rest = self.parse_known_args(words)
        if rest:
            self.error(self.describe_unknown(rest[0]))
        return known

    def error(self, message: str) -> NoReturn:
        log("ERROR", f"{message} (see {self.prog} --help)")
        raise SystemExit(2)

    def format_help(self) -> str:
        """Return the help without the extended sections."""
        with ExitStack() as stack:
            for group in self._extended:
                stack.enter_context(group.hidden())
            return self.format_full_help()

    def format_full_help(self) -> str:
        self.usage = self._short_usage()
        return super().format_help()

    def format_usage(self) -> str:
        self.usage = self._short_usage()
        return super().format_usage()

    def describe_unknown(self, argument: str) -> str:
        """Return the error text for an argument that the parser does not know."""
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument '{argument}'"
        close = close_options(name.replace("_", "-"), self.long_options())
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        return f"there is no option {name}{hint}"

    def long_options(self) -> dict[str, str]:
        """Return every option as declared, keyed by its name with '-' in place of '_'."""
        options = {}
        for action in self.arguments:
            for option in action.option_strings:
                options[option.replace("_", "-")] = option
        return options

    def _normalise(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments with every long option spelled as it was declared."""
        options = self.long_options()
        words: list[str] = []
        for position, argument in enumerate(arguments):
            if argument == "--":
                return [*words, *arguments[position:]]
            name, equals, value = argument.partition("=")
            if name.startswith("--"):
                name = _declared_name(name, options, self.allow_abbrev)
            words.append(name + equals + value)
        return words

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Report an unknown long option before argparse reports what is missing because of it."""
        options = self.long_options()
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0].replace("_", "-")
            is_option = name.startswith("--") and " " not in word
            if is_option and not any(option.startswith(name) for option in options):
                self.error(self.describe_unknown(word))

    def _short_usage(self) -> str:
        """Return `PROG [options]`, the required options and the positional arguments."""
        options = []
        positionals = []
        for action in self.arguments:
            if not action.option_strings:
                positionals.append(_positional_usage(action))
            elif action.required:
                options.append(f"{action.option_strings[0]} {_value_name(action)}")
        usage = " ".join([self.prog, "[options]", *options, *positionals])
        width = max(20, shutil.get_terminal_size().columns - len("usage: ") - 2)
        lines = textwrap.wrap(usage, width, break_on_hyphens=False)
        return "\n         ".join(lines).replace("%", "%%")


def close_options(name: str, options: Mapping[str, str]) -> list[str]:
    """Return the options that a mistyped one may mean: the nearest one, or those with a nearer
    word in their names, as --http-port for --port. options: their names with '-' → as declared
    """
    word = name.lstrip("-")
    whole = {option: _likeness(word, option.lstrip("-")) for option in options}
    parts = {option: _part_likeness(word, option) for option in options}
    nearest = max(whole, key=whole.__getitem__, default="")
    best = max(parts.values(), default=0.0)
    if nearest and whole[nearest] >= max(best, _LEAST_LIKENESS):
        return [options[nearest]]
    if best < _LEAST_LIKENESS:
        return []
    return [options[option] for option in parts if parts[option] == best][:_MOST_SUGGESTED]


def _part_likeness(word: str, option: str) -> float:
    """Return the likeness of a word to the nearest part of an option's name."""
    return max(_likeness(word, part) for part in option.lstrip("-").split("-"))


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


class _Group:
    """A group of options whose parser keeps a list of them."""

    def __init__(self, parser: Parser, group: ArgumentContainer) -> None:
        self._parser = parser
        self._group = group
        self._arguments: list[argparse.Action] = []

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        action = self._group.add_argument(*names, **_state_default(settings))
        self._parser.arguments.append(action)
        self._arguments.append(action)
        return action

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Keep the group out of the help while the body runs."""
        helps = [action.help for action in self._arguments]
        description = getattr(self._group, "description", None)
        self._describe(None)
        for action in self._arguments:
            action.help = argparse.SUPPRESS
        try:
            yield
        finally:
            self._describe(description)
            for action, text in zip(self._arguments, helps, strict=True):
                action.help = text

    def _describe(self, text: str | None) -> None:
        if hasattr(self._group, "description"):
            self._group.description = text


class _HelpAll(argparse.Action):
    """Prints the whole help and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_full_help())
        raise SystemExit(0)


def _declared_name(name: str, options: dict[str, str], allow_prefix: bool) -> str:
    """Return the option that `name` means: itself, or the only one with this prefix."""
    dashed = name.replace("_", "-")
    if dashed in options:
        return options[dashed]
    matches = {option for key, option in options.items() if key.startswith(dashed)}
    return matches.pop() if allow_prefix and len(matches) == 1 else name


def _state_default(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an option with its default value in the help text."""
    text = settings.get("help")
    default = settings.get("default")
    if text is None or "default" in text or default is None or isinstance(default, bool):
        return settings
    if default == argparse.SUPPRESS or default == "" or default == []:
        return settings
    shown = f"{default:g}" if isinstance(default, float) else "%(default)s"
    return {**settings, "help": f"{text.rstrip('.')} (default: {shown})."}


def _value_name(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return action.dest.upper()


def _positional_usage(action: argparse.Action) -> str:
    name = _value_name(action) if action.metavar else action.dest
    return {"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name)


def at_least(minimum: float, kind: type[int] | type[float] = float) -> Callable[[str], float]:
    """Return a `type=` function for numbers that are not below `minimum`."""

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not number >= minimum:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"must be {what} of at least {minimum:g}, not '{text}'"
            )
        return number

    return read


def frontend_count(text: str) -> int:
    """Return a number of server processes; 0 stands for `auto`."""
    if text == "auto":
        return 0
    if not text.isdecimal() or not 1 <= int(text) <= MAX_FRONTENDS:
        raise argparse.ArgumentTypeError(f"must be auto or 1 to {MAX_FRONTENDS}, not '{text}'")
    return int(text)


def add_verbose(parser: ArgumentContainer) -> None:
    """Add `-v`, which Triton CLI has for every command."""
    parser.add_argument("-v", "--verbose", action="store_true", help=NO_EFFECT)

"""The command-line reference as Markdown, generated from the parsers.

`python -m slipstream.cli.reference` prints it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

from slipstream.cli.arguments import Parser
from slipstream.cli.commands import COMMANDS, GROUPS, SCRIPTS, create_parser
from slipstream.cli.compat import tritonserver_flags
from slipstream.cli.main import create_main_parser

_INTRODUCTION = """# Command-line reference

This page is generated from the parsers of the commands. Every command prints the same with `-h`.
Long options are accepted with `-` or `_`, as `--x v` or `--x=v`, and by a unique prefix.
"""


def render_reference() -> str:
    """Return the page: the commands by group, `tritonserver`, and the scripts of a workspace."""
    parts = [_INTRODUCTION, "## slipstream", _help_block(create_main_parser())]
    for title, group in GROUPS.items():
        parts.append(f"## {title}")
        for name, command in group.items():
            parts += [f"### slipstream {name}", _render(name, command.module)]
    parts += ["## Programs with Triton's names", "### tritonserver"]
    parts.append(render_parser(tritonserver_flags.create_parser()))
    parts += ["### perf_analyzer", render_parser(create_parser("perf-analyzer"))]
    parts.append("`trtllm-build` is `slipstream build`, and `genai-perf` is `slipstream bench`.")
    parts.append("## Scripts of a workspace")
    for name in SCRIPTS:
        if name not in ("genai-perf", "perf-analyzer"):
            parser = create_parser(name)
            parts += [f"### {parser.prog} ({name})", render_parser(parser)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _render(name: str, module: str) -> str:
    """Return the section of a command, or a link to the first command of the same module."""
    first = next(other for other, command in COMMANDS.items() if command.module == module)
    if first != name:
        return f"The same as [`slipstream {first}`](#slipstream-{first})."
    return render_parser(create_parser(name))


def render_parser(parser: Parser) -> str:
    """Return a parser's description, usage and options."""
    usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
    lines = [str(parser.description), "", f"    {usage}", ""]
    lines += [_option_line(action) for action in parser.arguments]
    return "\n".join(lines)


def _option_line(action: argparse.Action) -> str:
    """Return `- `-x`, `--name VALUE`: help` for an option or a positional argument."""
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{_value(action)}`"
    value = _value(action)
    if action.option_strings and value:
        names = f"{names} `{value}`"
    return f"- {names}: {_expand_default(action)}"


def _value(action: argparse.Action) -> str:
    """Return the placeholder of an argument's value, or nothing for a switch."""
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "|".join(map(str, _as_list(action.choices)))
    return action.dest.upper() if action.option_strings else action.dest


def _as_list(choices: Iterable[object]) -> list[object]:
    return list(choices)


def _expand_default(action: argparse.Action) -> str:
    text = action.help or ""
    return (text % {"default": action.default}).replace("<", "&lt;")


def _help_block(parser: Parser) -> str:
    return f"```text\n{parser.format_help().strip()}\n```"


def main() -> None:
    print(render_reference(), end="")


if __name__ == "__main__":
    main()

"""The command-line reference as Markdown, generated from the parsers.

`python docs/generate.py` writes it to docs/reference/cli.md.
"""

from __future__ import annotations

import argparse
import re
import textwrap

from slipstream.cli.arguments import Parser
from slipstream.cli.commands import COMMANDS, GROUPS, SCRIPTS, create_parser
from slipstream.cli.compat import tritonserver_flags

_WIDTH = 100
_INTRODUCTION = """# Command-line reference

`python docs/generate.py` writes this page from the parsers of the commands. Every command prints
the same with `-h`, or with `--help-all` if it has that option. Long options are accepted with `-`
or `_`, as `--x v` or `--x=v`. A unique prefix is enough, except for `tritonserver`.
"""


def render_reference() -> str:
    """Return the page: the commands by group, `tritonserver`, and the scripts of a workspace."""
    parts = [_INTRODUCTION]
    for title, group in GROUPS.items():
        parts.append(f"## {title}")
        for name, command in group.items():
            parts += [f"### slipstream {name}", _render(name, command.module)]
    parts.append("## Other programs")
    parts.append(
        "`triton` is `slipstream` with Triton CLI's log lines, `trtllm-build` is\n"
        "`slipstream build`, and `genai-perf` is `slipstream bench`."
    )
    parts += ["### tritonserver", render_parser(tritonserver_flags.create_parser())]
    parts += ["### perf_analyzer", render_parser(create_parser("perf-analyzer"))]
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
    lines = [textwrap.fill(str(parser.description), _WIDTH), "", f"    {usage}", ""]
    lines += [_option_item(action) for action in parser.arguments]
    return "\n".join(lines)


def _option_item(action: argparse.Action) -> str:
    """Return a list item with the names, the value and the help of an argument."""
    value = f"`{_value(action)}`" if _value(action) else ""
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    item = f"- {' '.join(filter(None, [names, value]))}: {_help_text(action)}"
    return textwrap.fill(
        item, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _value(action: argparse.Action) -> str:
    """Return the placeholder of an argument's value, or nothing for a switch."""
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "|".join(str(choice) for choice in action.choices)
    return action.dest.upper() if action.option_strings else action.dest


def _help_text(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default}
    return text.replace("<", "&lt;").replace("*", "\\*")

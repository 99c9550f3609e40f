"""`slipstream fill`: the old tools/fill_template.py, which also says what it could not place and
what is left.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser
from slipstream.repository.fill import fill_text, parse_substitutions, replace_file, report


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "slipstream fill", description="Fill the ${variables} of a config.pbtxt template."
    )
    parser.add_argument("file", type=Path, help="The template.")
    parser.add_argument(
        "substitutions", help="key:value,key:value,… (\\, \\: \\\\ are the characters themselves)"
    )
    parser.add_argument(
        "-i", "--in_place", action="store_true", help="Write the file instead of standard output."
    )
    given = parser.parse(arguments)
    try:
        text = given.file.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{given.file}: cannot be read: {error.strerror}") from error
    filled = fill_text(text, parse_substitutions(given.substitutions))
    if given.in_place:
        replace_file(given.file, filled.text)
    else:
        print(filled.text)
    for line in report(str(given.file), text, filled):
        print(f"[WARNING] {line}", file=sys.stderr)
    return 0

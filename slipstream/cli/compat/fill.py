"""`slipstream fill`: the old tools/fill_template.py. It also reports what is left unfilled."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser
from slipstream.repository.fill import fill_text, parse_substitutions, replace_file, report


def create_parser() -> Parser:
    parser = Parser("slipstream fill", "Fill the ${variables} of a config.pbtxt template.")
    parser.add_argument("file", type=Path, help="Template to fill.")
    parser.add_argument(
        "substitutions",
        help="Values as key:value,key:value; write \\, \\: and \\\\ for the characters themselves.",
    )
    parser.add_argument(
        "-i",
        "--in_place",
        action="store_true",
        help="Change the file instead of printing the result.",
    )
    return parser


def run(given: Namespace) -> int:
    try:
        text = given.file.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{given.file}: cannot be read: {error.strerror}") from error
    filled = fill_text(text, parse_substitutions(given.substitutions))
    if given.in_place:
        replace_file(given.file, filled.text)
    else:
        print(filled.text)
    for line in report(str(given.file), filled):
        print(f"[WARNING] {line}", file=sys.stderr)
    return 0

"""The documents name commands, options, metrics and files that exist."""

import re
import shlex
import tomllib
from argparse import Namespace

import pytest
from source_tree import ROOT, source_files

from slipstream.cli.commands import COMMANDS, create_parser
from slipstream.cli.reference import render_reference

GUIDES = ("README.md", "docs/quickstart.md", "docs/operations.md")
DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
]
START = "pip install -e . && slipstream start"
TEST = "pip install -e '.[test]' && pytest"


def code_lines(text: str) -> list[str]:
    """Return the lines of code blocks, with continued lines joined and prompts (`$ `) removed."""
    fenced = re.findall(r"^```(?:console|bash|sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^(?: {4}.*\n)+", outside, re.MULTILINE)
    joined = "\n".join([*fenced, *indented]).replace("\\\n", " ")
    return [line.strip().removeprefix("$ ") for line in joined.splitlines()]


def slipstream_commands(text: str) -> list[list[str]]:
    commands = []
    for line in code_lines(text):
        for part in re.split(r"\s(?:&&|\|)\s", line):
            if part.startswith("slipstream "):
                commands.append(shlex.split(part, comments=True)[1:])
    return commands


def parse(arguments: list[str]) -> Namespace | None:
    """Parse a command line without running it. A mistake raises SystemExit(2)."""
    if arguments[0] == "--version":
        return None
    if arguments[0] not in COMMANDS:
        raise SystemExit(2)
    return create_parser(arguments[0]).parse(arguments[1:])


def found_commands() -> list[tuple[str, list[str]]]:
    return [
        (name, found)
        for name in GUIDES
        for found in slipstream_commands((ROOT / name).read_text("utf-8"))
    ]


@pytest.mark.parametrize(("document", "arguments"), found_commands(), ids=str)
def test_documented_commands_can_be_parsed(document, arguments):
    parse(arguments)


def test_commands_are_found_in_both_guides():
    assert {name for name, _ in found_commands()} >= {"README.md", "docs/quickstart.md"}
    assert ["start"] in [arguments for _, arguments in found_commands()]


@pytest.mark.parametrize(
    "arguments",
    [
        ["begin"],
        ["start", "--prot", "1"],
        ["infer", "x", "y"],
        ["start", "--http-port", "many"],
    ],
)
def test_wrong_commands_are_refused(arguments):
    with pytest.raises(SystemExit) as refused:
        parse(arguments)
    assert refused.value.code == 2


def test_the_readme_has_the_two_first_commands():
    lines = code_lines((ROOT / "README.md").read_text("utf-8"))
    assert START in lines
    assert TEST in lines


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_name_existing_files(document):
    text = (ROOT / document).read_text("utf-8")
    folder = (ROOT / document).parent
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [
        target for target in targets if target and not target.startswith(("http://", "https://"))
    ]
    assert [target for target in local if not (folder / target).exists()] == []


def test_the_command_line_reference_is_up_to_date():
    """Run `python docs/generate.py` when this fails."""
    assert (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8") == render_reference()


def test_documented_metrics_exist():
    text = (ROOT / "docs" / "operations.md").read_text("utf-8")
    named = set(re.findall(r"`((?:nv|slipstream)_[a-z_]+)(?=[`{])", text))
    source = "".join(file.text for file in source_files())
    assert "nv_trt_llm_kv_cache_block_metrics" in named
    assert {name for name in named if f'"{name}"' not in source} == set()


def test_the_licence_file_has_the_declared_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()

"""The page for Triton users names every script, console command and parameter."""

from __future__ import annotations

import tomllib

from source_tree import ROOT

from slipstream.cli.commands import COMMANDS
from slipstream.repository.engine_parameters import PARAMETERS
from slipstream.repository.workspace import SCRIPTS

PAGE = (ROOT / "docs" / "coming-from-triton.md").read_text()


def test_the_page_names_every_repository_parameter() -> None:
    names = {name for parameters in PARAMETERS.values() for name in parameters}
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []


def test_the_page_names_every_workspace_script() -> None:
    scripts = {path.rpartition("/")[2] for path in SCRIPTS}
    # other names of the same clients
    scripts -= {"client_async.py", "end_to_end_streaming_client.py"}
    assert sorted(name for name in scripts if name not in PAGE) == []


def test_the_page_names_every_command() -> None:
    programs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert sorted(name for name in programs if f"`{name}" not in PAGE) == []
    assert (
        sorted(
            name
            for name in COMMANDS.keys() - {"serve"}  # alias of start
            if f"slipstream {name}" not in PAGE
            and f"`{name}`" not in PAGE
            and f"triton {name}" not in PAGE
        )
        == []
    )

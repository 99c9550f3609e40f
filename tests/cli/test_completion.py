"""`slipstream completion`: the script, in a real shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import run_cli

from slipstream.cli.commands import ALIASES, COMMANDS


def complete(script: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
    code = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _slipstream; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", code, str(script), *words], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "slipstream.bash"
    file.write_text(run_cli(["completion", "bash"]).stdout)
    return file


def test_bash_completes_commands_options_and_files(script: Path, tmp_path: Path) -> None:
    assert complete(script, "slipstream", "st") == ["start", "status", "stop"]
    assert set(complete(script, "slipstream", "")) == {*COMMANDS, *ALIASES}
    assert complete(script, "slipstream", "start", "--http-p") == ["--http-port"]
    assert complete(script, "slipstream", "rm", "--mod") == [
        "--model",
        "--model-repository",
        "--model-store",
    ]
    (tmp_path / "model.gguf").touch()
    assert complete(script, "slipstream", "serve", f"{tmp_path}/mod") == [f"{tmp_path}/model.gguf"]


def test_bash_completes_models(script: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Known models, and those of the default repository without their helpers."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert complete(script, "slipstream", "serve", "smol") == ["smollm2-135m"]
    for name in ("small", "ensemble", "preprocessing", "small-tensorrt_llm"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").touch()
    assert complete(script, "slipstream", "infer", "-m", "sm") == ["smollm2-135m", "small"]
    assert complete(script, "slipstream", "show", "sma") == ["small"]
    assert complete(script, "slipstream", "chat", "-m", "ense") == []
    assert complete(script, "slipstream", "bench", "--model", "gp") == ["gpt2"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid_and_names_every_command(shell: str, tmp_path: Path) -> None:
    result = run_cli(["completion", shell])
    assert (result.exit_code, result.stderr) == (0, "")
    for name in (*COMMANDS, *ALIASES):
        assert name in result.stdout
    file = tmp_path / "script"
    file.write_text(result.stdout)
    if shutil.which(shell):
        assert subprocess.run([shell, "-n", str(file)], check=False).returncode == 0


def test_another_shell_is_refused() -> None:
    result = run_cli(["completion", "cmd"])
    assert result.exit_code == 2
    assert "choose from" in result.stderr

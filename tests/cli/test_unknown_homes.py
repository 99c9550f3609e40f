"""Paths with an unknown home, `~name/…`: one error line, and nothing is written."""

from __future__ import annotations

import pytest
from command_line import run_cli

from slipstream.cli.compat.tritonserver import run

PATH = "~no.such.user/x"
UNKNOWN = "the home folder that it begins with is not known here"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["list", "--repo", PATH], f"--repo {PATH}"),
        (["remove", "-m", "all", "--model-store", PATH], f"--repo {PATH}"),
        (["import", "-m", "mine", "--source", "nowhere", "--repo", PATH], f"--repo {PATH}"),
        (["import", "-m", "mine", "--source", f"local:{PATH}", "--repo", "models"], PATH),
        (["doctor", "--repo", PATH], f"--model-repository {PATH}"),
        (["build", "--checkpoint_dir", "nowhere", "--output_dir", PATH], f"--output_dir {PATH}"),
        (["convert", "--model_dir", PATH], PATH),
        (["convert", "--model_dir", "nowhere", "--output_dir", PATH], f"--output_dir {PATH}"),
    ],
)
def test_a_command_names_the_path_with_the_unknown_home(tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    result = run_cli(arguments)
    assert (result.exit_code, result.stderr) == (1, f"error: {named}: {UNKNOWN}\n")
    assert not list(tmp_path.glob("~*"))


@pytest.mark.parametrize("variable", ["SLIPSTREAM_HOME", "ENGINE_DEST_PATH"])
def test_a_variable_with_an_unknown_home_is_named(tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, PATH)
    result = run_cli(["import", "-m", "mine", "--source", "x", "--repo", str(tmp_path / "r")])
    assert (result.exit_code, result.stderr) == (1, f"error: {variable} {PATH}: {UNKNOWN}\n")


def test_tritonserver_refuses_a_repository_in_an_unknown_home(capfd):
    assert run(["--model-repository", PATH]) == 1
    assert capfd.readouterr().err == f"tritonserver: error: --model-repository {PATH}: {UNKNOWN}\n"

"""`slipstream start MODEL`: what is named becomes an engine and a repository of its own, once, and stays up to date."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_hf_folder import save_model
from typer.testing import CliRunner

from slipstream.cli import main as command
from slipstream.cli import served_model
from slipstream.cli.served_model import find_named_model, make
from slipstream.repository.models import read_repository
from slipstream.server import lifecycle
from slipstream.weights.engine_config import read_engine_config

runner = CliRunner()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ENGINE_DEST_PATH", raising=False)
    return tmp_path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list:
    seen: list = []
    monkeypatch.setattr(lifecycle, "run_server", lambda options: seen.append(options) or 0)
    return seen


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict:
    seen: dict = {"commands": [], "code": 0}

    def call(arguments, env):
        seen["commands"].append(arguments[1:])
        return seen["code"]

    monkeypatch.setattr(served_model.subprocess, "call", call)
    return seen


@pytest.mark.parametrize(("text", "name"), [
    ("gpt2", "gpt2"),
    ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
    ("hf:org/my.model", "my.model"),
    ("models/tiny llama", "tiny-llama"),
    ("local:models/tiny llama", "tiny-llama"),
    ("models/weights.Q8.gguf", "weights.Q8"),
    ("models/ensemble", "ensemble-model"),
    ("models/.hidden", "hidden"),
])  # fmt: skip
def test_a_model_is_served_under_the_name_of_what_it_comes_from(home, monkeypatch, text, name):
    monkeypatch.chdir(home)
    for folder in ("tiny llama", "ensemble", ".hidden"):
        (home / "models" / folder).mkdir(parents=True)
    (home / "models" / "weights.Q8.gguf").touch()
    assert find_named_model(text).name == name


def test_models_of_one_name_from_two_places_are_two(home, monkeypatch):
    for place in ("a", "b"):
        (home / place / "mine").mkdir(parents=True)
    monkeypatch.chdir(home / "a")
    ours, theirs = find_named_model("mine"), find_named_model(str(home / "b" / "mine"))
    assert (ours.name, theirs.name) == ("mine", "mine")
    assert ours.engine != theirs.engine
    assert ours.repository != theirs.repository
    assert find_named_model("./mine") == find_named_model(str(home / "a" / "mine")) == ours


def test_it_is_built_once_and_again_when_its_weights_have_changed(home, capsys):
    save_model(home / "mine")
    model = find_named_model(str(home / "mine"))
    make(model)
    repository = read_repository(model.repository)
    assert set(repository.models) >= {"mine", "ensemble", "tensorrt_llm"}
    assert repository.engines["tensorrt_llm"].engine.path == model.engine
    built = read_engine_config(model.engine).request
    config = model.repository / "mine" / "config.pbtxt"
    config.write_text(config.read_text() + "# mine\n")
    capsys.readouterr()
    make(model)
    assert capsys.readouterr().out == f"[INFO] mine is served from {model.repository}\n", "nothing was built"
    shutil.rmtree(home / "mine")
    save_model(home / "mine", num_hidden_layers=1)
    make(model)
    assert read_engine_config(model.engine).request != built
    assert config.read_text().endswith("# mine\n"), "what somebody changed stays"


def test_an_engine_folder_is_served_as_it_is(home):
    save_model(home / "mine")
    make(find_named_model(str(home / "mine")))
    engine = find_named_model(str(home / "mine")).engine
    again = find_named_model(str(engine))
    make(again)
    assert read_repository(again.repository).engines["tensorrt_llm"].engine.path == engine


@pytest.mark.parametrize("name", ["start", "serve"])
def test_the_server_is_given_the_repository_of_the_model(home, served, calls, name):
    result = runner.invoke(command.app, [name, "gpt2", "--http-port", "0"])
    assert result.exit_code == 0, result.output
    assert calls["commands"] == [["-P", "-m", "slipstream.cli.served_model", "gpt2"]]
    assert served[0].repositories == (home / "home" / "repositories" / "gpt2",)


def test_a_model_that_cannot_be_had_is_not_served(served, calls):
    calls["code"] = 1
    assert (runner.invoke(command.app, ["serve", "gpt2"]).exit_code, served) == (1, [])


def test_why_it_cannot_be_had_is_one_line(capsys):
    with pytest.raises(served_model.typer.Exit):
        served_model.main("./nowhere")
    assert capsys.readouterr().err.startswith("error: ./nowhere: no such folder or file, and not a known model; known:")


def test_a_repository_may_be_named_in_its_place_but_not_beside_it(home, served, calls):
    (home / "models" / "mine").mkdir(parents=True)
    (home / "models" / "mine" / "config.pbtxt").touch()
    assert runner.invoke(command.app, ["serve", str(home / "models")]).exit_code == 0
    assert served[0].repositories == (home / "models",)
    result = runner.invoke(command.app, ["serve", "gpt2", "--repo", str(home / "models")])
    assert result.exit_code == 1
    assert "not both" in result.output
    assert calls["commands"] == []

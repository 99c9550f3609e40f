"""`slipstream start MODEL`: builds an engine and a repository for one model, once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import run_cli
from tiny_hf_folder import save_model

from slipstream.cli.models import served_model
from slipstream.cli.models.import_model import import_model
from slipstream.cli.models.served_model import ModelToServe, find_model_to_serve, make
from slipstream.repository.models import read_repository
from slipstream.repository.templates import write_repository
from slipstream.server import lifecycle
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import EngineConfig
from slipstream.weights.sources import hub


def engine_of(model: ModelToServe) -> EngineConfig:
    """Return the engine that the repository of a model names."""
    return read_repository(model.repository).engines["tensorrt_llm"].engine_config


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

    def call(arguments, environment):
        seen["commands"].append(arguments[1:])
        return seen["code"]

    monkeypatch.setattr(served_model, "run_part", call)
    return seen


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpt2", "gpt2"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("hf:org/my.model", "my.model"),
        ("models/tiny llama", "tiny-llama"),
        ("local:models/tiny llama", "tiny-llama"),
        ("models/weights.Q8.gguf", "weights.Q8"),
        ("models/ensemble", "ensemble-model"),
        ("models/.hidden", "hidden"),
    ],
)
def test_a_model_is_named_after_its_source(home, monkeypatch, text, name):
    monkeypatch.chdir(home)
    for folder in ("tiny llama", "ensemble", ".hidden"):
        (home / "models" / folder).mkdir(parents=True)
    (home / "models" / "weights.Q8.gguf").touch()
    assert find_model_to_serve(text).name == name


def test_models_of_the_same_name_have_separate_folders(home, monkeypatch):
    for place in ("a", "b"):
        (home / place / "mine").mkdir(parents=True)
    monkeypatch.chdir(home / "a")
    ours, theirs = find_model_to_serve("mine"), find_model_to_serve(str(home / "b" / "mine"))
    assert (ours.name, theirs.name) == ("mine", "mine")
    assert ours.source != theirs.source
    assert ours.repository != theirs.repository
    assert find_model_to_serve("./mine") == find_model_to_serve(str(home / "a" / "mine")) == ours


def test_an_engine_is_rebuilt_only_if_its_weights_changed(home, capsys):
    save_model(home / "mine")
    model = find_model_to_serve(str(home / "mine"))
    make(model)
    repository = read_repository(model.repository)
    assert set(repository.models) >= {"mine", "ensemble", "tensorrt_llm"}
    assert repository.engines["tensorrt_llm"].engine_config.path.parent == home / "home" / "engines"
    built = engine_of(model)
    config = model.repository / "mine" / "config.pbtxt"
    config.write_text(config.read_text() + "# mine\n")
    capsys.readouterr()
    make(model)
    assert capsys.readouterr().out == (
        f"[INFO] Found existing engine at {built.path}, skipping build.\n"
        f"[INFO] mine is served from {model.repository}\n"
    ), "nothing was built"
    shutil.rmtree(home / "mine")
    save_model(home / "mine", num_hidden_layers=1)
    make(model)
    assert engine_of(model).inputs_hash != built.inputs_hash
    assert not built.path.exists(), "nothing uses the former engine"
    assert config.read_text().endswith("# mine\n"), "what somebody changed stays"


def test_an_imported_model_is_served_by_its_name(home):
    engine = import_model("tiny", str(save_model(home / "mine")), home / "models")
    model = find_model_to_serve("tiny")
    assert (model.name, model.engine) == ("tiny", engine)
    make(model)
    assert engine_of(model).path == engine
    newer = import_model(
        "tiny", str(save_model(home / "other", num_hidden_layers=1)), home / "models"
    )
    again = find_model_to_serve("tiny")
    assert again.repository == model.repository
    make(again)
    assert engine_of(again).path == newer
    quantised = find_model_to_serve("tiny", "int8")
    assert (quantised.source, quantised.engine) == (str(home / "other"), None)


def test_a_local_folder_takes_precedence_over_a_known_name(home, monkeypatch):
    monkeypatch.chdir(home)
    known = find_model_to_serve("gpt2")
    (home / "gpt2").mkdir()
    assert known.source == "gpt2"
    assert find_model_to_serve("gpt2") == find_model_to_serve("./gpt2") != known


def test_the_repository_follows_engine_dest_path(home, monkeypatch):
    save_model(home / "mine")
    for place in (None, home / "elsewhere"):
        if place is not None:
            monkeypatch.setenv("ENGINE_DEST_PATH", str(place))
        model = find_model_to_serve(str(home / "mine"))
        make(model)
        assert engine_of(model).path.parent == (place or home / "home" / "engines")


def test_an_interrupted_build_leaves_no_partial_repository(home, monkeypatch):
    save_model(home / "mine")
    model = find_model_to_serve(str(home / "mine"))

    def killed(*arguments):
        write_repository(*arguments)
        assert not model.repository.exists(), "not while it is being written"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(served_model, "write_repository", killed)
        with pytest.raises(KeyboardInterrupt):
            make(model)
    assert list(model.repository.parent.iterdir()) == []
    make(model)
    assert "mine" in read_repository(model.repository).models


def test_an_empty_repository_is_rewritten_and_a_damaged_one_refused(home):
    save_model(home / "mine")
    model = find_model_to_serve(str(home / "mine"))
    make(model)
    assert run_cli(["remove", "-m", "all", "--repo", str(model.repository)]).exit_code == 0
    assert list(model.repository.iterdir()) == []
    make(model)
    assert "mine" in read_repository(model.repository).models
    shutil.rmtree(model.repository / "mine")
    with pytest.raises(
        ValueError, match=f"{model.repository} has no mine in it; remove the folder"
    ):
        make(model)


def test_an_engine_folder_is_served_without_a_build(home):
    save_model(home / "mine")
    model = find_model_to_serve(str(home / "mine"))
    make(model)
    engine = engine_of(model).path
    again = find_model_to_serve(str(engine))
    make(again)
    assert engine_of(again).path == engine
    assert again.repository != model.repository


@pytest.mark.parametrize("name", ["start", "serve"])
def test_start_and_serve_use_the_repository_of_the_model(home, served, calls, name):
    result = run_cli([name, "gpt2", "--http-port", "0"])
    assert result.exit_code == 0, result.output
    assert calls["commands"] == [["-P", "-m", "slipstream.cli.models.served_model", "gpt2"]]
    assert served[0].repositories == (find_model_to_serve("gpt2").repository,)
    assert served[0].repositories[0].parent == home / "home" / "repositories"


def test_a_failed_build_is_not_served(served, calls):
    calls["code"] = 1
    assert (run_cli(["serve", "gpt2"]).exit_code, served) == (1, [])


def test_an_unknown_source_is_one_error_line(capsys):
    assert served_model.main("./nowhere") == 1
    assert capsys.readouterr().err == "error: ./nowhere: no such folder or file\n"
    assert served_model.main("nowhere") == 1
    assert capsys.readouterr().err.startswith(
        "error: nowhere: no such folder or file, and not a known model; known:"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' names no model; give a known name, a folder, a GGUF file, or org/name at the hub"),
        (
            "local:",
            "'local:' names no model; give a known name, a folder, a GGUF file, or org/name at the hub",
        ),
        (
            "~no.such.user/x",
            "~no.such.user/x: the home folder that it begins with is not known here",
        ),
        (
            "models/tensorrt_llm",
            "models/tensorrt_llm is one model of a repository; serve the repository in its place: "
            "--repo {home}/models",
        ),
    ],
)
def test_a_text_that_names_no_model_is_refused(home, monkeypatch, served, calls, text, said):
    monkeypatch.chdir(home)
    (home / "models" / "tensorrt_llm" / "1").mkdir(parents=True)
    (home / "models" / "tensorrt_llm" / "config.pbtxt").touch()
    result = run_cli(["serve", text])
    assert (result.exit_code, result.output) == (1, f"error: {said.format(home=home)}\n")
    assert (served, calls["commands"]) == ([], [])


def test_the_error_without_a_network_names_no_option_of_import(home, monkeypatch, capsys):
    monkeypatch.setattr(hub, "_name_resolves", lambda: False)
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "cache"))
    assert served_model.main("org/mine") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: org/mine: the hub cannot be reached")
    assert said.endswith("or use a local folder or GGUF file\n")


def test_an_unreadable_key_fails_before_the_build(home, served, calls):
    result = run_cli(["serve", "gpt2", "--api-key", str(home / "missing")])
    assert result.exit_code == 1
    assert result.output.startswith(
        f"error: --api-key: the key file {home / 'missing'} cannot be read:"
    )
    assert (served, calls["commands"]) == ([], [])


def test_a_repository_can_be_given_instead_of_a_model_but_not_with_it(home, served, calls):
    (home / "models" / "mine").mkdir(parents=True)
    (home / "models" / "mine" / "config.pbtxt").touch()
    assert run_cli(["serve", str(home / "models")]).exit_code == 0
    assert served[0].repositories == (home / "models",)
    result = run_cli(["serve", "gpt2", "--repo", str(home / "models")])
    assert result.exit_code == 1
    assert "not both" in result.output
    assert calls["commands"] == []


def test_a_model_is_built_with_weight_only_beside_the_plain_one(home, served) -> None:
    source = save_model(home / "llama")
    plain = find_model_to_serve(str(source))
    quantised = find_model_to_serve(str(source), "int8")
    assert (quantised.name, quantised.source) == (plain.name, plain.source)
    assert plain.repository != quantised.repository
    assert run_cli(["serve", str(source), "--quantization", "int8"]).exit_code == 0
    (options,) = served
    assert options.repositories == (quantised.repository,)
    (engine,) = read_repository(quantised.repository).engines.values()
    assert engine.engine_config.quantisation.algorithm == "W8A16"
    assert not plain.repository.exists()


def test_weight_only_of_what_is_built_is_an_error(home, served, calls) -> None:
    engine = home / "engine"
    build_engine(save_model(home / "llama"), engine, dtype="float32")
    write_repository(home / "models", "llama", engine, engine, 4)
    for text, kind in ((engine, "a built engine"), (home / "models", "a repository")):
        result = run_cli(["start", str(text), "--weight-only", "fp8"])
        assert result.exit_code == 1
        assert f"--weight-only fp8: {text} is {kind}, whose " in result.stderr
    assert (served, calls["commands"]) == ([], [])


def test_import_takes_the_same_flag(home) -> None:
    source = str(save_model(home / "llama"))
    words = ["import", "-m", "tiny", "-s", source, "--repo", str(home / "models")]
    result = run_cli([*words, "--weight-only", "int8", "--use_weight_only"])
    assert result.exit_code == 2
    assert "--weight-only and --use_weight_only exclude each other" in result.stderr
    assert run_cli([*words, "--weight-only", "int8"]).exit_code == 0
    (engine,) = read_repository(home / "models").engines.values()
    assert engine.engine_config.quantisation.algorithm == "W8A16"

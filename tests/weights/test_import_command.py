from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run_cli

from slipstream.cli.models.list_models import tree_text
from slipstream.weights.engine_config import EngineConfig, read_engine_config
from slipstream.weights.parameters import Quantisation

SaveModel = Callable[..., tuple[Path, Any]]

TREE = """models/
├── ensemble/
│   ├── 1/
│   └── config.pbtxt
├── postprocessing/
│   ├── 1/
│   └── config.pbtxt
├── preprocessing/
│   ├── 1/
│   └── config.pbtxt
├── tensorrt_llm/
│   ├── 1/
│   └── config.pbtxt
└── tiny/
    ├── 1/
    └── config.pbtxt
"""


def only_engine(folder: Path) -> EngineConfig:
    """Return the one engine of a cache."""
    (engine,) = folder.iterdir()
    return read_engine_config(engine)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ENGINE_DEST_PATH", raising=False)

    def call(*words: object) -> Any:
        return run_cli([*map(str, words), "--repo", str(tmp_path / "models")], program="triton")

    return call


def test_import_builds_the_engine_and_writes_the_repository(
    save_model: SaveModel, tmp_path: Path, run: Callable[..., Any]
) -> None:
    folder, _ = save_model("llama")
    result = run("import", "-m", "tiny", "-s", folder, "--backend", "tensorrtllm")
    assert result.exit_code == 0, result.output
    listed = f"triton - INFO - Current repo at {tmp_path / 'models'}:\n{TREE}\n"
    assert result.stdout.endswith(
        f"{listed}triton - INFO - Serve it with: triton start --repo {tmp_path / 'models'}\n"
    )
    assert re.search(
        r"triton - INFO - weights: 100%, 0\.\d/0\.\d MB, \d+\.\d MB/s, \d+\.\d s\n",
        result.stdout,
    )
    engine = only_engine(tmp_path / "home" / "engines")
    assert engine.spec.layers == 2
    assert str(engine.path) in (tmp_path / "models" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert run("list").stdout == listed
    plain = run_cli(["list", "--tree", "--repo", str(tmp_path / "models")], program="slipstream")
    assert plain.stdout == f"[INFO] Current repo at {tmp_path / 'models'}:\n{TREE}\n"
    missing = run_cli(["list", "--tree", "--repo", str(tmp_path / "none")], program="slipstream")
    assert missing.stderr == f"error: No model repository exists at {tmp_path / 'none'}\n"


def test_import_uses_the_given_folder_type_and_quantisation(
    save_model: SaveModel, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = save_model("llama")
    monkeypatch.setenv("ENGINE_DEST_PATH", str(tmp_path / "engines"))
    result = run(
        "import",
        "-m",
        "tiny",
        "--source",
        f"local:{folder}",
        "--dtype",
        "float16",
        "--use_weight_only",
        "--weight_only_precision",
        "int4",
    )
    assert result.exit_code == 0, result.output
    config = only_engine(tmp_path / "engines")
    assert (config.dtype, config.quantisation) == ("float16", Quantisation("W4A16", 32))


def test_the_same_import_again_changes_nothing(
    save_model: SaveModel, tmp_path: Path, run: Callable[..., Any]
) -> None:
    folder, _ = save_model("llama")
    run("import", "-m", "tiny", "-s", folder)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = run("import", "-m", "tiny", "-s", folder)
    assert (again.exit_code, again.stderr) == (0, "")
    engine = only_engine(tmp_path / "home" / "engines").path
    assert again.stdout.startswith(
        f"triton - INFO - Found existing engine at {engine}, skipping build.\n"
        f"triton - INFO - tiny is up to date in {tmp_path / 'models'}: there is nothing to do\n"
    )
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {name: time for name, time in after.items() if name.suffix != ".lock"} == {
        name: time for name, time in before.items() if name.suffix != ".lock"
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["-m", "nosuch"],
            "nosuch is not a known model. Please use a known model, or provide a --source",
        ),
        (["-m", "../up", "-s", "x"], "'../up' cannot be a model's name"),
        (["-m", "all", "-s", "x"], "'all' cannot be a model's name"),
        (["-m", "ensemble", "-s", "x"], "'ensemble' cannot be a model's name"),
        (["-m", "tiny", "-s", "/no/such/place"], "/no/such/place: no such folder or file"),
        (["-m", "tiny", "--backend", "vllm"], "backend 'vllm' is not supported"),
    ],
)
def test_refusals_are_one_line_and_exit_code_1(
    tmp_path: Path, run: Callable[..., Any], words: list[str], message: str
) -> None:
    result = run("import", *words)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"triton - ERROR - {message}")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    "place",
    ["slipstream.weights.build.write_tensors", "slipstream.repository.templates._write_model"],
)
def test_an_interrupted_import_leaves_nothing_half_written(
    save_model: SaveModel,
    tmp_path: Path,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    """An interrupted build leaves nothing. A later interruption leaves the engine and no model."""
    folder, _ = save_model("llama")

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)
    result = run("import", "-m", "tiny", "-s", folder)
    assert result.exit_code == 130
    assert result.stderr == "triton - ERROR - interrupted; nothing was left behind\n"
    assert list((tmp_path / "models").glob("*")) == []
    engines = tmp_path / "home" / "engines"
    if place.startswith("slipstream.weights"):
        assert list(engines.glob("*")) == []
    else:
        assert only_engine(engines).spec.layers == 2


def test_remove_deletes_one_model_or_all(
    save_model: SaveModel, tmp_path: Path, run: Callable[..., Any]
) -> None:
    folder, _ = save_model("llama")
    run("import", "-m", "tiny", "-s", folder)
    models = tmp_path / "models"
    (models / "notes").mkdir()
    (models / "other").mkdir()
    (models / "other" / "config.pbtxt").touch()
    one = run("remove", "-m", "tiny")
    assert one.stdout.startswith(f"triton - INFO - Removing model tiny at {models / 'tiny'}\n")
    assert sorted(path.name for path in models.iterdir()) == ["notes", "other"]
    assert run("remove", "-m", "all").exit_code == 0
    assert [path.name for path in models.iterdir()] == ["notes"]  # not a model


def test_removing_the_last_model_removes_its_helper_models(
    save_model: SaveModel, tmp_path: Path, run: Callable[..., Any]
) -> None:
    folder, _ = save_model("llama")
    run("import", "-m", "tiny", "-s", folder)
    models = tmp_path / "models"
    (models / "notes").mkdir()
    assert run("remove", "-m", "tiny").exit_code == 0
    assert [path.name for path in models.iterdir()] == ["notes"]  # not a model


@pytest.mark.parametrize("name", ["absent", "folder", "..", ".", "../models", "", "*"])
def test_remove_refuses_names_that_are_not_models(
    tmp_path: Path, run: Callable[..., Any], name: str
) -> None:
    (tmp_path / "models" / "folder").mkdir(parents=True)
    (tmp_path / "config.pbtxt").touch()  # the folder that the name points to looks like a model
    (tmp_path / "models" / "config.pbtxt").touch()
    result = run("remove", "-m", name)
    assert result.exit_code == 1
    assert result.stderr.startswith("triton - ERROR - No model folder exists at ")
    assert (tmp_path / "models" / "folder").is_dir()


def test_triton_lists_a_missing_repository_as_an_empty_one(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    result = run("list")
    assert result.exit_code == 0
    assert result.stdout == f"triton - INFO - Current repo at {tmp_path / 'models'}:\nmodels/\n\n"
    assert not (tmp_path / "models").exists()


def test_tree_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "repo" / "a").mkdir(parents=True)
    (tmp_path / "repo" / "a" / "loop").symlink_to(tmp_path / "repo")
    assert tree_text(tmp_path / "repo") == "repo/\n└── a/\n    └── loop/\n"

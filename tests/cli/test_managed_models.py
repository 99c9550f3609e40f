"""Several models in one repository: imported, listed, replaced, removed, and their disk freed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandResult, run_cli
from gguf_files import plain_tokenizer, write_gguf
from tiny_hf_folder import save_model
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.cli.models.inventory import age_text
from slipstream.llm import engine_folder
from slipstream.repository.collection import list_models
from slipstream.repository.models import read_repository
from slipstream.weights.cache.engines import list_engines
from slipstream.weights.cache.locks import hold
from slipstream.weights.sources.known_models import KNOWN_MODELS, PackagedModel

Run = Callable[..., CommandResult]
HELPERS = ["ensemble", "postprocessing", "preprocessing", "tensorrt_llm"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    save_model(folder / "llama")
    save_model(folder / "gpt2", "gpt2")
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ENGINE_DEST_PATH", raising=False)
    return tmp_path


def call(*words: object) -> CommandResult:
    result = run_cli(words)
    assert result.exit_code == 0, result.output
    return result


def folders(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir())


def engines(home: Path) -> dict[str, Path]:
    """Return the engines that the repository's models use, by engine model."""
    found = read_repository(home / "models").engines
    return {name: model.engine_config.path for name, model in found.items()}


def contents(home: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (home / "models").rglob("*.pbtxt")}


def import_both(sources: Path) -> None:
    call("import", "-m", "one", "-s", sources / "llama")
    call("import", "-m", "two", "-s", sources / "gpt2")


def test_each_model_has_its_own_helpers_and_engine(home: Path, sources: Path) -> None:
    call("import", "-m", "one", "-s", sources / "llama")
    before = contents(home)
    call("import", "-m", "two", "-s", sources / "gpt2")
    assert folders(home) == sorted(["one", "two", *HELPERS, *(f"two-{name}" for name in HELPERS)])
    after = contents(home)
    assert {path: after[path] for path in before} == before
    found = engines(home)
    assert set(found) == {"tensorrt_llm", "two-tensorrt_llm"}
    assert found["tensorrt_llm"] != found["two-tensorrt_llm"]
    models = list_models(home / "models")
    assert {name: set(model.parts) for name, model in models.items()} == {
        "one": {"one", *HELPERS},
        "two": {"two", *(f"two-{name}" for name in HELPERS)},
    }


def test_one_engine_serves_every_command_and_python(
    home: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.cli.models.served_model import find_model_to_serve, make

    source = sources / "llama"
    call("import", "-m", "one", "-s", f"local:{source}")
    make(find_model_to_serve(str(source)))
    monkeypatch.chdir(sources)
    assert engine_folder("llama", "auto", None) == engines(home)["tensorrt_llm"]
    assert [engine.path for engine in list_engines()] == [engines(home)["tensorrt_llm"]]
    assert engine_folder(source, "float16", None) != engines(home)["tensorrt_llm"]
    assert engine_folder(source, "auto", "int8") != engines(home)["tensorrt_llm"]
    assert len(list_engines()) == 3


def test_list_and_show_describe_the_models(home: Path, sources: Path) -> None:
    def rest(source: str) -> list[str]:
        return ["under a minute", "no", str(sources / source)]

    import_both(sources)
    engine_folder(sources / "llama", "auto", "int8")
    lines = call("list").stdout.splitlines()
    assert lines[0] == f"Models in {home / 'models'}:"
    assert lines[1].split() == ["NAME", "FAMILY", "SIZE", "TYPE", "AGE", "SERVED", "SOURCE"]
    sizes = {one.path: f"{one.bytes / 1e6:.1f} MB" for one in list_engines()}
    found = engines(home)
    assert [re.split(r" {2,}", line) for line in lines[2:4]] == [
        ["one", "Llama", sizes[found["tensorrt_llm"]], "bfloat16", *rest("llama")],
        ["two", "GPT2", sizes[found["two-tensorrt_llm"]], "bfloat16", *rest("gpt2")],
    ]
    assert lines[5] == "Engines in the cache that none of them uses:"
    assert "int8" in lines[7]
    shown = call("show", "two").stdout
    assert f"engine:           {engines(home)['two-tensorrt_llm']}\n" in shown
    assert f"used by:          {home / 'models'}\n" in shown
    assert "longest sequence: 512 tokens\n" in shown
    missing = run_cli(["show", "three"])
    assert missing.exit_code == 1
    assert missing.stderr.startswith(
        f"error: there is no model 'three' in {home / 'models'}; there"
    )


def test_a_model_is_replaced_and_keeps_its_edits(home: Path, sources: Path) -> None:
    import_both(sources)
    other = contents(home)
    config = home / "models" / "two-tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text() + "# mine\n")
    former = engines(home)["two-tensorrt_llm"]
    result = call("import", "-m", "two", "-s", sources / "llama", "--dtype", "float16")
    assert f"[INFO] Replaced two: was bfloat16 from {sources / 'gpt2'}, " in result.stdout
    assert "; is float16 from " in result.stdout
    newer = engines(home)["two-tensorrt_llm"]
    assert newer not in (former, engines(home)["tensorrt_llm"])
    assert config.read_text().endswith("# mine\n")
    assert str(newer) in (home / "models" / "two-preprocessing" / "config.pbtxt").read_text()
    after = contents(home)
    unchanged = [path for path in other if not path.parent.name.startswith("two-")]
    assert {path: after[path] for path in unchanged} == {path: other[path] for path in unchanged}


def test_the_folder_of_adapters_is_set_and_kept(home: Path, sources: Path) -> None:
    words = ["import", "-m", "one", "-s", sources / "llama"]
    (home / "adapters").mkdir()
    (home / "others").mkdir()
    nothing = "one is up to date"

    def folder() -> Path | None:
        return read_repository(home / "models").engines["tensorrt_llm"].adapter_folder

    assert nothing not in call(*words, "--lora-dir", home / "adapters").stdout
    assert folder() == home / "adapters"
    assert nothing in call(*words, "--lora-dir", home / "adapters").stdout
    assert nothing in call(*words).stdout
    assert nothing not in call(*words, "--lora-dir", home / "others").stdout
    assert folder() == home / "others"
    missing = run_cli([*words, "--lora-dir", home / "absent"])
    assert missing.stderr == f"error: --lora-dir {home / 'absent'}: no such folder\n"


def test_a_changed_source_is_built_again_and_the_former_engine_freed(
    home: Path, sources: Path
) -> None:
    shutil.copytree(sources / "llama", home / "mine")
    call("import", "-m", "one", "-s", home / "mine")
    former = engines(home)["tensorrt_llm"]
    shutil.rmtree(home / "mine")
    save_model(home / "mine", num_hidden_layers=1)
    call("import", "-m", "one", "-s", home / "mine")
    newer = engines(home)["tensorrt_llm"]
    assert newer != former
    assert read_repository(home / "models").engines["tensorrt_llm"].engine_config.spec.layers == 1
    assert [engine.path for engine in list_engines()] == [newer]


def test_an_engine_that_runs_is_not_removed_with_its_source(home: Path, sources: Path) -> None:
    shutil.copytree(sources / "llama", home / "mine")
    call("import", "-m", "one", "-s", home / "mine")
    former = engines(home)["tensorrt_llm"]
    mark = hold(former / "config.json")
    assert mark is not None
    save_model(home / "mine", num_hidden_layers=1)
    call("import", "-m", "one", "-s", home / "mine")
    assert (former / "config.json").is_file()
    assert "Freed 0.0 MB" in call("prune").stdout
    mark.close()
    assert f"Removing {former} (" in call("prune").stdout
    assert not former.exists()


def test_remove_frees_the_disk_of_one_model_only(home: Path, sources: Path) -> None:
    import_both(sources)
    other = contents(home)
    freed = next(one.bytes for one in list_engines() if one.path == engines(home)["tensorrt_llm"])
    result = call("remove", "one")
    assert result.stdout.endswith(f"[INFO] Freed {freed / 1e6:.1f} MB\n")
    assert folders(home) == sorted(["two", *(f"two-{name}" for name in HELPERS)])
    assert contents(home) == {path: text for path, text in other.items() if path.exists()}
    assert [one.path for one in list_engines()] == [engines(home)["two-tensorrt_llm"]]
    # the names of the tutorials are free again
    call("import", "-m", "three", "-s", sources / "llama")
    assert "tensorrt_llm" in engines(home)
    call("remove", "-m", "all")
    assert (folders(home), list_engines()) == ([], [])


def test_remove_keeps_an_engine_that_another_model_uses(home: Path, sources: Path) -> None:
    source = sources / "llama"
    call("import", "-m", "one", "-s", source)
    call("import", "-m", "two", "-s", source)
    call("import", "-m", "one", "-s", source, "--repo", home / "other models")
    assert len(list_engines()) == 1
    for words in (["one"], ["two"]):
        result = call("remove", *words)
        assert "Its engine stays: " in result.stdout
        assert result.stdout.endswith("Freed 0.0 MB\n")
    result = call("remove", "one", "--repo", home / "other models")
    assert not result.stdout.endswith("Freed 0.0 MB\n")
    assert list_engines() == []


def test_remove_takes_engines_of_python_and_of_start(home: Path, sources: Path) -> None:
    from slipstream.cli.models.served_model import find_model_to_serve, make

    make(find_model_to_serve(str(sources / "llama")))
    quantised = engine_folder(sources / "llama", "auto", "int8")
    assert "\nllama " in call("list").stdout
    call("remove", "llama")
    assert list((home / "home" / "repositories").iterdir()) == []
    assert [one.path for one in list_engines()] == [quantised]
    call("remove", quantised.name)
    assert list_engines() == []


@pytest.mark.parametrize("words", [("import", "-m"), ("pull",)])
def test_a_path_is_imported_under_its_own_name(home: Path, sources: Path, words: Any) -> None:
    call(*words, f"{sources / 'llama'}/")
    assert engines(home).keys() == {"tensorrt_llm"}
    assert list(list_models(home / "models")) == ["llama"]


def test_relative_paths_and_files_name_a_model(
    home: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sources)
    call("import", "-m", "./gpt2")
    metadata = plain_tokenizer(VOCABULARY)
    write_gguf(home / "my model.gguf", random_model(config_of("llama")), metadata=metadata)
    call("import", "-m", home / "my model.gguf")
    assert list(list_models(home / "models")) == ["gpt2", "my-model"]
    result = run_cli(["import", "-m", "./absent"])
    assert result.exit_code == 1
    assert "./absent: no such folder or file" in result.output


@pytest.mark.parametrize("name", [*HELPERS, "all"])
def test_a_reserved_name_is_refused_as_reserved(home: Path, sources: Path, name: str) -> None:
    result = run_cli(["import", "-m", name, "-s", sources / "llama"])
    assert result.exit_code == 1
    assert f"'{name}' cannot be a model's name: it is reserved" in result.output


def test_check_has_no_warning_about_the_helpers_of_further_models(
    home: Path, sources: Path
) -> None:
    import_both(sources)
    assert call("check", home / "models").stdout.endswith(
        "models: 0 errors, 0 warnings: can be served\n"
    )
    # a step that leads elsewhere is still found
    second = next(iter((home / "models").glob("*-ensemble"))) / "config.pbtxt"
    changed = second.read_text().replace(
        'model_name: "two-preprocessing"', 'model_name: "two-preprocess"'
    )
    second.write_text(changed)
    result = run_cli(["check", home / "models"])
    assert "two-preprocess" in result.output


def test_prune_removes_what_nothing_uses(home: Path, sources: Path) -> None:
    import_both(sources)
    quantised = engine_folder(sources / "llama", "auto", "int8")
    download = next(one for one in KNOWN_MODELS.values() if isinstance(one, PackagedModel)).folder
    (download / ".fetching-x").mkdir(parents=True)
    (download / ".fetching-x" / "part").write_bytes(b"x" * 100_000)
    cut = quantised.parent / ".slipstream-writing-x"
    cut.mkdir()
    (cut / ".lock").touch()
    (cut / "rank0.engine").write_bytes(b"x" * 100_000)
    freed = next(one.bytes for one in list_engines() if one.path == quantised)
    dry = call("prune", "--dry-run").stdout
    assert dry == (
        f"[INFO] Would remove {quantised} ({freed / 1e6:.1f} MB)\n"
        f"[INFO] Would remove {download} (0.1 MB)\n"
        f"[INFO] Would free {(freed + 100_000) / 1e6:.1f} MB\n"
    )
    assert quantised.is_dir()
    assert download.is_dir()
    assert call("prune").stdout.endswith(
        f"[INFO] Removed {download} (0.1 MB)\n[INFO] Freed {(freed + 200_000) / 1e6:.1f} MB\n"
    )
    assert not quantised.exists()
    assert not cut.exists()
    assert not download.exists()
    assert len(list_engines()) == 2


def test_a_cut_removal_leaves_no_engine(home: Path, sources: Path, monkeypatch: Any) -> None:
    engine = engine_folder(sources / "llama", "auto", None)

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("slipstream.weights.cache.engines.shutil.rmtree", killed)
        assert run_cli(["prune"]).exit_code == 130
    assert list_engines() == []
    call("prune")
    assert not engine.exists()
    assert engine_folder(sources / "llama", "auto", None) == engine
    assert [one.path for one in list_engines()] == [engine]


def test_remove_asks_for_exactly_one_name(home: Path) -> None:
    for words in (["remove"], ["remove", "a", "-m", "b"], ["show"]):
        result = run_cli(words)
        assert result.exit_code == 2
        assert "give the name of one model" in result.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "under a minute"), (60, "1 minute"), (7300, "2 hours"), (86400 * 40, "40 days")],
)
def test_ages_are_in_the_largest_whole_unit(seconds: float, text: str) -> None:
    assert age_text(seconds) == text

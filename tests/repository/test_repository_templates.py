"""A repository written from our templates is read without warnings and replaces no other model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_text import write_engine_folder

from slipstream.repository import templates
from slipstream.repository.models import read_repository
from slipstream.repository.roles import Role
from slipstream.repository.templates import (
    RepositoryExists,
    fill,
    template,
    template_names,
    variables,
    write_repository,
)

FOLDERS = ["ensemble", "llama", "postprocessing", "preprocessing", "tensorrt_llm"]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write_engine_folder(tmp_path / 'an "odd" \\ engine', max_batch_size=16)


def test_written_repository_reads_back_without_a_warning(tmp_path: Path, engine: Path) -> None:
    written = write_repository(tmp_path / "repo", "llama", engine, engine, 16)
    assert sorted(folder.name for folder in written) == FOLDERS
    assert sorted(folder.name for folder in (tmp_path / "repo").iterdir()) == FOLDERS
    assert all(
        (folder / "1").is_dir() and (folder / "config.pbtxt").is_file() for folder in written
    )
    repository = read_repository(tmp_path / "repo")
    assert repository.warnings == ()
    assert {name: model.role for name, model in repository.models.items()} == {
        "llama": Role.BLS,
        "ensemble": Role.ENSEMBLE,
        "preprocessing": Role.PREPROCESSING,
        "postprocessing": Role.POSTPROCESSING,
        "tensorrt_llm": Role.ENGINE,
    }
    assert all(model.config.max_batch_size == 16 for model in repository.models.values())
    model = repository.engines["tensorrt_llm"]
    assert (model.engine_config.path, model.tokenizer_folder) == (engine, engine)
    assert (model.decoupled, model.exclude_input_in_output, model.add_special_tokens) == (
        True,
        True,
        True,
    )
    assert (
        repository.models["tensorrt_llm"].config.parameter("gpt_model_type")
        == "inflight_fused_batching"
    )
    assert repository.pipelines["llama"].decoupled
    assert repository.pipelines["ensemble"].decoupled
    assert repository.pipelines["llama"].placeholders


def test_an_existing_model_is_refused_with_triton_clis_text(tmp_path: Path, engine: Path) -> None:
    write_repository(tmp_path, "llama", engine, engine, 4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("config.pbtxt")}
    with pytest.raises(RepositoryExists) as caught:
        write_repository(tmp_path, "llama", engine, engine, 8)
    assert str(caught.value).startswith(
        f"Found existing model at {tmp_path}/llama/1, skipping repo add. "
    )
    (tmp_path / "other-ensemble").mkdir()
    with pytest.raises(RepositoryExists, match="other-ensemble/1, skipping repo add"):
        write_repository(tmp_path, "other", engine, engine, 8)
    assert {path: path.read_bytes() for path in tmp_path.rglob("config.pbtxt")} == before


def test_further_models_have_helpers_of_their_own_name(tmp_path: Path, engine: Path) -> None:
    other_engine = write_engine_folder(tmp_path / "other engine", max_batch_size=8)
    write_repository(tmp_path / "repo", "llama", engine, engine, 16)
    first = {path: path.read_bytes() for path in (tmp_path / "repo").rglob("config.pbtxt")}
    written = write_repository(tmp_path / "repo", "other", other_engine, other_engine, 8)
    assert [folder.name for folder in written] == [
        "other-preprocessing",
        "other-postprocessing",
        "other-tensorrt_llm",
        "other-ensemble",
        "other",
    ], "the model that needs the others comes last"
    assert {path: path.read_bytes() for path in first} == first
    repository = read_repository(tmp_path / "repo")
    assert repository.warnings == ()
    assert {name: one.engine for name, one in repository.pipelines.items()} == {
        "llama": "tensorrt_llm",
        "ensemble": "tensorrt_llm",
        "other": "other-tensorrt_llm",
        "other-ensemble": "other-tensorrt_llm",
    }
    found = {
        name: (model.engine_config.path, model.tokenizer_folder)
        for name, model in repository.engines.items()
    }
    assert found == {
        "tensorrt_llm": (engine, engine),
        "other-tensorrt_llm": (other_engine, other_engine),
    }
    steps = repository.models["other-ensemble"].config.ensemble_steps
    assert [step.model_name for step in steps] == [
        "other-preprocessing",
        "other-tensorrt_llm",
        "other-postprocessing",
    ]


@pytest.mark.parametrize("name", ["", "a/b", "../x", "tensorrt_llm", ".hidden", "a b"])
def test_an_invalid_model_name_is_refused(tmp_path: Path, engine: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a model's name"):
        write_repository(tmp_path / "repo", name, engine, engine, 4)
    assert not (tmp_path / "repo").exists()


def test_a_failed_write_leaves_no_models(
    tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = templates._write_model, []

    def fail_at_the_third(folder: Path, config: str) -> None:
        made.append(folder)
        if len(made) == 3:
            raise OSError("no space left on device")
        real(folder, config)

    monkeypatch.setattr(templates, "_write_model", fail_at_the_third)
    with pytest.raises(OSError, match="no space"):
        write_repository(tmp_path / "repo", "llama", engine, engine, 4)
    assert list((tmp_path / "repo").iterdir()) == []


def test_an_unfinished_folder_is_not_a_model(tmp_path: Path, engine: Path) -> None:
    write_repository(tmp_path / "repo", "llama", engine, engine, 4)
    (tmp_path / "repo" / ".llama.x7").mkdir()
    assert read_repository(tmp_path / "repo").warnings == ()


def test_fill_keeps_variables_without_a_value() -> None:
    assert fill("a: ${x} b: ${y}", {"x": "1"}) == "a: 1 b: ${y}"
    assert variables("${a} ${b} ${a}") == ["a", "b"]


def test_templates_have_the_variables_of_upstream() -> None:
    assert list(template_names()) == [
        "ensemble",
        "postprocessing",
        "preprocessing",
        "tensorrt_llm",
        "tensorrt_llm_bls",
    ]
    needed = {
        "preprocessing": {"tokenizer_dir", "triton_max_batch_size", "add_special_tokens"},
        "postprocessing": {
            "tokenizer_dir",
            "triton_max_batch_size",
            "postprocessing_instance_count",
        },
        "ensemble": {"triton_max_batch_size"},
        "tensorrt_llm_bls": {
            "decoupled_mode",
            "bls_instance_count",
            "accumulate_tokens",
            "tensorrt_llm_model_name",
        },
        "tensorrt_llm": {
            "triton_backend",
            "decoupled_mode",
            "max_queue_delay_microseconds",
            "batching_strategy",
            "engine_dir",
            "max_tokens_in_paged_kv_cache",
            "kv_cache_free_gpu_mem_fraction",
            "exclude_input_in_output",
            "enable_kv_cache_reuse",
            "enable_chunked_context",
            "batch_scheduler_policy",
            "max_beam_width",
        },
    }
    for name, wanted in needed.items():
        assert wanted <= set(variables(template(name))), name

"""Reading a repository: roles, paths, settings, tensors of every release, and its problems."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_text import write_engine_folder

from slipstream.engine.settings import EngineSettings
from slipstream.repository.models import Repository, inspect_repository, read_repository
from slipstream.repository.problems import RepositoryError
from slipstream.repository.releases.render import render_template
from slipstream.repository.releases.tables import list_models
from slipstream.repository.roles import Role
from slipstream.repository.templates import fill, template, template_names
from slipstream.repository.without_effect import WITHOUT_EFFECT
from slipstream.request_fields.table import BLS_INPUTS


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write_engine_folder(tmp_path / "engines" / "1-gpu", max_batch_size=12)


def write_templates(repo: Path, values: dict[str, str], names: list[str] | None = None) -> Path:
    """Write templates filled with `values` only. Other variables stay, as in many repositories."""
    for name in names or list(template_names()):
        folder = repo / name
        (folder / "1").mkdir(parents=True)
        filled = fill(template(name), {"bls_model_name": "tensorrt_llm_bls", **values})
        (folder / "config.pbtxt").write_text(filled)
    return repo


def change(repo: Path, model: str, old: str, new: str) -> None:
    file = repo / model / "config.pbtxt"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_unfilled_templates_are_served_with_defaults(tmp_path: Path, engine: Path) -> None:
    """A tutorial fills only the engine's folder. Upstream cannot parse such a file."""
    repository = read_repository(write_templates(tmp_path / "repo", {"engine_dir": str(engine)}))
    # the engine's
    assert all(model.config.max_batch_size == 12 for model in repository.models.values())
    model = repository.engines["tensorrt_llm"]
    assert not model.decoupled
    assert not model.exclude_input_in_output
    assert model.add_special_tokens
    assert model.skip_special_tokens
    assert model.tokenizer_folder == engine
    assert model.settings == EngineSettings(max_beam_width=1)
    unfilled = [problem for problem in repository.warnings if "was not filled" in problem.text]
    warned = {(Path(problem.file).parent.name, problem.key) for problem in unfilled}
    assert ("tensorrt_llm", "max_batch_size") in warned
    assert ("tensorrt_llm", "backend") in warned
    assert ("preprocessing", "parameters.tokenizer_dir") in warned
    assert len(warned) == len(unfilled)  # one warning per variable
    without_effect = (
        "7 parameters were not filled and have no effect: medusa_choices, "
        "kv_cache_onboard_blocks, cancellation_check_period_ms, stats_check_period_ms, "
        "iter_stats_max_iterations, request_stats_max_iterations, gpu_weights_percent"
    )
    assert [
        (problem.file, problem.text) for problem in repository.warnings if problem not in unfilled
    ] == [(str(tmp_path / "repo"), without_effect)]
    echo = "${exclude_input_in_output} was not filled: using the default (False: answers begin with the prompt)"
    assert [problem.text for problem in unfilled if "begin with" in problem.text] == [echo]


def test_parameters_become_settings_of_the_engine_model(tmp_path: Path, engine: Path) -> None:
    values = {
        "engine_dir": str(engine),
        "max_tokens_in_paged_kv_cache": "2560",
        "kv_cache_free_gpu_mem_fraction": "0.5",
        "batch_scheduler_policy": "max_utilization",
        "enable_kv_cache_reuse": "False",
        "enable_chunked_context": "0",
        "exclude_input_in_output": "True",
        "normalize_log_probs": "false",
        "add_special_tokens": "false",
        "skip_special_tokens": "False",
        "decoupled_mode": "true",
    }
    model = read_repository(write_templates(tmp_path / "repo", values)).engines["tensorrt_llm"]
    assert model.settings == EngineSettings(
        cache_tokens=2560,
        cache_memory_fraction=0.5,
        policy="max_utilization",
        reuse=False,
        chunked=False,
        max_beam_width=1,
    )
    assert (model.exclude_input_in_output, model.normalize_log_probs, model.decoupled) == (
        True,
        False,
        True,
    )
    assert (model.add_special_tokens, model.skip_special_tokens) == (False, False)


@pytest.mark.parametrize(
    ("build", "sequences", "rows"),
    [
        (12, "", None),  # the engine applies the build's limit
        (12, "7", 7),
        (12, "12", 12),
        (12, "256", 12),
        (64, "256", 256),  # the default of a build limits nothing
    ],
)
def test_the_build_bounds_max_num_sequences(
    tmp_path: Path, build: int, sequences: str, rows: int | None
) -> None:
    engine = write_engine_folder(tmp_path / "engine", max_batch_size=build)
    repo = write_templates(tmp_path / "repo", {"engine_dir": str(engine)})
    added = f'parameters: {{ key: "max_num_sequences" value: {{ string_value: "{sequences}" }} }}'
    file = repo / "tensorrt_llm" / "config.pbtxt"
    file.write_text(f"{file.read_text()}\n{added}\n")
    repository = read_repository(repo)
    assert repository.engines["tensorrt_llm"].settings.max_rows == rows
    lowered = [problem.text for problem in repository.warnings if "lowered" in problem.text]
    assert lowered == (
        [
            "256 is lowered to 12, the engine's max_batch_size; build the engine with a larger "
            "--max_batch_size, or start with --max-batch-size"
        ]
        if sequences == "256" and build == 12
        else []
    )


def test_an_invalid_parameter_keeps_its_default_with_a_warning(
    tmp_path: Path, engine: Path
) -> None:
    values = {
        "engine_dir": str(engine),
        "kv_cache_free_gpu_mem_fraction": "half",
        "enable_kv_cache_reuse": "perhaps",
    }
    repository = read_repository(write_templates(tmp_path / "repo", values))
    assert repository.engines["tensorrt_llm"].settings == EngineSettings(max_beam_width=1)
    said = [problem.text for problem in repository.warnings if "using the default" in problem.text]
    assert [text for text in said if "was not filled" not in text] == [
        "expected a number above 0 and at most 1, got 'half'; using the default",
        "expected true or false, got 'perhaps'; using the default",
    ]


def test_a_parameter_without_effect_is_reported_with_the_reason(
    tmp_path: Path, engine: Path
) -> None:
    values = {
        "gpu_weights_percent": "0.5",
        "decoding_mode": "medusa",
        "kv_cache_onboard_blocks": "true",
    }
    values["engine_dir"] = str(engine)
    repository = read_repository(write_templates(tmp_path / "repo", values))
    said = {
        problem.key: problem.text
        for problem in repository.warnings
        if "has no effect" in problem.text
    }
    assert said == {
        "parameters.gpu_weights_percent": "'0.5' has no effect: all weights are on the device; a weight-only build makes them smaller",
        "parameters.decoding_mode": "'medusa' has no effect: it is not one of auto, top_k, top_p, top_k_top_p, beam_search, lookahead",
    }


def test_the_queue_limit_of_the_engine_model_is_read(tmp_path: Path, engine: Path) -> None:
    repo = write_templates(tmp_path / "repo", {"engine_dir": str(engine)})
    change(
        repo,
        "tensorrt_llm",
        "dynamic_batching {",
        "dynamic_batching { default_queue_policy { max_queue_size: 9 }",
    )
    assert read_repository(repo).engines["tensorrt_llm"].queue_policy.max_queue_size == 9


@pytest.mark.parametrize("place", ["cwd", "repository", "model"])
def test_a_relative_path_may_start_at_three_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    repo = write_templates(
        tmp_path / "repo", {"engine_dir": "my/engine", "tokenizer_dir": "my/engine"}
    )
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    bases = {"cwd": tmp_path / "work", "repository": repo, "model": repo / "tensorrt_llm"}
    folder = write_engine_folder(bases[place] / "my" / "engine")
    model = read_repository(repo).engines["tensorrt_llm"]
    assert model.engine_config.path == folder
    assert model.tokenizer_folder == folder


def test_the_engine_may_be_in_the_parent_or_a_child_of_the_path(
    tmp_path: Path, engine: Path
) -> None:
    child = write_templates(tmp_path / "child", {"engine_dir": str(engine.parent)})
    assert read_repository(child).engines["tensorrt_llm"].engine_config.path == engine
    other = write_engine_folder(tmp_path / "flat")
    parent = write_templates(tmp_path / "parent", {"engine_dir": str(other / "1-gpu")})
    assert read_repository(parent).engines["tensorrt_llm"].engine_config.path == other


@pytest.mark.parametrize("inside", [".", "1-gpu", "anything"])
def test_an_engine_in_the_version_folder_needs_no_path(tmp_path: Path, inside: str) -> None:
    repo = write_templates(tmp_path / "repo", {})
    (repo / "tensorrt_llm" / "1").rmdir()
    folder = write_engine_folder(repo / "tensorrt_llm" / "1" / inside)
    assert read_repository(repo).engines["tensorrt_llm"].engine_config.path.samefile(folder)


@pytest.mark.parametrize("folder", ["meta-llama/Llama-2-7b-hf", "~no.such.user/x"])
def test_a_missing_tokenizer_folder_falls_back_to_the_engine_folder(
    tmp_path: Path, engine: Path, folder: str
) -> None:
    values = {"engine_dir": str(engine), "tokenizer_dir": folder}
    repository = read_repository(write_templates(tmp_path / "repo", values))
    assert repository.engines["tensorrt_llm"].tokenizer_folder == engine
    assert any(
        "using the engine's own tokenizer" in problem.text for problem in repository.warnings
    )


def test_all_problems_of_a_repository_are_reported_together(tmp_path: Path) -> None:
    repo = write_templates(
        tmp_path / "repo", {"engine_dir": "/nowhere", "batching_strategy": "inflight_bathing"}
    )
    change(
        repo,
        "preprocessing",
        "data_type: TYPE_STRING dims: [ -1 ] }",
        "data_type: TYPE_STRING dim: [ -1 ] }",
    )
    change(repo, "ensemble", 'model_name: "postprocessing"', 'model_name: "postprocesing"')
    change(repo, "tensorrt_llm_bls", '"${tensorrt_llm_model_name}"', '"no_such_engine"')
    (repo / "mine").mkdir()
    (repo / "mine" / "config.pbtxt").write_text('backend: "python"')
    with pytest.raises(RepositoryError) as caught:
        read_repository(repo)
    found = {(Path(problem.file).parent.name, problem.key) for problem in caught.value.problems}
    assert found >= {
        ("preprocessing", "input[0].dim"),
        ("preprocessing", "input[0]"),
        ("ensemble", "ensemble_scheduling.step[2].model_name"),
        ("tensorrt_llm", "parameters.gpt_model_path"),
        ("tensorrt_llm", "parameters.gpt_model_type"),
        ("tensorrt_llm_bls", "parameters.tensorrt_llm_model_name"),
        ("mine", ""),
    }
    report = str(caught.value)
    line = (repo / "tensorrt_llm" / "config.pbtxt").read_text().splitlines()
    number = next(i for i, text in enumerate(line, 1) if "gpt_model_path" in text)
    assert (
        f"tensorrt_llm/config.pbtxt:{number}: parameters.gpt_model_path: /nowhere: not an engine folder"
        in report
    )
    assert "Invalid gpt_model_type 'inflight_bathing'" in report
    assert "did you mean 'inflight_batching'?" in report
    assert "did you mean 'dims'?" in report


def test_an_unknown_parameter_is_reported_with_the_closest_name(
    tmp_path: Path, engine: Path
) -> None:
    repo = write_templates(tmp_path / "repo", {"engine_dir": str(engine)})
    change(repo, "tensorrt_llm", '"enable_kv_cache_reuse"', '"enable_kv_cache_resue"')
    said = [
        str(problem)
        for problem in read_repository(repo).warnings
        if "no such parameter" in problem.text
    ]
    assert len(said) == 1
    assert "parameters.enable_kv_cache_resue" in said[0]
    assert "did you mean 'enable_kv_cache_reuse'?" in said[0]


def test_unfilled_parameters_of_a_late_release_without_effect_are_one_line(
    tmp_path: Path, engine: Path
) -> None:
    repo = tmp_path / "repo"
    for name in list_models("inflight_batcher_llm", "v0.18"):
        text = render_template("inflight_batcher_llm", name, "v0.18")
        (repo / name / "1").mkdir(parents=True)
        (repo / name / "config.pbtxt").write_text(fill(text, {"engine_dir": str(engine)}))
    warnings = read_repository(repo).warnings
    (line,) = [warning for warning in warnings if "not filled and have no effect" in warning.text]
    assert line.text.startswith("19 parameters were not filled and have no effect: visual_model")
    names = set(line.text.partition(": ")[2].split(", "))
    assert len(names) == 19
    assert names <= WITHOUT_EFFECT.keys()
    own_lines = {warning.key.removeprefix("parameters.") for warning in warnings} - {"parameters"}
    assert own_lines & names == set()
    assert {"batch_scheduler_policy", "decoding_mode", "add_special_tokens"} <= own_lines


PYTHON_MODEL = """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


def test_a_python_model_with_the_tensors_of_a_bls_model_is_reported_as_one(tmp_path: Path) -> None:
    folder = tmp_path / "mock_llm"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(PYTHON_MODEL)
    (folder / "1" / "model.py").write_text("")
    expected = (
        f"{folder}/config.pbtxt: backend: 'mock_llm' is a Python model, and code from a repository "
        "is not executed; give --allow-python-models to run it"
    )
    assert [str(error) for error in inspect_repository(tmp_path)[1].errors] == [expected]
    assert inspect_repository(tmp_path, ["mock_llm"])[1].errors == ()
    # upstream's BLS model has parameters of its own; it only lacks its engine
    parameter = 'parameters { key: "accumulate_tokens" value { string_value: "" } }'
    (folder / "config.pbtxt").write_text(PYTHON_MODEL + parameter)
    (error,) = inspect_repository(tmp_path)[1].errors
    assert error.text == "there is no engine model 'tensorrt_llm' here"


def test_a_python_model_without_code_is_reported_with_the_missing_file(tmp_path: Path) -> None:
    folder = tmp_path / "add_sub"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "python"')
    (error,) = inspect_repository(tmp_path)[1].errors
    assert error.text == (
        f"'add_sub' is a Python model without code: there is no {folder / '1' / 'model.py'}"
    )


def test_code_in_a_repository_is_not_executed(tmp_path: Path, engine: Path) -> None:
    repo = write_templates(tmp_path / "repo", {"engine_dir": str(engine)})
    for model in repo.iterdir():
        (model / "1" / "model.py").write_text(
            f"open({str(tmp_path / 'it ran')!r}, 'w')\nraise SystemExit\n"
        )
    read_repository(repo)
    assert not (tmp_path / "it ran").exists()


def test_models_served_elsewhere_are_not_a_problem(tmp_path: Path) -> None:
    folder = tmp_path / "repo" / "mine"
    (folder / "2").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "python"')
    assert read_repository(tmp_path / "repo", served_elsewhere=["mine"]).models[
        "mine"
    ].versions == (2,)
    assert len(inspect_repository(tmp_path / "repo")[1].errors) == 1


def test_an_ensemble_needs_no_version_folder(tmp_path: Path, engine: Path) -> None:
    repo = write_templates(tmp_path / "repo", {"engine_dir": str(engine)})
    (repo / "ensemble" / "1").rmdir()
    (repo / "preprocessing" / "1").rmdir()
    repository = read_repository(repo)
    assert (
        repository.models["ensemble"].versions
        == repository.models["preprocessing"].versions
        == (1,)
    )
    said = [problem.file for problem in repository.warnings if "no version folder" in problem.text]
    assert said == [str(repo / "preprocessing")]


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_a_repository_without_models_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RepositoryError, match=r"no such folder|no model in it"):
        read_repository(tmp_path / path)


def september_2023(repo: Path, engine: Path) -> Repository:
    """The oldest release: another backend name, unsigned lengths, numbered ensemble tensors."""
    write_templates(repo, {"engine_dir": str(engine), "triton_backend": "inflight_batcher_llm"})
    (repo / "tensorrt_llm_bls" / "config.pbtxt").unlink()
    (repo / "ensemble" / "config.pbtxt").write_text(
        """
        name: "ensemble" platform: "ensemble" max_batch_size: 128
        input [ { name: "INPUT_0" data_type: TYPE_STRING dims: [ -1 ] },
                { name: "INPUT_1" data_type: TYPE_UINT32 dims: [ -1 ] },
                { name: "INPUT_2" data_type: TYPE_STRING dims: [ -1 ] },
                { name: "INPUT_3" data_type: TYPE_STRING dims: [ -1 ] },
                { name: "runtime_top_k" data_type: TYPE_UINT32 dims: [ 1 ] optional: true },
                { name: "len_penalty" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
                { name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
        output [ { name: "OUTPUT_0" data_type: TYPE_STRING dims: [ -1, -1 ] } ]
        ensemble_scheduling { step [
          { model_name: "preprocessing" model_version: -1
            input_map { key: "QUERY" value: "INPUT_0" } input_map { key: "REQUEST_OUTPUT_LEN" value: "INPUT_1" }
            input_map { key: "BAD_WORDS_DICT" value: "INPUT_2" } input_map { key: "STOP_WORDS_DICT" value: "INPUT_3" }
            output_map { key: "INPUT_ID" value: "_IDS" } },
          { model_name: "tensorrt_llm" model_version: -1
            input_map { key: "input_ids" value: "_IDS" } input_map { key: "runtime_top_k" value: "runtime_top_k" }
            input_map { key: "len_penalty" value: "len_penalty" } input_map { key: "streaming" value: "streaming" }
            output_map { key: "output_ids" value: "_OUT" } },
          { model_name: "postprocessing" model_version: -1
            input_map { key: "TOKENS_BATCH" value: "_OUT" } output_map { key: "OUTPUT" value: "OUTPUT_0" } }
        ] }
        """
    )
    return read_repository(repo)


def test_ensemble_tensors_get_the_fields_of_the_steps_they_are_mapped_to(
    tmp_path: Path, engine: Path
) -> None:
    pipeline = september_2023(tmp_path / "repo", engine).pipelines["ensemble"]
    assert pipeline.fields.inputs == {
        "INPUT_0": "text_input",
        "INPUT_1": "max_tokens",
        "INPUT_2": "bad_words",
        "INPUT_3": "stop_words",
        "runtime_top_k": "top_k",
        "len_penalty": "length_penalty",
        "streaming": "stream",
    }
    assert pipeline.fields.outputs == {"OUTPUT_0": "text_output"}


def test_tensors_of_the_template_ensemble_are_fields_of_the_same_name(
    tmp_path: Path, engine: Path
) -> None:
    repository = read_repository(write_templates(tmp_path / "repo", {"engine_dir": str(engine)}))
    fields = repository.pipelines["ensemble"].fields
    assert fields.inputs == {
        name: name for name in repository.models["ensemble"].config.input_names
    }
    assert fields.outputs == {
        name: name for name in repository.models["ensemble"].config.output_names
    }
    assert repository.models["tensorrt_llm_bls"].config.input_names <= BLS_INPUTS


@pytest.mark.parametrize("backend", ["tensorrtllm", "inflight_batcher_llm", "python"])
def test_an_engine_model_is_recognised_by_its_tensors(
    tmp_path: Path, engine: Path, backend: str
) -> None:
    repo = write_templates(
        tmp_path / "repo", {"engine_dir": str(engine), "triton_backend": backend}
    )
    assert read_repository(repo).models["tensorrt_llm"].role is Role.ENGINE

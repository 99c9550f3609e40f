"""The templates of every release are served unfilled, and the checker recognises the release."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_text import write_engine_folder

from slipstream.repository.check import check_repository
from slipstream.repository.fill import fill_text
from slipstream.repository.models import read_repository
from slipstream.repository.releases.render import render_template
from slipstream.repository.releases.tables import RELEASES, find_release, list_models
from slipstream.repository.templates import variables, write_repository
from slipstream.repository.workspace import SCRIPTS, write_workspace


def write_release(folder: Path, kind: str, release: str) -> Path:
    engine = write_engine_folder(folder / "engine")
    for model in list_models(kind, release):
        (folder / "models" / model / "1").mkdir(parents=True)
        text = fill_text(render_template(kind, model, release), {"engine_dir": str(engine)}).text
        (folder / "models" / model / "config.pbtxt").write_text(text)
    return folder / "models"


@pytest.mark.parametrize("kind", ["inflight_batcher_llm", "gpt"])
@pytest.mark.parametrize("release", RELEASES)
def test_every_release_is_served_with_its_variables_left_unfilled(
    tmp_path: Path, kind: str, release: str
) -> None:
    models = write_release(tmp_path, kind, release)
    pipeline = read_repository(models).pipelines["ensemble"]
    prompt = "INPUT_0" if release == "2023-09" else "text_input"
    assert pipeline.fields.inputs[prompt] == "text_input"
    assert (
        pipeline.fields.outputs["OUTPUT_0" if release == "2023-09" else "text_output"]
        == "text_output"
    )
    texts = [problem.text for problem in check_repository(models).found]
    assert [text for text in texts if "not filled" not in text and "is not set" not in text] == []


FILLED = {
    "triton_max_batch_size": "4",
    "decoupled_mode": "False",
    "triton_backend": "tensorrtllm",
    "logits_datatype": "TYPE_FP32",
    "encoder_input_features_data_type": "TYPE_FP16",
    "prompt_embedding_table_data_type": "TYPE_FP16",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "bls_instance_count": "1",
    "exclude_input_in_output": "True",
    "batching_strategy": "V1",
    "tokenizer_type": "auto",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "0",
}


@pytest.mark.parametrize("kind", ["inflight_batcher_llm", "gpt"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_filled_template_has_no_problems(tmp_path: Path, kind: str, release: str) -> None:
    engine = write_engine_folder(tmp_path / "engine")
    values = {**FILLED, "engine_dir": str(engine), "tokenizer_dir": str(engine)}
    for model in list_models(kind, release):
        (tmp_path / "models" / model / "1").mkdir(parents=True)
        text = render_template(kind, model, release)
        filled = fill_text(text, {**dict.fromkeys(variables(text), ""), **values})
        (tmp_path / "models" / model / "config.pbtxt").write_text(filled.text)
    assert [str(problem) for problem in check_repository(tmp_path / "models").found] == []


def test_an_imported_repository_has_no_problems_until_it_is_damaged(tmp_path: Path) -> None:
    engine = write_engine_folder(tmp_path / "engine")
    write_repository(tmp_path / "models", "mine", engine, engine, 8)
    assert [str(problem) for problem in check_repository(tmp_path / "models").found] == []
    file = tmp_path / "models" / "ensemble" / "config.pbtxt"
    line = next(
        number
        for number, text in enumerate(file.read_text().splitlines(), 1)
        if 'key: "end_id"' in text
    )
    file.write_text(
        file.read_text().replace('key: "end_id" value: "_', 'key: "end_id" value: "_NO')
    )
    found = [str(problem) for problem in check_repository(tmp_path / "models").found]
    assert any(
        text.startswith(f"{file}:{line}: ensemble_scheduling.step.tensorrt_llm.input_map.end_id: ")
        for text in found
    )


def test_the_messages_input_is_optional_in_every_repository(tmp_path: Path) -> None:
    """`messages` is an input of this server: older repositories lack it, upstream's may declare it."""
    engine = write_engine_folder(tmp_path / "engine")
    for model in write_repository(tmp_path / "models", "mine", engine, engine, 8):
        config = model / "config.pbtxt"
        lines = config.read_text().splitlines(keepends=True)
        config.write_text("".join(line for line in lines if '"messages"' not in line.lower()))
    assert [str(problem) for problem in check_repository(tmp_path / "models").found] == []
    upstream = write_release(tmp_path / "upstream", "inflight_batcher_llm", "v0.10")
    before = [problem.text for problem in check_repository(upstream).found]
    for name in ("ensemble", "tensorrt_llm_bls"):
        config = upstream / name / "config.pbtxt"
        declared = (
            'input [\n  { name: "messages" data_type: TYPE_STRING dims: [ 1 ] optional: true },'
        )
        config.write_text(config.read_text().replace("input [", declared, 1))
        assert read_repository(upstream).pipelines[name].fields.inputs["messages"] == "messages"
    assert [problem.text for problem in check_repository(upstream).found] == before


def test_tensors_inside_an_ensemble_may_have_any_name(tmp_path: Path) -> None:
    models = write_release(tmp_path, "inflight_batcher_llm", "v0.9")
    file = models / "ensemble" / "config.pbtxt"
    file.write_text(file.read_text().replace('"_OUT_END_ID"', '"_PREPROCESSOR_END_ID"'))
    assert [problem for problem in check_repository(models).found if "END_ID" in str(problem)] == []


def test_a_missing_tensor_is_reported_with_the_release_that_has_it(tmp_path: Path) -> None:
    models = write_release(tmp_path, "inflight_batcher_llm", "v0.9")
    file = models / "tensorrt_llm" / "config.pbtxt"
    lines = file.read_text().splitlines(keepends=True)
    position = next(number for number, line in enumerate(lines) if '"lora_task_id"' in line)
    file.write_text("".join(lines[:position] + lines[position + 1 :]))
    found = [
        str(problem) for problem in check_repository(models).found if "lora_task_id" in str(problem)
    ]
    first = next(number for number, line in enumerate(lines, 1) if '"input_ids"' in line)
    assert found == [
        f"{file}:{first}: input.lora_task_id: is missing; repositories like v0.9 have it"
    ]


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("v0.5", "v0.5"),
        ("0.9.0", "v0.9"),
        ("v0.10.0", "v0.10"),
        ("v0.7.1", "2024-01"),
        ("v0.16", "v0.18"),
    ],
)
def test_a_release_without_a_table_uses_the_table_of_another(name: str, release: str) -> None:
    assert find_release(name) == release


def test_an_unknown_release_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'v7' is not a known release; known: .*v0\.18"):
        find_release("v7")


def test_a_workspace_keeps_changed_files_and_writes_missing_ones(tmp_path: Path) -> None:
    first = write_workspace(tmp_path / "w", "v0.10")
    assert first.new > len(SCRIPTS)
    assert write_workspace(tmp_path / "w", "v0.10") == (0, ())
    changed = tmp_path / "w" / "all_models" / "inflight_batcher_llm" / "ensemble" / "config.pbtxt"
    changed.write_text("mine")
    (tmp_path / "w" / "tools" / "fill_template.py").unlink()
    assert write_workspace(tmp_path / "w", "v0.10") == (1, (changed,))
    assert changed.read_text() == "mine"


def test_a_script_of_a_workspace_says_that_its_python_lacks_the_package(tmp_path: Path) -> None:
    write_workspace(tmp_path, "v0.10")
    script = tmp_path / "tools" / "fill_template.py"
    # -I and -S: no package of this environment can be imported
    command = [sys.executable, "-I", "-S", str(script), "-i", "config.pbtxt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"error: slipstream is not installed for {sys.executable}; activate"
    )
    assert done.stderr.count("\n") == 1

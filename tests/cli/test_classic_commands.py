"""convert, build, lora, launch, quantize and verify: flags, limits, ranks and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy
import pytest
import torch
from command_line import run_cli
from gguf import GGMLQuantizationType
from gguf_files import plain_tokenizer, write_gguf
from quantised_folder import quantise_folder
from safetensors.torch import load_file, save_file
from tiny_hf_folder import save_model
from tiny_models import config_of, random_model
from tiny_server import wait_for
from transformers.convert_slow_tokenizer import bytes_to_unicode

from slipstream.cli.commands import COMMANDS, HIDDEN, run_command
from slipstream.cli.compat import launch
from slipstream.cli.progress import ProgressLines
from slipstream.server.engine_link.launched import Launched, find_launch
from slipstream.weights.engine_config import BuildLimits, read_engine_config
from slipstream.weights.flags import BUILD_FLAGS, CONVERT_FLAGS, Flag


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama")


def run(name: str, *arguments: object) -> int:
    return run_command(name, [str(argument) for argument in arguments])


def given(flag: Flag, dashes: bool) -> list[str]:
    name = f"--{flag.name.replace('_', '-') if dashes else flag.name}"
    return [name] if flag.takes in ("nothing", "maybe") else [name, "1"]


@pytest.mark.parametrize("dashes", [True, False])
def test_every_flag_without_effect_is_accepted_and_explained(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dashes: bool
) -> None:
    for name, source, flags in (
        ("convert", "--model_dir", CONVERT_FLAGS),
        ("build", "--checkpoint_dir", BUILD_FLAGS),
    ):
        explained = [flag for flag in flags if flag.effect == "explained"]
        words = [word for flag in explained for word in given(flag, dashes)]
        assert run(name, source, model, "--output_dir", tmp_path / name, *words) == 0
        printed = capsys.readouterr().out
        assert [
            flag.name for flag in explained if f"--{flag.name} has no effect: " not in printed
        ] == []


@pytest.mark.parametrize(
    "flag", [flag for flag in BUILD_FLAGS if flag.effect == "refused"], ids=lambda flag: flag.name
)
def test_every_unsupported_flag_is_one_error_line(
    flag: Flag, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("build", "--checkpoint_dir", tmp_path, *given(flag, False)) == 1
    assert capsys.readouterr().err == f"error: --{flag.name}: {flag.text}\n"


def test_an_unknown_flag_gets_a_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run("build", "--max_batch_sise", "4")
    assert ended.value.code == 2
    text = "there is no option --max_batch_sise; did you mean --max_batch_size? (see slipstream build --help)"
    assert capsys.readouterr().err == f"error: {text}\n"
    result = run_cli(["build", "--max_batch_sise", "4"], program="triton")
    assert result.exit_code == 2
    expected = text.replace("slipstream build", "triton build")
    assert result.stderr == f"triton - ERROR - {expected}\n"


def test_build_limits_are_bounded_by_the_model(model: Path, tmp_path: Path) -> None:
    limits = [
        "--max_batch_size",
        4,
        "--max_input_len",
        100,
        "--max_output_len",
        50,
        "--max_num_tokens",
        300,
    ]
    assert run("build", "--checkpoint_dir", model, "--output_dir", tmp_path / "a", *limits) == 0
    built = read_engine_config(tmp_path / "a").build
    assert built == BuildLimits(100, 150, 4, 300, 1)
    assert built.given == ("max_batch_size", "max_num_tokens")
    assert (
        run(
            "build",
            "--checkpoint_dir",
            model,
            "--output_dir",
            tmp_path / "b",
            "--max_input_len",
            2048,
        )
        == 0
    )
    assert read_engine_config(tmp_path / "b").build.max_input_len == 512


def test_weight_only_precision_of_a_checkpoint_reaches_the_engine(
    model: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    assert (
        run(
            "convert",
            "--model_dir",
            model,
            "--output_dir",
            checkpoint,
            "--use_weight_only",
            "--dtype",
            "bfloat16",
        )
        == 0
    )
    assert (
        json.loads((checkpoint / "config.json").read_text())["quantization"]["quant_algo"]
        == "W8A16"
    )
    assert run("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "engine") == 0
    config = read_engine_config(tmp_path / "engine")
    assert (config.quantisation.algorithm, config.dtype) == ("W8A16", "bfloat16")


@pytest.mark.parametrize(
    "flags",
    [
        ["--use_fp8"],
        ["--use_fp8_rowwise"],
        ["--enable_fp8"],
        ["--dtype", "fp8"],
        ["--use_weight_only", "--weight_only_precision", "fp8"],
    ],
)
def test_every_spelling_of_fp8_reaches_the_engine(
    model: Path, tmp_path: Path, flags: list[str]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    assert (
        run("convert", "--model_dir", model, "--output_dir", checkpoint, *flags, "--fp8-kv-cache")
        == 0
    )
    assert run("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "one") == 0
    assert run("build", "--model_dir", model, "--output_dir", tmp_path / "two", *flags) == 0
    one, two = (read_engine_config(tmp_path / name).quantisation for name in ("one", "two"))
    assert (one.algorithm, one.kv_cache) == ("FP8", "FP8")
    assert (two.algorithm, two.kv_cache) == ("FP8", None)


@pytest.mark.parametrize(
    ("form", "algorithm"),
    [
        ("fp8", "FP8"),
        ("int8_wo", "W8A16"),
        ("int4_wo", "W4A16"),
        ("int4_awq", "W4A16_AWQ"),
        ("int4_gptq", "W4A16_GPTQ"),
        ("full_prec", None),
    ],
)
def test_quantize_writes_each_format(
    model: Path, tmp_path: Path, form: str, algorithm: str | None
) -> None:
    words = ["--model_dir", model, "--output_dir", tmp_path, "--qformat", form, "--calib_size", 32]
    assert run("quantize", *words, "--kv_cache_dtype", "fp8") == 0
    assert json.loads((tmp_path / "config.json").read_text())["quantization"] == {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8",
    }


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_checkpoint_to_calibrate_builds_the_same_engine_as_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A text of the user, with some numbers: 1 2 3 5 8 13. " * 60)
    words = ["--model_dir", model, "--dtype", "float32"]
    calibration = ["--calib_dataset", text, "--calib_size", 3]
    form = ["--qformat", f"int4_{method}", *calibration]
    checkpoint = tmp_path / "checkpoint"
    assert run("quantize", *words, "--output_dir", checkpoint, *form) == 0
    built = tmp_path / "built"
    quantize = ["--quantize", method, *calibration]
    assert run("build", *words, "--output_dir", built, *quantize) == 0
    text.unlink()  # the checkpoint has its own copy
    from_checkpoint = tmp_path / "from-checkpoint"
    assert run("build", "--checkpoint_dir", checkpoint, "--output_dir", from_checkpoint) == 0
    printed = capsys.readouterr().out
    assert f"layers, quantised by {method}" in printed
    assert "has no effect" not in printed
    one, two = ((folder / "rank0.engine").read_bytes() for folder in (built, from_checkpoint))
    assert one == two
    assert {
        part.form
        for parts in read_engine_config(built).quantisation.stored.values()
        for part in parts
    } == {"Q4_1", "Q8_0"}


@pytest.mark.parametrize(
    ("precision", "algorithm"), [("int8", "W8A16"), ("int4", "W4A16"), ("fp8", "FP8")]
)
def test_quantize_of_a_build_takes_the_types_without_calibration(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    precision: str,
    algorithm: str,
) -> None:
    words = ["--model_dir", model, "--output_dir", tmp_path, "--quantize", precision]
    assert run("build", *words, "--calib_size", 4) == 0
    assert read_engine_config(tmp_path).quantisation.algorithm == algorithm
    assert "--calib_size has no effect: only awq and gptq are calibrated" in capsys.readouterr().out


def test_unavailable_and_conflicting_formats_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model_dir", model, "--output_dir", tmp_path]
    refused = {
        ("quantize", "--qformat", "w4a8_awq"): "--qformat w4a8_awq is not available; use fp8, ",
        ("convert", "--use_fp8", "--use_weight_only"): "--use_fp8 and --use_weight_only exclude",
        ("build", "--quantize", "awq", "--use_weight_only"): "--quantize and --use_weight_only",
        ("build", "--quantize", "gptq", "--calib_size", "0"): "--calib_size must be at least 1",
        ("build", "--quantize", "gptq", "--calib_dataset", "cnn_dailymail"): (
            "cnn_dailymail: cannot be read: No such file or directory; calibration takes a text"
        ),
    }
    for (command, *flags), text in refused.items():
        assert run(command, *words, *flags) == 1
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("build", *words, "--quantize", "int3")
    assert "invalid choice: 'int3' (choose from" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("tensors", "stages"), [(4, 1), (2, 2), (1, 2)])
def test_split_checkpoints_build_the_same_engine_as_whole_ones(
    model: Path, tmp_path: Path, tensors: int, stages: int
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("convert", "--model_dir", model, "--output_dir", whole) == 0
    assert (
        run(
            "convert",
            "--model_dir",
            model,
            "--output_dir",
            parts,
            "--tp_size",
            tensors,
            "--pp_size",
            stages,
        )
        == 0
    )
    ranks = [load_file(parts / f"rank{rank}.safetensors") for rank in range(tensors * stages)]
    one = load_file(whole / "rank0.safetensors")
    name = "transformer.layers.0.mlp.proj.weight"  # split by columns
    assert torch.equal(torch.cat([rank[name] for rank in ranks[:tensors]], dim=1), one[name])
    # 2 KV heads: with 4 ranks each is stored twice; 4 query heads of 16
    qkv = ranks[-1]["transformer.layers.0.attention.qkv.weight"]
    assert qkv.shape[0] == (4 // tensors + 2 * max(1, 2 // tensors)) * 16
    layer = 1 if stages == 2 else 0
    assert torch.equal(qkv[-16:], one[f"transformer.layers.{layer}.attention.qkv.weight"][-16:])
    for folder in (whole, parts):
        assert (
            run(
                "build",
                "--checkpoint_dir",
                folder,
                "--output_dir",
                tmp_path / f"engine-{folder.name}",
            )
            == 0
        )
    built = [read_engine_config(tmp_path / f"engine-{name}") for name in ("whole", "parts")]
    assert built[0].content_hash == built[1].content_hash
    assert [config.wanted_ranks for config in built] == [1, tensors * stages]


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            ("--tp_size", 2),
            ["the engine is built whole: it runs with 2 ranks, or any other number"],
        ),
        (
            ("--tp_size", 2, "--pp_size", 2),
            [
                "pp_size 2: pipeline stages run as tensor ranks, 4 ranks in all",
                "the engine is built whole: it runs with 4 ranks, or any other number",
            ],
        ),
        (
            ("--tp_size", 2, "--pp_size", 3),
            [
                "pp_size 3: pipeline stages run as tensor ranks, 6 ranks in all",
                "6 ranks do not divide this model: it runs with 4 instead",
            ],
        ),
    ],
)
def test_the_build_says_how_many_ranks_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple, lines: list[str]
) -> None:
    assert run("build", "--checkpoint_dir", model, "--output_dir", tmp_path / "e", *flags) == 0
    printed = capsys.readouterr().out.splitlines()
    found = [line.removeprefix("[WARNING] ") for line in printed if " ranks" in line]
    assert found == lines
    config = read_engine_config(tmp_path / "e")
    product = flags[1] * (flags[3] if len(flags) > 2 else 1)
    assert config.wanted_ranks == product


def test_an_equal_conversion_writes_nothing_and_another_replaces_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("convert", "--model_dir", model, "--output_dir", tmp_path / "c")
    assert run(*words, "--tp_size", 2) == 0
    before = (tmp_path / "c" / "rank1.safetensors").stat().st_mtime_ns
    assert run(*words, "--tp_size", 2) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "c" / "rank1.safetensors").stat().st_mtime_ns == before
    assert run(*words) == 0
    assert sorted(path.name for path in (tmp_path / "c").glob("rank*")) == ["rank0.safetensors"]


@pytest.mark.parametrize("name", ["convert", "build"])
def test_an_interrupted_command_leaves_no_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def interrupted(path: Path, *others: object) -> str:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    module = "checkpoint" if name == "convert" else "build"
    monkeypatch.setattr(f"slipstream.weights.{module}.write_tensors", interrupted)
    source = "--model_dir" if name == "convert" else "--checkpoint_dir"
    assert run(name, source, model, "--output_dir", tmp_path / "place" / "out") == 130
    assert list((tmp_path / "place").iterdir()) == []


def test_repeated_commands_change_no_files(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ("build", "--checkpoint_dir", model, "--output_dir", tmp_path / "e"),
        ("workspace", tmp_path / "w"),
        ("quantize", "--model_dir", model, "--output_dir", tmp_path / "q", "--qformat", "fp8"),
    ):
        assert run(*words) == 0
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert run(*words) == 0
        assert "nothing to do" in capsys.readouterr().out
        assert {
            path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()
        } == before


def test_a_tp_size_that_does_not_divide_the_heads_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("convert", "--model_dir", model, "--output_dir", tmp_path / "c", "--tp_size", 3) == 1
    assert "tp_size 3 does not divide this model: it has 4 heads" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_lora_writes_the_weights_and_config_tensors(tmp_path: Path) -> None:
    first, second = torch.randn(4, 64), torch.randn(32, 4)
    stem = "base_model.model.model.layers.1.self_attn.k_proj.lora_"
    (tmp_path / "in").mkdir()
    tensors = {f"{stem}A.weight": first, f"{stem}B.weight": second, "other": torch.zeros(1)}
    save_file(tensors, tmp_path / "in" / "adapter_model.safetensors")
    (tmp_path / "in" / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    assert (
        run("lora", "-i", tmp_path / "in", "-o", tmp_path / "out", "--storage-type", "float32") == 0
    )
    weights = numpy.load(tmp_path / "out" / "model.lora_weights.npy")
    assert numpy.load(tmp_path / "out" / "model.lora_config.npy").tolist() == [[[2, 1, 4]]]
    assert weights.shape == (1, 1, 4 * 64 + 32 * 4)
    numpy.testing.assert_allclose(weights[0, 0, :256], first.numpy().ravel())
    numpy.testing.assert_allclose(weights[0, 0, 256:], 2.0 * second.numpy().ravel())


def test_a_pickled_adapter_is_refused_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    assert run("lora", "-i", tmp_path, "-o", tmp_path / "out") == 1
    assert "save it as adapter_model.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_launch_starts_tritonserver_with_the_old_command_line(tmp_path: Path) -> None:
    words = [
        "--world_size=4",
        f"--model_repo={tmp_path}",
        "--http_port=1",
        "--log",
        "--tritonserver",
        "/bin/true",
    ]
    assert launch.server_command(launch.create_parser().parse(words)) == [
        "/bin/true",
        f"--model-repository={tmp_path}",
        "--log-verbose=3",
        "--log-file=triton_log.txt",
        "--grpc-port=8001",
        "--http-port=1",
        "--metrics-port=8002",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--disable-auto-complete-config",
        "--backend-config=python,shm-region-prefix-name=prefix0_",
    ]


def test_launch_listens_at_the_given_address(tmp_path: Path) -> None:
    words = [f"--model_repo={tmp_path}", "--tritonserver", "/bin/true", "--address", "0.0.0.0"]
    command = launch.server_command(launch.create_parser().parse(words))
    assert [word for word in command if "address" in word] == [
        "--http-address=0.0.0.0",
        "--grpc-address=0.0.0.0",
    ]


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ([], []),
        (["--frontends=auto"], ["--frontends=auto"]),
        (["--frontends=3"], ["--frontends=3"]),
    ],
)
def test_launch_passes_on_the_number_of_server_processes(
    tmp_path: Path, given: list[str], passed_on: list[str]
) -> None:
    words = [f"--model_repo={tmp_path}", "--tritonserver", "/bin/true", *given]
    command = launch.server_command(launch.create_parser().parse(words))
    assert [word for word in command if word.startswith("--frontends")] == passed_on


@pytest.mark.parametrize(
    ("given", "passed_on"), [([], []), (["--ranks=2"], ["--ranks=2"]), (["--world_size=4"], [])]
)
def test_launch_passes_on_the_number_of_ranks(
    tmp_path: Path, given: list[str], passed_on: list[str]
) -> None:
    words = [f"--model_repo={tmp_path}", "--tritonserver", "/bin/true", *given]
    command = launch.server_command(launch.create_parser().parse(words))
    assert [word for word in command if word.startswith("--ranks")] == passed_on


def test_launch_tells_the_server_the_world_size(tmp_path: Path) -> None:
    given = launch.create_parser().parse([f"--model_repo={tmp_path}", "--world_size=4"])
    assert find_launch(launch._environment(given)) == Launched("slipstream launch", 0, 4, 4)


@pytest.mark.parametrize(
    ("flags", "spawning"),
    [
        (["--multi-model"], None),
        (["--multi-model", "--disable-spawn-processes", "--world_size", "5"], "0"),
    ],
)
def test_a_world_size_is_not_the_ranks_of_each_of_several_models(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    spawning: str | None,
) -> None:
    monkeypatch.setattr(launch, "_refuse_second", lambda force: None)
    seen = tmp_path / "environment"
    server = tmp_path / "server"
    server.write_text(f"#!/bin/sh\nenv > {seen}.new\nmv {seen}.new {seen}\nsleep 2\n")
    server.chmod(0o755)
    words = [f"--model_repo={tmp_path}", f"--tritonserver={server}", *flags]
    assert run("launch", *words) == 0
    printed = capsys.readouterr().out
    if len(flags) > 1:
        assert (
            "[INFO] --world_size 5: one server is started, which starts as many ranks for each "
            "engine as it was built for; the other 4 processes are not needed"
        ) in printed
    wait_for(seen.exists)
    found = dict(line.partition("=")[::2] for line in seen.read_text().splitlines())
    assert find_launch(found) == Launched()
    assert found["TRTLLM_ORCHESTRATOR"] == "1"
    assert found.get("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES") == spawning


def test_several_models_with_a_world_size_need_the_flag_of_the_old_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("launch", f"--model_repo={tmp_path}", "--multi-model", "--world_size", "5") == 1
    found = capsys.readouterr().err
    assert "--multi-model with --world_size 5 needs --disable-spawn-processes" in found


def test_only_a_running_tritonserver_counts_as_busy(tmp_path: Path) -> None:
    for process, name, state in (
        (7, "tritonserver", "R"),
        (8, "tritonserver", "S"),
        (9, "python", "R"),
    ):
        (tmp_path / str(process)).mkdir()
        (tmp_path / str(process) / "stat").write_text(f"{process} ({name}) {state} 1 2 3")
    assert launch.busy_servers(tmp_path) == [7]


def test_progress_without_a_terminal_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.progress._PLAIN_SECONDS", 0.0)
    with ProgressLines() as lines:
        for done in (0, 1_000_000_000, 1_050_000_000, 2_000_000_000):
            lines.update("weights", done, 2_000_000_000)
    first, half, whole = capsys.readouterr().out.splitlines()
    assert first == "[INFO] weights: 2.00 GB"
    assert half.startswith("[INFO] weights: 50%, 1.00/2.00 GB, ")
    assert half.endswith(" GB/s, 0 s left")
    assert whole.startswith("[INFO] weights: 100%, 2.00/2.00 GB, ")


def test_progress_of_a_fetch_is_no_build(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLines() as lines:
        lines.update("fetching org/name", 0, 1_000_000)
        lines.update("fetching org/name", 1_000_000, 1_000_000)
        assert not lines.built
        lines.update("weights", 0, 1_000_000)
        assert lines.built
    assert "[INFO] fetching org/name: 1.0 MB" in capsys.readouterr().out


def test_every_command_is_listed_in_the_help() -> None:
    listed = run_cli(["--help"]).output
    assert all((f"  {name} " in listed) == (name not in HIDDEN) for name in COMMANDS)
    assert set(HIDDEN.values()) <= COMMANDS.keys() - HIDDEN.keys()


def test_verify_reports_agreement_with_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            "build", "--checkpoint_dir", model, "--output_dir", tmp_path / "e", "--dtype", "float32"
        )
        == 0
    )
    assert run("verify", tmp_path / "e", "--against", model) == 0
    printed = capsys.readouterr().out
    assert "tokenisation: equal (5 of 5 texts)\ntop-1 agreement: 100.00%" in printed
    assert "first layer that diverges: none" in printed


def test_verify_takes_what_import_takes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("verify", model, "--weight-only", "int8") == 0
    printed = capsys.readouterr().out
    assert "weights: 100%" in printed
    assert "tokenisation: equal (5 of 5 texts)" in printed
    assert run("import", "-m", "tiny", "-s", model, "--dtype", "float32") == 0
    capsys.readouterr()
    assert run("verify", "tiny") == 0, "the engine records its source"
    assert "top-1 agreement: 100.00%" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "method"), [("llama", "gptq"), ("gpt2", "awq")])
def test_verify_compares_with_what_a_quantised_checkpoint_stands_for(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    method: str,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    folder = quantise_folder(save_model(tmp_path / "model", family), method)
    assert run("verify", folder) == 0
    printed = capsys.readouterr().out
    assert f"reference: the matrices that the {method} weights stand for\n" in printed
    assert "top-1 agreement: 100.00%" in printed
    assert "first layer that diverges: none" in printed
    # the reference is not the engine again
    plain = save_model(tmp_path / "plain", family)
    run("verify", folder, "--against", plain)
    difference = re.search(r"largest logit difference: ([0-9.]+)", capsys.readouterr().out)
    assert difference is not None
    assert float(difference[1]) > 0.01


def test_verify_compares_with_a_gguf_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    path = tmp_path / "tiny.gguf"
    # the letters of all bytes, and one merge
    letters = sorted(bytes_to_unicode().values())
    tokens = [*letters, *(f"t{number}" for number in range(512 - len(letters)))]
    vocabulary = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["t 0"]}
    metadata = {**plain_tokenizer(512), **vocabulary}
    model = random_model(config_of("llama", vocab_size=512))
    write_gguf(path, model, GGMLQuantizationType.Q8_0, metadata=metadata)
    assert run("verify", path) == 0
    printed = capsys.readouterr().out
    assert "top-1 agreement: 100.00%" in printed
    assert "first layer that diverges: none" in printed


def test_verify_refuses_a_source_that_transformers_cannot_load(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("build", "--checkpoint_dir", model, "--output_dir", tmp_path / "e")
    run("convert", "--model_dir", model, "--output_dir", tmp_path / "c")
    capsys.readouterr()
    assert run("verify", tmp_path / "e", "--against", tmp_path / "c") == 1
    assert capsys.readouterr().err.startswith(
        f"error: --against {tmp_path}/c: a checkpoint has no model of transformers; give the "
    )
    assert run("verify", tmp_path / "e", "--against", tmp_path / "absent") == 1
    assert capsys.readouterr().err.endswith("absent: no such folder or file\n")


def test_verify_names_the_first_layer_that_diverges(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_model(tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= -5.0
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert (
        run(
            "build", "--checkpoint_dir", other, "--output_dir", tmp_path / "e", "--dtype", "float32"
        )
        == 0
    )
    run("verify", tmp_path / "e", "--against", model)
    assert "first layer that diverges: 0\n" in capsys.readouterr().out

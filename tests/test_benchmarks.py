"""The arithmetic of benchmarks/ on given numbers: medians, ratios and limits. Nothing is timed."""

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_engine import all_logits
from tiny_engine import build_tiny_engine

from slipstream.engine.memory.cores import usable_cores
from slipstream.engine.plan import StepPlan
from slipstream.model.spec import ModelSpec
from slipstream.repository.models import read_repository
from slipstream.repository.templates import write_repository
from slipstream.weights.engine_config import read_engine_config

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def table():
    return runpy.run_path(str(BENCHMARKS / "table.py"))


@pytest.fixture(scope="module")
def limits():
    return runpy.run_path(str(BENCHMARKS / "limits.py"))


def small_model():
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_size=16,
        ffn_size=128,
        max_positions=512,
        tied_embeddings=True,
    )


def test_a_figure_is_the_median_and_contenders_without_samples_have_none(table):
    assert table["medians"](
        {"slipstream": [9.0, 1.0, 2.0], "vllm": [], "llama.cpp": [4.0, 6.0]}
    ) == {"slipstream": 2.0, "llama.cpp": 5.0}


def test_ratios_divide_our_figure_by_the_peers_and_by_the_limit(table):
    rate = table["Row"]("decode", "tok/s", True, {"slipstream": 30.0, "llama.cpp": 20.0}, 120.0)
    assert (rate.ratio("llama.cpp"), rate.ratio("vllm"), rate.of_limit) == (1.5, None, 0.25)
    time = table["Row"]("first token", "ms", False, {"slipstream": 40.0, "llama.cpp": 80.0}, 10.0)
    assert (time.ratio("llama.cpp"), time.of_limit) == (0.5, 0.25)
    alone = table["Row"]("decode", "tok/s", True, {"llama.cpp": 20.0}, 120.0)
    assert (alone.ratio("llama.cpp"), alone.of_limit) == (None, None)


def test_the_table_shows_figures_ratios_and_share(table):
    row = table["Row"]("decode", "tok/s", True, {"slipstream": 123.4, "llama.cpp": 61.7}, 246.8)
    lines = table["render"]([row], ["llama.cpp", "vllm"]).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == ["decode, tok/s", "higher", "123", "61.7", "-", "2.00×", "-", "247", "50%"]
    assert len({len(line) for line in lines}) == 1


def test_the_work_of_a_model_is_counted_from_its_sizes(limits):
    work = limits["Work"].of(small_model(), 2.0)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    assert (work.weights, work.head) == (2 * layer, 64_000)
    assert work.model_bytes == 2.0 * (2 * layer + 64_000)
    assert work.cache_bytes == 2 * 2 * 32 * 2
    assert work.attention == 4 * 2 * 64


def test_one_stream_is_bound_by_memory_reads_and_a_prompt_by_operations(limits):
    work = limits["Work"](weights=900, head=100, weight_bytes=2.0, cache_bytes=10, attention=0)
    slow_memory = limits["Machine"](bandwidth=1000.0, operations=1e9)
    assert work.decode_rate(slow_memory, 90, 20) == pytest.approx(1000 / (2000 + 100 * 10))
    slow_products = limits["Machine"](bandwidth=1e9, operations=1000.0)
    assert work.prefill_seconds(slow_products, 3, 50) == pytest.approx(
        2 * 3 * (900 * 50 + 100) / 1000
    )
    assert work.decode_seconds(slow_products, 4, 50) == pytest.approx(4 * 2 * 1000 / 1000)


def test_the_time_of_a_batch_is_one_prefill_and_its_decode_steps(limits):
    work = limits["Work"](weights=900, head=100, weight_bytes=2.0, cache_bytes=0, attention=0)
    machine = limits["Machine"](bandwidth=1000.0, operations=1e9)
    # seconds of one read of the weights each
    prefill = 2.0
    step = 2.0
    assert work.batch_rate(machine, 8, 16, 11) == pytest.approx(
        8 * 11 / (prefill + 10 * step), rel=1e-3
    )


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "--llama-python"),
        (["--peers", "other"], 2, "unknown peers: other"),
    ],
)
def test_cpu_benchmark_prints_help_and_refuses_unknown_peers(arguments, code, text):
    command = [sys.executable, str(BENCHMARKS / "cpu.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert text in result.stdout + result.stderr


def test_cpu_benchmark_measures_a_whole_server(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "cpu.py"), "--shape", "tiny", "--quick"]
    printed = subprocess.run(
        [*command, "--peers", "", "--only", "server_start"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SLIPSTREAM_HOME": str(tmp_path)},
    ).stdout
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if "over HTTP" in line]
    assert [row[0].strip().split(", ")[1] for row in rows] == ["bf16", "4-bit"]
    assert all(0 < float(row[2]) < 120 for row in rows)
    assert "server_start, bf16: " in printed


def test_cpu_benchmark_prints_the_table_of_a_small_shape(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "cpu.py"), "--shape", "tiny", "--quick"]
    printed = subprocess.run(
        [*command, "--peers", "", "--only", "kept"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SLIPSTREAM_HOME": str(tmp_path)},
    ).stdout
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| 1 ×")]
    assert [row[0].strip() for row in rows] == [
        f"1 × 128/32 decode kept beside a busy program, {group}, %" for group in ("bf16", "4-bit")
    ]
    assert all(float(row[2]) > 0 for row in rows)
    cores = usable_cores()
    assert all(float(row[3]) == pytest.approx(100 * cores / (cores + 1), abs=1) for row in rows)
    kept = read_engine_config(tmp_path / "benchmarks" / "tiny-512" / "engine-q4")
    assert kept.quantisation.algorithm == "GGUF"


@pytest.mark.parametrize("shape", ["tiny", "tiny-qwen2"])
def test_all_contenders_get_the_same_random_weights(tmp_path, monkeypatch, shape):
    import torch
    import transformers

    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(BENCHMARKS)
    prepare = runpy.run_path(str(BENCHMARKS / "models.py"))["prepare_random_models"]
    models = prepare(shape, hugging_face=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        models.hugging_face, dtype=torch.float32
    )
    prompt = [5, 77, 200, 31, 8, 8, 140]
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits
    ours = all_logits(models.engine_bf16, torch.float32, [prompt])[0]
    torch.testing.assert_close(ours, expected[0], atol=1e-3, rtol=1e-3)
    assert prepare(shape).hugging_face is None


@pytest.mark.parametrize(
    ("higher", "ours", "goal", "text"),
    [
        (True, 130.0, 1.3, "≥ 1.3× met"),
        (True, 129.0, 1.3, "≥ 1.3× missed"),
        (False, 65.0, 0.65, "≤ 0.65× met"),
        (False, 66.0, 0.65, "≤ 0.65× missed"),
        (True, 1.0, None, "| - "),
    ],
)
def test_a_goal_is_a_ratio_to_the_first_peer(table, higher, ours, goal, text):
    figures = {table["OURS"]: ours, "first": 100.0, "second": 1.0}
    row = table["Row"]("case", "s", higher, figures, None, goal)
    other = table["Row"]("other", "s", True, figures, None, 1.0)
    assert text in table["render"]([row, other], ["first", "second"]).splitlines()[2]
    assert "goal" not in table["render"]([replace(row, goal=None)], ["first"])


@pytest.mark.slow
def test_adapters_benchmark_prints_a_line_per_kind_of_modules():
    command = [
        sys.executable,
        str(BENCHMARKS / "adapters.py"),
        "--shape",
        "tiny",
        "--adapters",
        "5",
        "--rounds",
        "1",
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in printed.splitlines()[1:]]
    assert [(line[0], line[3], line[6]) for line in lines] == [
        (kind, *["tok/s"] * 2) for kind in ("attention", "all")
    ]


@pytest.fixture(scope="module")
def gpu():
    return runpy.run_path(str(BENCHMARKS / "gpu.py"))


def test_a_step_takes_the_longer_of_arithmetic_and_reading_then_attention(gpu):
    spec = small_model()
    head = spec.vocab_size * spec.hidden_size
    body = spec.parameters() - head
    cached_token = 2 * spec.layers * spec.kv_size * 2  # bytes
    few = StepPlan(step=0, rows=[0, 1], positions=[9, 19], counts=[1, 1], samples=[True, True])
    reading = 2 * (body + head) / gpu["READ_BYTES_PER_SECOND"]
    keys_and_values = (10 + 20) * cached_token / gpu["READ_BYTES_PER_SECOND"]
    assert gpu["limit_seconds"](spec, few, 2) == pytest.approx(reading + keys_and_values)
    prompt = StepPlan(step=0, rows=[0], positions=[100], counts=[4000], samples=[False])
    # the last attention: for sampled tokens only
    behind = spec.hidden_size * (spec.q_size + 3 * spec.ffn_size)
    arithmetic = 2 * (body - behind) * 4000 / gpu["FLOPS"][2]
    attention = 4 * spec.layers * spec.q_size * 4000 * (100 + 2000) / gpu["FLOPS"][2]
    assert gpu["limit_seconds"](spec, prompt, 2) == pytest.approx(arithmetic + attention)


def test_the_engine_benchmark_has_the_settings_of_a_served_engine(gpu, monkeypatch, tmp_path):
    engine = build_tiny_engine(tmp_path)
    write_repository(tmp_path / "models", "tiny", engine, engine, 64)
    served = read_repository(tmp_path / "models").engines["tensorrt_llm"].settings
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--shape", "tiny"])
    assert gpu["served_settings"](gpu["parse_options"]()) == replace(
        served, dtype="float32", device="cpu"
    )


def test_every_run_of_a_workload_has_prompts_of_its_own(gpu):
    work = gpu["WORKLOADS"][1]
    first, second = (gpu["make_requests"](work, 1000, "half", run) for run in (1, 2))
    assert [len(r.prompt) for r in first] == [len(r.prompt) for r in second] == [128] * 32
    assert not {tuple(r.prompt[:32]) for r in first} & {tuple(r.prompt[:32]) for r in second}
    assert not {r.request_id for r in first} & {r.request_id for r in second}
    assert [r.sampling.top_p for r in first] == [1.0, 0.9] * 16


def test_the_engine_benchmark_prints_sampling_beside_greedy_in_the_same_run():
    options = ["--device", "cpu", "--shape", "tiny", "--only", "b32", "--requests", "2"]
    names = ["temperature", "top_p", "top_k", "all", "typical", "logprobs", "bias", "half"]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *options, "--rows", "7"]
    for name in names:
        command += ["--sampling", name]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, _, *lines = printed.splitlines()
    assert " 7 rows, 512 tokens a step, sequences of 4096, " in first
    rows = [line.split() for line in lines]
    assert [row[:2] for row in rows] == [["b32", name] for name in ("greedy", *names)]
    greedy = float(rows[0][2])
    for row in rows:
        assert float(row[4]) == pytest.approx(float(row[2]) / greedy, abs=0.002)


def test_the_benchmark_of_ranks_runs_the_part_of_one_rank():
    options = ["--device", "cpu", "--shape", "tiny", "--ranks", "1,2,3"]
    command = [sys.executable, str(BENCHMARKS / "ranks.py"), *options]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *lines = printed.splitlines()
    rows = [line.split() for line in lines]
    assert [row[:3] for row in rows[:-1]] == [
        ["tiny", ranks, count] for ranks in "12" for count in ("1", "8", "32", "128", "8x1024")
    ]
    assert all(float(row[3]) > 0 for row in rows[:-1])
    assert "tp_size 3 does not divide this model: it has 4 heads" in lines[-1]


def test_the_benchmark_of_mixed_load_prints_a_line_per_target():
    command = [sys.executable, str(BENCHMARKS / "mixed_load.py"), "--shape", "tiny"]
    command += ["--device", "cpu", "--streams", "2", "--prompt", "64", "--seconds", "0.2"]
    command += ["--targets", "off,20"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    head, _, *lines = printed.splitlines()
    assert head == "tiny on cpu, 2 streams, prompts of 64 tokens, one after the other"
    assert [line.split()[0] for line in lines] == ["off", "20"]
    assert all(float(word) > 0 for line in lines for word in line.split()[1:])


def test_the_benchmark_of_deterministic_answers_counts_equal_ones():
    command = [sys.executable, str(BENCHMARKS / "deterministic.py"), "--shape", "tiny"]
    command += ["--device", "cpu", "--prompts", "2", "--output", "4"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in printed.splitlines()[1:]]
    assert [line[:2] for line in lines] == [
        [kernels, sampling]
        for kernels in ("fast", "deterministic")
        for sampling in ("greedy", "sampled")
    ]
    assert [line[2:5] for line in lines[2:]] == [["2", "of", "2"]] * 2


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_limit_of_a_rank_is_the_reading_of_its_part(ranks, capsys):
    """Numbers of Llama-3-70B, written without the code."""
    benchmark = runpy.run_path(str(BENCHMARKS / "ranks.py"))
    whole = benchmark["SHAPES"]["llama3-70b"]
    layer = 8192 * (64 + 2 * 8) * 128 + 8192 * 8192 + 3 * 8192 * 28672
    head = benchmark["limit_spec"](whole, ranks).vocab_size * 8192
    assert head >= 128256 * 8192 / ranks
    keys_and_values = 231 * 2 * 80 * 8 * 128
    numbers = (80 * layer + keys_and_values) / ranks + head
    seconds = 2 * numbers / 4.3e12  # bytes that an H200 reads in a second
    plans = [StepPlan(step=0, rows=[0], positions=[230], counts=[1], samples=[True])] * 3
    found = SimpleNamespace(plans=plans, seconds=6 * seconds)  # twice the limit
    bench = SimpleNamespace(
        measure=lambda work: found,
        loop=SimpleNamespace(info=SimpleNamespace(weight_bytes=3 * 2**30)),
    )
    work = SimpleNamespace(name="1")
    limited = benchmark["limit_spec"](whole, ranks)
    benchmark["print_row"](bench, limited, "llama3-70b", ranks, "cuda", work, 7.0)
    shape, number, rows, step, limit, share, size, ready = capsys.readouterr().out.split()
    assert (shape, number, rows, size, ready) == ("llama3-70b", str(ranks), "1", "3.0", "7.0")
    assert float(limit) == pytest.approx(seconds * 1e3, rel=1e-3)
    assert float(step) == pytest.approx(2 * seconds * 1e3, abs=1e-3)
    assert share == "50%"


@pytest.mark.slow
def test_the_benchmark_of_ranks_times_sums_of_two_processes():
    command = [sys.executable, str(BENCHMARKS / "ranks.py"), "--sums", "--shape", "tiny"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in printed.splitlines() if " gloo " in line]
    assert [row[2] for row in rows] == ["1", "8", "32", "128", "8192"]
    assert all(float(row[4]) > 0 for row in rows)

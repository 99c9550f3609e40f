"""The commands that send requests, against a real server with a real engine."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import CACHE_TOKENS, RealServer, build_engine, write_model, write_repository
from tiny_hf_folder import END, VOCABULARY, greedy_text, save_model

from slipstream.bench import core_model
from slipstream.cli.commands import run_command
from slipstream.repository.releases.render import render_template

STREAMING = "streaming_llm"
PROMPT = "What is ML?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama", num_key_value_heads=4)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """The ensemble and tensorrt_llm answer once; streaming_llm and the BLS model stream."""
    folder = tmp_path_factory.mktemp("served")
    engine = build_engine(model, folder / "engine")
    repository = write_repository(
        folder / "models",
        "inflight_batcher_llm",
        "v0.10",
        engine,
        decoupled_mode="False",
        max_beam_width="3",
    )
    template = render_template("inflight_batcher_llm", "tensorrt_llm", "v0.10")
    write_model(
        repository / STREAMING,
        template.replace('"tensorrt_llm"', f'"{STREAMING}"'),
        {
            "engine_dir": str(engine),
            "decoupled_mode": "True",
            "max_tokens_in_paged_kv_cache": str(CACHE_TOKENS),
        },
    )
    text_model = repository / "tensorrt_llm_bls" / "config.pbtxt"
    text_model.write_text(text_model.read_text().replace("decoupled: False", "decoupled: True"))
    with pytest.MonkeyPatch.context() as environment:
        # the key of the server and of every command here
        environment.setenv("SLIPSTREAM_API_KEY", "open sesame")
        started = RealServer(repository, folder / "run").wait()
        yield started
        started.close()


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    return greedy_text(model, PROMPT, 20, special=True, dtype="float32")


def ask(capsys: pytest.CaptureFixture[str], name: str, *arguments: object, code: int = 0) -> str:
    assert run_command(name, [str(argument) for argument in arguments]) == code, capsys.readouterr()
    return capsys.readouterr().out


class TestClient:
    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize("own_tokenizer", [False, True])
    def test_prints_the_answer_and_its_ids(
        self,
        server: RealServer,
        model: Path,
        expected: str,
        capsys: pytest.CaptureFixture[str],
        streaming: bool,
        own_tokenizer: bool,
    ) -> None:
        flags = ["-S", "--model-name", STREAMING] if streaming else []
        flags += ["--tokenizer-dir", str(model)] if own_tokenizer else []
        printed = ask(
            capsys,
            "client",
            "-u",
            server.grpc,
            "--text",
            PROMPT,
            "--request-output-len",
            20,
            *flags,
        )
        assert (
            f"Got completed request\nInput: {PROMPT}\nOutput beam 0: {expected}\nOutput sequence:  ["
            in printed
        )
        before, after = (
            json.loads(line.partition(":")[2])
            for line in printed.splitlines()
            if "sequence: " in line
        )
        assert after[: len(before)] == before
        assert len(after) == len(before) + 20

    def test_a_decoupled_model_gets_a_hint_to_stream(
        self, server: RealServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        printed = ask(
            capsys, "client", "-u", server.grpc, "--model-name", STREAMING, "--text", PROMPT, code=1
        )
        assert printed.splitlines()[-1].endswith(
            "decoupled transaction policy; ask for a stream with --streaming"
        )

    def test_checks_the_answer_against_a_file(
        self, server: RealServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "in.csv").write_text("96,35,80,83,79\n")
        words = [
            "-u",
            server.grpc,
            "--input-tokens-csv",
            tmp_path / "in.csv",
            "--end-id",
            END,
            "--pad-id",
            END,
            "--request-output-len",
            6,
            "--check-output",
            "--output-tokens-csv",
            tmp_path / "out.csv",
        ]
        (tmp_path / "out.csv").write_text("1,2,3,4,5,6\n")
        printed = ask(capsys, "client", *words, code=1)
        assert printed.endswith("FAIL!\n")
        actual = json.loads(
            next(line for line in printed.splitlines() if "actual" in line).partition("=")[2]
        )
        with (tmp_path / "out.csv").open("w", newline="") as file:
            csv.writer(file).writerow(actual)
        assert ask(capsys, "client", *words).endswith("PASS!\n")
        with (tmp_path / "out.csv").open("w", newline="") as file:
            csv.writer(file).writerow([*actual[:3], 0, 0, 0])
        assert ask(capsys, "client", *words, "--correctness-threshold", 0.5).endswith("PASS!\n")

    def test_prints_log_probabilities(
        self, server: RealServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        printed = ask(
            capsys, "client", "-u", server.grpc, "--return-log-probs", "--request-output-len", 5
        )
        assert "cum_log_probs.shape: (1, 1)\n" in printed
        assert "output_log_probs.shape: (1, 1, 5)\n" in printed

    def test_prints_every_beam(
        self, server: RealServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        printed = ask(capsys, "client", "-u", server.grpc, "--request-output-len", 5, "-b", 3)
        answers = [
            line.partition(": ")[2]
            for line in printed.splitlines()
            if line.startswith("Output beam ")
        ]
        assert len(set(answers)) == 3

    def test_prints_logits(self, server: RealServer, capsys: pytest.CaptureFixture[str]) -> None:
        flags = [
            "--return-context-logits",
            "--return-generation-logits",
            "--request-output-len",
            5,
            "--text",
            "abc",
        ]
        printed = ask(capsys, "client", "-u", server.grpc, *flags)
        assert f"context_logits.shape: (1, 4, {VOCABULARY})\n" in printed
        assert f"generation_logits.shape: (1, 1, 5, {VOCABULARY})\n" in printed

    def test_only_requested_outputs_are_returned(
        self, server: RealServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        outputs = ["--requested-outputs", "output_ids", "sequence_length"]
        assert "Output beam 0: " in ask(capsys, "client", "-u", server.grpc, *outputs)
        assert (
            run_command("client", ["-u", server.grpc, "--requested-outputs", "sequence_length"])
            == 1
        )

    @pytest.mark.parametrize("flags", [[], ["-S", "--model-name", STREAMING]])
    def test_a_stop_request_ends_the_answer_early(
        self, server: RealServer, capsys: pytest.CaptureFixture[str], flags: list[str]
    ) -> None:
        printed = ask(
            capsys,
            "client",
            "-u",
            server.grpc,
            "--stop-after-ms",
            20,
            "--request-output-len",
            450,
            *flags,
        )
        before, after = (
            json.loads(line.partition(":")[2])
            for line in printed.splitlines()
            if "sequence: " in line
        )
        assert len(after) - len(before) < 450
        if not flags:
            assert "Got cancellation response from server\nGot completed request\n" in printed

    @pytest.mark.parametrize("flags", [[], ["-S", "--model-name", STREAMING]])
    def test_a_cancelled_call_is_reported_as_cancelled(
        self, server: RealServer, capsys: pytest.CaptureFixture[str], flags: list[str]
    ) -> None:
        words = [
            "-u",
            server.grpc,
            "--stop-after-ms",
            20,
            "--stop-via-request-cancel",
            "--request-output-len",
            450,
        ]
        assert ask(capsys, "client", *words, *flags).endswith("Request is cancelled\n")

    def test_compression_and_a_timeout_are_used(
        self, server: RealServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "Output beam 0: " in ask(capsys, "client", "-u", server.grpc, "-C", "gzip")
        words = [
            "-u",
            server.grpc,
            "-S",
            "--model-name",
            STREAMING,
            "-t",
            0.01,
            "--request-output-len",
            450,
        ]
        assert "Deadline Exceeded" in ask(capsys, "client", *words, code=1)

    def test_without_a_server_the_error_is_one_line(
        self, capsys: pytest.CaptureFixture[str], model: Path
    ) -> None:
        printed = ask(capsys, "client", "-u", "localhost:1", "--tokenizer-dir", model, code=1)
        assert printed.splitlines()[-1].startswith(
            "Encountered error: no server answers gRPC at localhost:1; start"
        )


@pytest.mark.parametrize(
    "words",
    [
        ["config", "-m", "ensemble", "-i", "grpc"],
        ["config", "-m", "ensemble", "-i", "http"],
        ["client"],
        ["bench", "-m", "ensemble"],
        ["perf-analyzer", "-m", "ensemble", "-i", "http"],
        ["end-to-end-client", "-p", "x"],
    ],
)
def test_a_command_without_the_key_is_refused(
    server: RealServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    monkeypatch.delenv("SLIPSTREAM_API_KEY")
    code = run_command(
        words[0], [*words[1:], "-u", server.http if "http" in words else server.grpc]
    )
    # the old client exits with 0 on errors
    assert code == (0 if words[0] == "end-to-end-client" else 1)
    assert "key" in "".join(capsys.readouterr())


class TestTextClient:
    def test_prompts_can_be_sent_singly_in_a_batch_and_streamed(
        self, server: RealServer, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        answers = [
            greedy_text(model, prompt, 6, special=True, dtype="float32")
            for prompt in ("abc", "Hello")
        ]
        whole = ["abc" + answers[0], "Hello" + answers[1]]
        words = ["-u", server.grpc, "-o", 6, "-p", "abc", "Hello"]
        assert ask(capsys, "end-to-end-client", *words) == f"{whole[0]}\n{whole[1]}\n"
        assert ask(capsys, "end-to-end-client", *words, "--batch-inputs") == f"{whole}\n"
        streamed = [
            "--model-name",
            "tensorrt_llm_bls",
            "-S",
            "--check-outputs",
            "--expected-outputs",
            *answers,
        ]
        assert (
            ask(capsys, "end-to-end-client", *words, *streamed) == f"{answers[0]}\n{answers[1]}\n"
        )
        wrong = ["--check-outputs", "--expected-outputs", "x"]
        assert "expected ['x'], got" in ask(capsys, "end-to-end-client", *words, *wrong, code=1)

    def test_a_draft_model_proposes_tokens_for_a_target_model(
        self, server: RealServer, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--url-target", server.grpc, "-o", 20, "--num-draft-tokens", 4, "-p", PROMPT]
        expected = greedy_text(model, PROMPT, 20, special=True, dtype="float32")
        assert ask(capsys, "speculative-client", *words) == f"Final text:\n{PROMPT}{expected}\n"
        stop = expected[7]
        ended = ask(capsys, "speculative-client", *words, "--stop-words", stop).removeprefix(
            "Final text:\n"
        )
        assert ended.rstrip("\n") == PROMPT + expected[: expected.index(stop) + 1]


class TestTritonCli:
    @pytest.mark.parametrize("protocol", ["http", "grpc"])
    def test_status_and_config(
        self, server: RealServer, capsys: pytest.CaptureFixture[str], protocol: str
    ) -> None:
        address = ["-i", protocol, "-u", server.http if protocol == "http" else server.grpc]
        assert json.loads(ask(capsys, "status", "--json", *address)) == {
            "live": True,
            "ready": True,
        }
        first, headings, *models = ask(capsys, "status", *address).splitlines()
        name = "slipstream" if protocol == "http" else "triton"
        assert re.fullmatch(
            rf"{name} [\d.]+\w* at localhost:\d+: ready, up .+ \(process \d+\)", first
        )
        assert headings.split() == ["MODEL", "VERSION", "STATE"]
        assert ["ensemble", "1", "READY"] in [model.split() for model in models]
        assert json.loads(ask(capsys, "status", "--config", "ensemble", *address)) == json.loads(
            ask(capsys, "config", "-m", "ensemble", *address)
        )
        config = json.loads(ask(capsys, "config", "-m", "ensemble", *address))
        assert config["platform"] == "ensemble"
        assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == [
            "preprocessing",
            "tensorrt_llm",
            "postprocessing",
        ]
        assert run_command("config", ["-m", "nothing", *address]) == 1
        assert "error: Request for unknown model: 'nothing' is not found" in capsys.readouterr().err

    def test_metrics_count_requests(
        self, server: RealServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        document = json.loads(ask(capsys, "metrics", "-u", server.metrics))
        same = json.loads(ask(capsys, "status", "--metrics", "-u", server.metrics))
        assert same.keys() == document.keys()
        family = document["nv_inference_request_success"]
        assert (family["type"], family["unit"]) == ("counter", "")
        assert {entry["name"] for entry in family["metrics"]} == {
            "nv_inference_request_success_total"
        }
        assert {entry["labels"]["model"] for entry in family["metrics"]} >= {
            "ensemble",
            "tensorrt_llm",
            STREAMING,
        }


class TestLoad:
    def test_genai_perf_with_the_flags_of_the_tutorial(
        self,
        server: RealServer,
        model: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        printed = ask(
            capsys,
            "genai-perf",
            "-m",
            "ensemble",
            "--service-kind",
            "triton",
            "--backend",
            "tensorrtllm",
            "--num-prompts",
            10,
            "--random-seed",
            123,
            "--synthetic-input-tokens-mean",
            20,
            "--synthetic-input-tokens-stddev",
            0,
            "--output-tokens-mean",
            8,
            "--output-tokens-stddev",
            0,
            "--output-tokens-mean-deterministic",
            "--tokenizer",
            model,
            "--concurrency",
            1,
            "--measurement-interval",
            100,
            "--profile-export-file",
            "my_profile_export.json",
            "--url",
            server.grpc,
        )
        rows = {
            line.split("│")[1].strip(): line.split("│")[2].strip()
            for line in printed.splitlines()
            if "│" in line
        }
        # the answer holds the prompt: excluding it was not requested
        assert rows["Output sequence length"] == "28.00"
        assert rows["Input sequence length"] == "20.00"
        assert "Time to first token (ms)" not in rows
        folder = tmp_path / "artifacts" / "ensemble-triton-tensorrtllm-concurrency1"
        assert sorted(path.name for path in folder.iterdir()) == [
            "llm_inputs.json",
            "my_profile_export.json",
            "profile_export_genai_perf.csv",
            "profile_export_genai_perf.json",
        ]
        report = json.loads((folder / "profile_export_genai_perf.json").read_text())
        export = json.loads((folder / "my_profile_export.json").read_text())["experiments"][0]
        latencies = [
            (one["response_timestamps"][-1] - one["timestamp"]) / 1e6 for one in export["requests"]
        ]
        assert report["request_latency"]["avg"] == pytest.approx(sum(latencies) / len(latencies))
        assert {one["request_inputs"]["max_tokens"] for one in export["requests"]} == {8}
        assert {one["request_inputs"]["min_length"] for one in export["requests"]} == {8}
        assert (
            (folder / "profile_export_genai_perf.csv")
            .read_text()
            .startswith("Metric,avg,min,max,p99,p95,p90,")
        )

    def test_bench_measures_streams_with_the_servers_tokenizer(
        self, server: RealServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = [
            "-m",
            "tensorrt_llm_bls",
            "-u",
            server.grpc,
            "--isl",
            12,
            "--osl",
            60,
            "--request-count",
            4,
            "--num-prompts",
            2,
            "--concurrency",
            2,
            "--artifact-dir",
            tmp_path,
        ]
        printed = ask(capsys, "bench", *words, "--streaming", "--extra-inputs", "temperature:0")
        rows = {
            line.split("│")[1].strip(): line.split("│")[2].strip()
            for line in printed.splitlines()
            if "│" in line
        }
        assert rows["Input sequence length"] == "12.00"
        assert rows["Output sequence length"] == "60.00"
        folder = tmp_path / "tensorrt_llm_bls-triton-tensorrtllm-concurrency2"
        export = json.loads((folder / "profile_export.json").read_text())
        requests = export["experiments"][0]["requests"]
        assert len(requests) == 4
        assert all(request["response_timestamps"] for request in requests)
        firsts = [
            (request["response_timestamps"][0] - request["timestamp"]) / 1e6 for request in requests
        ]
        assert float(rows["Time to first token (ms)"]) == pytest.approx(sum(firsts) / 4, abs=0.01)
        assert "Inter token latency (ms)" in rows

    def test_an_http_port_given_as_grpc_is_an_error(
        self, server: RealServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_command("status", ["-i", "grpc", "-u", server.http]) == 1
        problem = (
            f"the server at {server.http} does not speak gRPC; give its gRPC port (8001 by default)"
        )
        assert capsys.readouterr().err == f"error: {problem}\n"

    def test_several_concurrencies_are_measured_and_plotted(
        self, server: RealServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = [
            "-m",
            "tensorrt_llm_bls",
            "-u",
            server.grpc,
            "--isl",
            12,
            "--osl",
            8,
            "--request-count",
            4,
            "--streaming",
            "--generate-plots",
            "--artifact-dir",
            tmp_path,
        ]
        printed = ask(capsys, "bench", *words, "--concurrency", "1,3")
        name = "tensorrt_llm_bls-triton-tensorrtllm-concurrency"
        for load in (1, 3):
            export = json.loads((tmp_path / f"{name}{load}" / "profile_export.json").read_text())[
                "experiments"
            ][0]
            assert (export["experiment"], len(export["requests"])) == (
                {"mode": "concurrency", "value": load},
                4,
            )
        page = tmp_path / f"{name}1,3.html"
        assert f"[INFO] Plots: {page}" in printed.splitlines()
        text = page.read_text()
        shown = ("1 in flight", "3 in flight", "Time to first token", "Effect of load")
        assert [words for words in shown if words not in text] == []
        printed = ask(capsys, "bench", *words)
        assert f"[INFO] Plots: {tmp_path / f'{name}1' / 'plots.html'}" in printed.splitlines()

    @pytest.mark.parametrize("protocol", ["http", "grpc"])
    def test_perf_analyzer_on_generated_data(
        self,
        server: RealServer,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        protocol: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        address = ["-i", protocol, "-u", server.http if protocol == "http" else server.grpc]
        ask(capsys, "gpt-input-data", "--num_samples", 20)
        printed = ask(
            capsys,
            "perf-analyzer",
            "-m",
            "tensorrt_llm",
            "-b",
            4,
            "--input-data",
            "input_data.json",
            "--concurrency-range",
            "1:4:2",
            "--request-count",
            5,
            "-f",
            "levels.csv",
            *address,
        )
        lines = printed.splitlines()
        assert lines.count("    Inference count: 20") == 2
        assert lines.count("    Successful request count: 5") == 2
        with (tmp_path / "levels.csv").open() as file:
            levels = list(csv.DictReader(file))
        assert [level["Concurrency"] for level in levels] == ["1", "3"]
        assert all(float(level["Server Compute Infer"]) > 0 for level in levels)
        assert lines[-3] == "Inferences/Second vs. Client Average Batch Latency"
        assert [line.split(",")[0] for line in lines[-2:]] == ["Concurrency: 1", "Concurrency: 3"]
        assert lines.count("    Request count: 5") == 2

    def test_unsupported_bench_flags_are_refused_by_name(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for flags, name in (
            (["--service-kind", "openai"], "--service-kind openai needs --endpoint-type chat or"),
            (["--endpoint", "v1/x"], "--endpoint needs --endpoint-type chat or completions"),
            (
                ["--endpoint-type", "chat", "--service-kind", "triton"],
                "--endpoint-type chat needs --service-kind openai",
            ),
            (["--", "--collect-metrics"], "--collect-metrics after -- is not available here"),
            (["--", "--shape", "x:1"], "--shape after -- is not available here"),
            (["--", "-i", "http"], "-i http after --: only grpc is measured here"),
            (["--", "--request-rate-range=1:3"], "--request-rate-range after -- takes one rate"),
        ):
            assert run_command("bench", ["-m", "x", *flags]) == 1
            assert f"error: {name}" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("loads", "problem"),
        [
            ("1,0", "must be a whole number of at least 1, not '0'"),
            ("many", "must be a whole number"),
            ("2,2", "must hold each number once, not 2,2"),
        ],
    )
    def test_invalid_concurrencies_are_refused(
        self, capsys: pytest.CaptureFixture[str], loads: str, problem: str
    ) -> None:
        with pytest.raises(SystemExit):
            run_command("bench", ["-m", "x", "--concurrency", loads])
        assert f"error: argument --concurrency: {problem}" in capsys.readouterr().err


class TestTools:
    @pytest.fixture(autouse=True)
    def short_warm_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Shorten the warm-up, whose length matters for figures only."""
        monkeypatch.setattr(core_model, "WARM_UP_LENGTH", 2)

    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Path:
        items = [
            {"input": word, "instruction": "Say more", "output": "one two three"}
            for word in ("a", "bc", "def")
        ]
        (tmp_path / "data.json").write_text(json.dumps(items))
        return tmp_path / "data.json"

    @pytest.mark.parametrize("protocol", ["http", "grpc"])
    def test_end_to_end(
        self, server: RealServer, dataset: Path, capsys: pytest.CaptureFixture[str], protocol: str
    ) -> None:
        url = server.http if protocol == "http" else server.grpc
        words = ["--dataset", dataset, "-i", protocol, "-u", url, "--return-log-probs"]
        printed = ask(capsys, "end-to-end-test", *words)
        assert printed.startswith(
            "[INFO] Functionality test succeed.\n[INFO] Warm up for benchmarking.\n"
            "[INFO] Start benchmarking on 3 prompts.\n[INFO] Total Latency: "
        )

    @pytest.mark.parametrize(
        "workload",
        [
            ["dataset", "--tokenizer_type", "auto"],
            [
                "token_norm_dist",
                "--input_mean",
                "12",
                "--input_stdev",
                "2",
                "--output_mean",
                "5",
                "--output_stdev",
                "1",
            ],
            ["token-from-histogram", "--histogram-key", "example"],
        ],
    )
    def test_core_model_benchmarks(
        self,
        server: RealServer,
        model: Path,
        dataset: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        workload: list[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        extra = ["--dataset", dataset, "--tokenizer_dir", model] if workload[0] == "dataset" else []
        words = [
            "-i",
            "grpc",
            "-u",
            server.grpc,
            "--request_rate",
            "200",
            *workload,
            *extra,
            "--num_requests",
            "3",
            "--max-input-len",
            "64",
            "--op-stats-csv",
            "stats.csv",
            "--dump-perfetto-trace",
        ]
        printed = ask(capsys, "benchmark-core-model", *words)
        cells = [
            [cell.strip() for cell in line.split("|")[1:3]]
            for line in printed.splitlines()
            if "|" in line
        ]
        assert [cell[0] for cell in cells] == [
            "Stat",
            "Requests/Sec",
            "OP tokens/sec",
            "Avg. latency (ms)",
            "P99 latency (ms)",
            "P90 latency (ms)",
            "Avg. IP tokens per request",
            "Avg. OP tokens per request",
            "Total latency (ms)",
            "Total requests",
        ]
        assert cells[-1][1] == "3.00"
        with (tmp_path / "stats.csv").open() as file:
            row = next(csv.DictReader(file))
        assert float(row["Total requests"]) == 3
        events = json.loads((tmp_path / "prfetto_dump.json").read_text())["traceEvents"]
        assert len(events) == 3
        total = sum(event["args"]["output_tokens"] for event in events)
        assert float(row["Avg. OP tokens per request"]) == pytest.approx(total / 3, abs=0.01)

    def test_decoupled_models_and_reference_figures(
        self, server: RealServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "reference.json").write_text(
            json.dumps(
                {
                    "good": {"Total requests": 4, "Avg. OP tokens per request": 5},
                    "bad": {"Total requests": 400},
                }
            )
        )
        words = [
            "-i",
            "grpc",
            "-u",
            server.grpc,
            "--decoupled",
            "--tensorrt-llm-model-name",
            STREAMING,
            "--check-perf-json",
            tmp_path / "reference.json",
            "--check-perf-atol",
            "0.1",
            "token-norm-dist",
            "--input-mean",
            "8",
            "--input-stdev",
            "0",
            "--output-mean",
            "5",
            "--output-stdev",
            "0",
            "--num-requests",
            "4",
        ]
        ask(capsys, "benchmark-core-model", "--check-perf-key", "good", *words)
        printed = ask(capsys, "benchmark-core-model", "--check-perf-key", "bad", *words, code=1)
        assert "[ERROR] Total requests is 4.0, which is not near 400.0\n" in printed

    def test_identity_test_measures_each_interval(
        self, server: RealServer, model: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        printed = ask(
            capsys,
            "identity-test",
            "-i",
            "grpc",
            "-u",
            server.grpc,
            "--dataset",
            dataset,
            "--tokenizer_dir",
            model,
            "--max_input_len",
            64,
            "--time_bet_reqs",
            0,
            2,
        )
        assert printed.count("[INFO] Start benchmarking on 3 prompts.") == 2

"""`slipstream start`: its options. tests/server/test_lifecycle.py tests the serving."""

from dataclasses import fields
from pathlib import Path

import pytest
from command_line import run_cli

from slipstream.cli import start as start_module
from slipstream.cli.start import REASONING_PARSERS
from slipstream.engine.settings import EngineSettings
from slipstream.server import lifecycle
from slipstream.server.openai.answers.reasoning import REASONING_FORMATS
from slipstream.server.text.chat import ChatOptions


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def served(monkeypatch):
    """Replace the server and return a list of the options it is called with."""
    seen = []

    def run_server(options):
        seen.append(options)
        return 0

    monkeypatch.setattr(lifecycle, "run_server", run_server)
    return seen


@pytest.fixture
def imports(monkeypatch):
    """Replace the import process; keep its commands and choose its exit code."""
    seen = {"commands": [], "code": 0}

    def call(arguments, environment):
        seen["commands"].append(arguments[1:])
        return seen["code"]

    monkeypatch.setattr(start_module, "run_part", call)
    return seen


def test_default_ports_are_tritons_on_the_loopback_address(home, served):
    result = run_cli(["start", "--repo", "/some/models"])
    assert result.exit_code == 0
    (options,) = served
    assert options.repositories == (Path("/some/models"),)
    assert [
        (port.address, port.number, port.open)
        for port in (options.http, options.grpc, options.metrics)
    ] == [
        ("127.0.0.1", 8000, True),
        ("127.0.0.1", 8001, True),
        ("127.0.0.1", 8002, True),
    ]
    assert options.exit_timeout_seconds == 30
    assert options.engine_settings == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], [(9000, True), (9000, False), (9000, False)]),
        (["--http-port=1", "--grpc-port=0"], [(1, True), (0, True), (9000, False)]),
    ],
)
def test_the_openai_frontend_listens_for_http_only(home, served, given, expected):
    result = run_cli(["start", "--repo", "/x", "--frontend", "openai", *given], "triton")
    assert result.exit_code == 0
    (options,) = served
    ports = [(port.number, port.open) for port in (options.http, options.grpc, options.metrics)]
    assert ports == expected
    assert options.http_metrics
    assert options.chat == ChatOptions()


def test_a_chat_template_comes_from_a_tokenizer_that_has_one(home, served, tmp_path):
    config = tmp_path / "tokenizer_config.json"
    words = ["start", "--repo", "/x", "--openai-chat-template-tokenizer", tmp_path]
    config.write_text('{"chat_template": "{{ messages }}"}')
    assert run_cli(words).exit_code == 0
    assert served[0].chat == ChatOptions(tmp_path)
    config.write_text("{}")
    result = run_cli(words)
    assert (result.exit_code, len(served)) == (1, 1)
    assert result.output == (
        f"error: --openai-chat-template-tokenizer {tmp_path}: the tokenizer has no chat template\n"
    )


def test_parsers_of_calls_and_reasoning_can_be_chosen(home, served):
    words = ["start", "--repo", "/x", "--tool-call-parser", "hermes", "--reasoning-parser", "none"]
    assert run_cli(words).exit_code == 0
    assert served[0].chat == ChatOptions(None, "hermes", "none")
    names = [name for reasoning in REASONING_FORMATS for name in reasoning.names]
    assert (*names, "none") == REASONING_PARSERS
    assert "invalid choice" in run_cli([*words[:3], "--tool-call-parser", "none"]).output


def test_an_image_is_accepted_as_in_triton_cli(home, served):
    assert run_cli(["start", "--repo", "/x", "--image", "nvcr.io/x:24.04"]).exit_code == 0


@pytest.mark.parametrize(("option", "transport"), [([], "core"), (["--grpc-transport=aio"], "aio")])
def test_the_grpc_transport_can_be_chosen(home, served, option, transport):
    assert run_cli(["start", "--repo", "/x", *option]).exit_code == 0
    assert served[0].grpc_settings == {"transport": transport}


@pytest.mark.parametrize(
    ("option", "count"), [([], 0), (["--frontends=auto"], 0), (["--frontends", "3"], 3)]
)
def test_the_number_of_server_processes_can_be_chosen(home, served, option, count):
    assert run_cli(["start", "--repo", "/x", *option]).exit_code == 0
    assert served[0].frontends == count


@pytest.mark.parametrize("value", ["0", "-1", "abc", "1.5", "10000", ""])
def test_a_wrong_number_of_server_processes_is_one_error_line(home, served, value):
    result = run_cli(["start", "--repo", "/x", f"--frontends={value}"])
    assert (result.exit_code, served) == (2, [])
    assert result.output == (
        f"error: argument --frontends: must be auto or 1 to 64, not '{value}' "
        "(see slipstream start --help)\n"
    )


@pytest.mark.parametrize("spelling", ["--repo", "--model-repository", "--model-store"])
@pytest.mark.parametrize("joined", [True, False])
def test_every_repository_option_is_accepted(home, served, spelling, joined):
    arguments = [f"{spelling}=/x"] if joined else [spelling, "/x"]
    assert run_cli(["start", *arguments]).exit_code == 0
    assert served[0].repositories == (Path("/x"),)


def test_a_repository_in_an_unknown_home_is_refused(home, served):
    result = run_cli(["start", "--repo", "~no.such.user/x"])
    assert (result.exit_code, served) == (1, [])
    assert (
        result.output
        == "error: --repo ~no.such.user/x: the home folder that it begins with is not known here\n"
    )


def test_help_mentions_models():
    assert "Serve a model repository or one model." in run_cli(["start", "--help"]).output


def test_overrides_reach_the_engine_and_its_supervisor(home, served):
    given = [
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--watchdog-secs",
        "5",
        "--server-timeout",
        "7",
        "--target-itl-ms",
        "40",
    ]
    run_cli(["start", "--repo", "/x", *given])
    assert served[0].engine_settings == {
        "dtype": "float32",
        "device": "cpu",
        "target_itl_ms": 40.0,
    }
    assert (served[0].supervision.silence_seconds, served[0].supervision.start_seconds) == (5, 7)


def test_embeddings_and_metrics_on_the_http_port_are_off_by_default(home, served):
    run_cli(["start", "--repo", "/x"])
    run_cli(["start", "--repo", "/x", "--embeddings", "mean", "--http-metrics"])
    found = [(options.embedding_pooling, options.http_metrics) for options in served]
    assert found == [("", False), ("mean", True)]
    refused = run_cli(["start", "--repo", "/x", "--embeddings", "max"])
    assert refused.exit_code == 2
    assert "choose from" in refused.output


def test_without_a_repository_the_default_model_is_imported_first(home, served, imports):
    result = run_cli(["start"])
    assert result.exit_code == 0
    assert imports["commands"] == [
        [
            "-P",
            "-m",
            "slipstream.cli.models.import_model",
            "smollm2-135m",
            str(home / "models"),
        ]
    ]
    assert served[0].repositories == (home / "models",)
    assert "smollm2-135m" in result.output


def test_an_existing_repository_is_served_without_an_import(home, served, imports):
    (home / "models" / "mine").mkdir(parents=True)
    (home / "models" / "mine" / "config.pbtxt").touch()
    assert run_cli(["start"]).exit_code == 0
    assert imports["commands"] == []


def test_a_failed_import_ends_with_a_remedy(home, served, imports):
    imports["code"] = 1
    result = run_cli(["start"])
    assert result.exit_code == 1
    assert served == []
    assert "slipstream import -m NAME --source PATH" in result.output.splitlines()[-1]


def test_a_failed_start_is_one_error_line_with_exit_code_1(home, monkeypatch):
    def run_server(options):
        raise lifecycle.StartFailed("the cause; the remedy")

    monkeypatch.setattr(lifecycle, "run_server", run_server)
    result = run_cli(["start", "--repo", "/x"])
    assert result.exit_code == 1
    assert result.output == "error: the cause; the remedy\n"


@pytest.mark.parametrize("option", ["--watchdog-secs", "--server-timeout", "--exit-timeout-secs"])
def test_negative_seconds_are_refused(home, served, option):
    result = run_cli(["start", "--repo", "/some/models", option, "-1"])
    assert (result.exit_code, served) == (2, [])
    assert option in result.output


def test_trace_config_works_as_for_tritonserver(home, served, tmp_path):
    given = ["level=TIMESTAMPS", "rate=7", f"triton,file={tmp_path}/trace.json"]
    options = [word for text in given for word in ("--trace-config", text)]
    assert run_cli(["start", "--repo", "/x", *options]).exit_code == 0
    assert served[0].trace_settings == {
        "trace_file": f"{tmp_path}/trace.json",
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "7",
    }
    assert served[0].trace_export is None
    options = [
        "--trace-config=mode=opentelemetry",
        "--trace-config=opentelemetry,url=http://collector:1/v1/traces",
    ]
    assert run_cli(["start", "--repo", "/x", *options]).exit_code == 0
    assert served[1].trace_export.url == "http://collector:1/v1/traces"
    result = run_cli(["start", "--repo", "/x", "--trace-config", "rate=often"])
    assert (result.exit_code, len(served)) == (1, 2)
    assert result.output == "error: --trace-config: rate must be a whole number, not 'often'\n"


def test_an_internal_error_of_the_server_keeps_its_traceback(home, monkeypatch):
    def run_server(options):
        raise ValueError("a mistake in the server")

    monkeypatch.setattr(lifecycle, "run_server", run_server)
    with pytest.raises(RuntimeError) as raised:
        run_cli(["start", "--repo", "/x"])
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["--max-batch-size", "8"], {"max_rows": 8}),
        (["--max_num_seqs=8"], {"max_rows": 8}),
        (["--max-seq-len", "4096"], {"max_sequence_tokens": 4096}),
        (["--max-model-len", "32k"], {"max_sequence_tokens": 32_000}),
        (["--max-num-tokens", "2K"], {"step_tokens": 2048}),
        (["--max-num-batched-tokens", "100"], {"step_tokens": 100}),
        (["--kv-cache-free-gpu-mem-fraction", "0.5"], {"cache_memory_fraction": 0.5}),
        (["--kv_cache_free_gpu_memory_fraction", "1"], {"cache_memory_fraction": 1.0}),
        (["--gpu-memory-utilization", "0.45"], {"gpu_memory_utilization": 0.45}),
        (["--kv-cache-memory-bytes", "1.5G"], {"cache_bytes": 3 * 2**29}),
        (["--kv-cache-memory-bytes", "12345"], {"cache_bytes": 12345}),
        (["--kv-cache-dtype", "fp8"], {"cache_dtype": "fp8"}),
        (["--kv-cache-dtype", "auto"], {}),
        (["--no-enable-prefix-caching"], {"reuse": False}),
        (["--enable-kv-cache-reuse"], {"reuse": True}),
        (["--no-enable-chunked-prefill"], {"chunked": False}),
        (["--enable_chunked_context"], {"chunked": True}),
        (["--scheduler-policy", "max_utilization"], {"policy": "max_utilization"}),
        (["--batch-scheduler-policy=guaranteed_no_evict"], {"policy": "guaranteed_no_evict"}),
        (["--tensor-parallel-size", "2"], {"ranks": 2}),
        (["-tp", "2", "-dp", "3"], {"ranks": 2, "replicas": 3}),
        (["--data_parallel_size=2"], {"replicas": 2}),
        (["--pipeline-parallel-size", "1"], {}),
        (["--pipeline-parallel-size", "2"], {"ranks": 2}),
        (["--tensor-parallel-size=2", "-pp", "3"], {"ranks": 6}),
    ],
)
def test_flags_of_other_servers_override_engine_settings(home, served, flags, settings):
    assert run_cli(["start", "--repo", "/x", *flags]).exit_code == 0
    (options,) = served
    assert options.engine_settings == settings
    assert set(settings) <= {field.name for field in fields(EngineSettings)}


def test_pipeline_stages_are_explained_as_ranks(home, served):
    found = run_cli(["start", "--repo", "/x", "--tensor-parallel-size=2", "-pp", "2"])
    assert (
        "--pipeline-parallel-size 2: there are no pipeline stages; each engine runs with 4 "
        "tensor-parallel ranks"
    ) in found.output


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--max-batch-size", "0"], "--max-batch-size/--max-num-seqs: must be a whole number of "),
        (["--max-model-len", "4X"], "--max-seq-len/--max-model-len: must be a whole number of at "),
        (["--kv-cache-memory-bytes", "1.5"], "--kv-cache-memory-bytes: must be a whole number of "),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization: must be above 0 and at mos"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype: invalid choice: 'int8'"),
        (["--scheduler-policy", "fcfs"], "--scheduler-policy/--batch-scheduler-policy: invalid "),
        (["-q", "awq"], "--weight-only/--quantization/-q: invalid choice: 'awq'"),
        (["--weight-only", "int8"], "--weight-only int8 needs a MODEL to build"),
        (
            ["--gpu-memory-utilization", "0.9", "--kv-cache-free-gpu-mem-fraction", "0.9"],
            "--gpu-memory-utilization is a share of all GPU memory, --kv-cache-free-gpu-mem-frac",
        ),
        (
            ["--target-itl-ms", "20", "--no-enable-chunked-prefill"],
            "--target-itl-ms needs prompts in chunks: leave out --no-enable-chunked-prefill",
        ),
        (
            ["--device", "cpu", "--gpu-memory-utilization", "0.9"],
            "--gpu-memory-utilization has no effect on a CPU: use --kv-cache-memory-bytes",
        ),
    ],
)
def test_bad_values_are_one_line_that_names_the_flag(home, served, flags, error):
    result = run_cli(["start", "--repo", "/x", *flags])
    assert result.exit_code == 2
    assert error in result.stderr
    assert result.stderr.count("\n") == 1
    assert served == []

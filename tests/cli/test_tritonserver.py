"""The command `tritonserver`: flags, process name, log lines and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import tritonclient.grpc
from certificates import NEEDS_OPENSSL, make_certificate
from span_collector import Collector, attributes_of
from tiny_server import (
    HERE,
    MODEL,
    ROOT,
    children_of,
    command_of,
    is_running,
    make_repository,
    wait_for,
)
from tritonclient.utils import InferenceServerException

from slipstream.cli.commands import run_command
from slipstream.cli.compat import tritonserver
from slipstream.cli.compat.tritonserver_flags import FLAGS, FlagError, parse_flags
from slipstream.server.engine_link.launched import RANK_VARIABLES
from slipstream.server.grpc.options import GrpcOptions
from slipstream.server.tracing.export_settings import ExportSettings

SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from slipstream.server.engine_link import child as engine_child
engine_child.ENGINE_COMMAND = (sys.executable, {here!r} + "/scripted_engine.py")
from slipstream.cli.compat.tritonserver import main
main()
"""
OPENTELEMETRY = [
    "--model-repository=/a",
    "--trace-config=mode=opentelemetry",
    "--trace-config=level=TIMESTAMPS",
]
LAUNCHER = [
    "--model-control-mode=explicit",
    "--load-model=tensorrt_llm",
    "--grpc-port=8001",
    "--http-port=8000",
    "--metrics-port=8002",
    "--disable-auto-complete-config",
    "--backend-config=python,shm-region-prefix-name=prefix0_",
]


EXPECTED_ARGUMENTS = {
    "grpc.keepalive_time_ms": 1000,
    "grpc.keepalive_timeout_ms": 200,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 5,
    "grpc.http2.min_ping_interval_without_data_ms": 40,
    "grpc.http2.max_ping_strikes": 6,
    "grpc.max_connection_age_ms": 70,
    "grpc.max_connection_age_grace_ms": 80,
}


class Tritonserver:
    def __init__(self, folder: Path, *flags: str, engine: str = "fine", **environment: str) -> None:
        self.log = folder / "log.txt"
        (folder / "tmp").mkdir()
        repository = make_repository(folder, engine)
        script = SCRIPT.format(here=str(HERE))
        settings = (
            os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")} | environment
        )
        ports = [
            "--http-port",
            "0",
            "--grpc-port=0",
            "--metrics-port",
            "0",
            "--http-address=127.0.0.1",
        ]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script, f"--model-repository={repository}", *ports, *flags],
                env=settings,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait_started(self) -> Tritonserver:
        wait_for(
            lambda: (
                "Started Metrics Service" in self.log.read_text() or self.process.poll() is not None
            )
        )
        assert self.process.poll() is None, self.log.read_text()
        return self

    def place(self, service: str) -> str:
        line = next(line for line in self.lines if f"Started {service} at" in line)
        return line.rpartition(" ")[2]

    @property
    def url(self) -> str:
        return f"http://{self.place('HTTPService')}"

    def engines(self) -> list[int]:
        return [
            child
            for child in children_of(self.process.pid)
            if "scripted_engine" in command_of(child)
        ]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Tritonserver]]:
    servers: list[Tritonserver] = []

    def start(*flags: str, **more: str) -> Tritonserver:
        servers.append(Tritonserver(tmp_path, *flags, **more))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(30)


def generate(server: Tritonserver) -> httpx.Response:
    body = {"text_input": "5", "max_tokens": 3}
    return httpx.post(f"{server.url}/v2/models/{MODEL}/generate", json=body, timeout=30)


def test_the_process_is_named_tritonserver_and_exits_on_sigterm(
    serve: Callable[..., Tritonserver],
) -> None:
    server = serve("--id=mine", "--log-verbose=1", "--grpc-infer-thread-count=4").wait_started()
    assert Path(f"/proc/{server.process.pid}/comm").read_text() == "tritonserver\n"
    assert generate(server).json()["text_output"] == "6 7 8"
    assert httpx.get(f"{server.url}/v2").json()["name"] == "mine"
    started = [
        line.partition("] ")[2].partition(" at ")[0]
        for line in server.lines
        if "] Started " in line
    ]
    assert started == [
        "Started GRPCInferenceService",
        "Started HTTPService",
        "Started Metrics Service",
    ]
    assert any(
        line.split() == ["|", "Model", "|", "Version", "|", "Status", "|"] for line in server.lines
    )
    assert any(line.split() == ["|", MODEL, "|", "1", "|", "READY", "|"] for line in server.lines)
    assert (
        sum(
            "compatibility, without effect: --grpc-infer-thread-count" in line
            for line in server.lines
        )
        == 1
    )
    assert sum("without an API key" in line for line in server.lines) == 1  # gRPC is at 0.0.0.0
    (engine,) = server.engines()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert not is_running(engine)


def test_a_model_that_fails_to_load_ends_the_server_with_tritons_error(
    serve: Callable[..., Tritonserver],
) -> None:
    server = serve(engine="bad")
    assert server.process.wait(60) == 1
    assert server.lines[-1] == "error: creating server: Internal - failed to load all models"
    assert any(
        "UNAVAILABLE: Internal: ValueError: this engine folder is bad by order" in line
        for line in server.lines
    )


def test_exit_on_error_false_tolerates_a_model_that_fails_to_load(
    serve: Callable[..., Tritonserver],
) -> None:
    server = serve("--exit-on-error=false", engine="bad").wait_started()
    assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
    assert httpx.get(f"{server.url}/v2/health/ready").status_code == 400
    answer = generate(server)
    assert (answer.status_code, answer.json()) == (
        404,
        {"error": f"Request for unknown model: '{MODEL}' is not found"},  # its engine failed
    )


def test_explicit_control_loads_and_unloads_engines(serve: Callable[..., Tritonserver]) -> None:
    server = serve("--model-control-mode=explicit").wait_started()
    control = f"{server.url}/v2/repository"
    assert server.engines() == []
    assert httpx.post(f"{control}/index").json()[0] == {"name": MODEL}
    assert httpx.post(f"{control}/models/{MODEL}/load", timeout=60).status_code == 200
    (engine,) = server.engines()
    assert generate(server).json()["text_output"] == "6 7 8"
    assert httpx.post(f"{control}/models/{MODEL}/load", timeout=60).status_code == 200
    assert server.engines() == [engine]  # the engine is unchanged, so its process stays
    config = httpx.get(f"{server.url}/v2/models/tensorrt_llm/config").json()
    config["dynamic_batching"]["max_queue_delay_microseconds"] = 77
    body: dict[str, object] = {"parameters": {"config": json.dumps(config)}}
    assert httpx.post(f"{control}/models/tensorrt_llm/load", json=body, timeout=60).text == ""
    assert httpx.get(f"{server.url}/v2/models/tensorrt_llm/config").json() == config
    wait_for(lambda: not is_running(engine))
    (engine,) = server.engines()  # a new process, which the text model uses
    assert generate(server).json()["text_output"] == "6 7 8"
    body = {"parameters": {"unload_dependents": True}}
    assert httpx.post(f"{control}/models/{MODEL}/unload", json=body).status_code == 200
    assert server.engines() == [engine]  # the engine was loaded by its own name, too
    assert httpx.post(f"{control}/models/tensorrt_llm/unload").status_code == 200
    wait_for(lambda: not is_running(engine))
    assert generate(server).status_code == 404
    assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200
    assert httpx.post(f"{control}/models/{MODEL}/load", timeout=60).status_code == 200
    assert generate(server).json()["text_output"] == "6 7 8"


def test_log_file_receives_the_log(serve: Callable[..., Tritonserver], tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    server = serve(
        f"--log-file={file}",
        "--log-format=ISO8601",
        "--allow-grpc=false",
        "--allow-metrics",
        "false",
    )
    wait_for(lambda: file.exists() and "Started HTTPService" in file.read_text())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert "Started GRPC" not in file.read_text()
    assert "Started Metrics" not in file.read_text()
    assert server.lines == []


def test_a_rank_other_than_0_waits_and_starts_no_engine(serve: Callable[..., Tritonserver]) -> None:
    server = serve(OMPI_COMM_WORLD_RANK="1")
    comm = Path(f"/proc/{server.process.pid}/comm")
    wait_for(lambda: comm.read_text() == "tritonserver\n")
    wait_for(lambda: len(server.lines) > 0)
    assert children_of(server.process.pid) == []
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    (line,) = server.lines
    assert line.startswith("I")
    assert line.endswith(
        "] rank 1 of 2 from mpirun serves nothing and waits for a signal to end: rank 0 is the "
        "server, and it starts the ranks of its engines itself"
    )


def test_a_rank_of_an_unknown_number_is_refused(serve: Callable[..., Tritonserver]) -> None:
    server = serve(PMIX_RANK="0", PMIX_NAMESPACE="prterun-1@1")
    assert server.process.wait(30) == 1
    wait_for(lambda: len(server.lines) > 0)
    (line,) = server.lines
    assert "PMIX_RANK is 0, and nothing says how many processes were started" in line


# -- flags


def test_values_can_follow_an_equals_sign_or_a_space() -> None:
    joined = parse_flags(
        [*LAUNCHER, "--model-repository=/a", "--model-store=/b", "--strict-readiness=false"]
    )
    more = ["--model-repository", "/a", "--model-store", "/b", "--strict-readiness", "false"]
    apart = parse_flags([*(word for flag in LAUNCHER for word in flag.split("=", 1)), *more])
    assert joined.values == apart.values
    assert joined["model-repository"] == ["/a", "/b"]
    assert joined["disable-auto-complete-config"] is True
    assert joined.ignored == ["backend-config"]


@pytest.mark.parametrize(
    ("flags", "completes"),
    [
        ([], True),
        (["--disable-auto-complete-config"], False),
        (["--strict-model-config=true"], False),
        (["--strict-model-config=false"], True),
    ],
)
def test_flags_disable_auto_completion_of_configurations(flags: list[str], completes: bool) -> None:
    options = tritonserver.server_options(parse_flags(["--model-repository=/a", *flags]))
    assert options.complete_config is completes


@pytest.mark.parametrize(("flags", "served"), [([], False), (["--http-metrics"], True)])
def test_a_flag_serves_metrics_on_the_http_port(flags: list[str], served: bool) -> None:
    options = tritonserver.server_options(parse_flags(["--model-repository=/a", *flags]))
    assert options.http_metrics is served


@pytest.mark.parametrize(
    ("flags", "count"), [([], 0), (["--frontends=auto"], 0), (["--frontends=4"], 4)]
)
def test_a_flag_sets_the_number_of_server_processes(flags: list[str], count: int) -> None:
    options = tritonserver.server_options(parse_flags(["--model-repository=/a", *flags]))
    assert options.frontends == count


@pytest.mark.parametrize(("flags", "settings"), [([], {}), (["--ranks=2"], {"ranks": 2})])
def test_a_flag_sets_the_number_of_ranks(flags: list[str], settings: dict[str, int]) -> None:
    options = tritonserver.server_options(parse_flags(["--model-repository=/a", *flags]))
    assert options.engine_settings == settings


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--modle-repository=/a"],
            "unknown flag --modle-repository; did you mean --model-repository?",
        ),
        (["--zzz"], "unknown flag --zzz (tritonserver --help lists all flags)"),
        (["--http-por=1"], "unknown flag --http-por; did you mean --http-port?"),
        (["--http-port=x"], "--http-port must be a number, not 'x'"),
        (["--http-port"], "--http-port needs a value"),
        (["--exit-on-error=maybe"], "--exit-on-error must be true or false, not 'maybe'"),
        (["serve"], "unexpected argument 'serve'"),
    ],
)
def test_a_wrong_flag_is_one_error_line(flags: list[str], text: str) -> None:
    with pytest.raises(FlagError) as raised:
        parse_flags(flags)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "--model-repository is missing"),
        (["--model-repository=/a", "--ranks=0"], "--ranks must be at least 1, not 0"),
        (
            ["--model-repository=/a", "--model-control-mode=never"],
            "must be one of none, poll, explicit",
        ),
        (
            ["--model-repository=/a", "--load-model=x"],
            "only be given with --model-control-mode=explicit",
        ),
        (["--model-repository=/a", "--allow-sagemaker=true"], "is not supported"),
        (["--model-repository=/a", "--http-restricted-api=x:y=z"], "unknown API 'x'"),
        (["--model-repository=/a", "--http-header-forward-pattern=("], "is no regular expression"),
        (["--model-repository=/a", "--grpc-use-ssl=true"], "needs --grpc-server-cert"),
        (
            ["--model-repository=/a", "--grpc-transport=x"],
            "--grpc-transport must be one of core, aio, not 'x'",
        ),
        (
            ["--model-repository=/a", "--frontends=0"],
            "--frontends must be auto or 1 to 64, not '0'",
        ),
        (
            ["--model-repository=/a", "--trace-config=mode=zipkin"],
            "mode must be triton or opentelemetry, not 'zipkin'",
        ),
        (
            ["--model-repository=/a", "--trace-config=zipkin,url=x"],
            "the modes are triton and opentelemetry",
        ),
        (
            ["--model-repository=/a", "--trace-config=opentelemetry,url=x"],
            "'url' means nothing in the mode triton",
        ),
        (
            [*OPENTELEMETRY, "--trace-config=triton,file=/x"],
            "'file' means nothing in the mode opentelemetry",
        ),
        (
            [*OPENTELEMETRY, "--trace-config=opentelemetry,url=ftp://x"],
            "url must be http://<host>:<port>/v1/traces",
        ),
        (
            [*OPENTELEMETRY, "--trace-config=opentelemetry,url=http://a:b@c/v1"],
            "must not hold a name or a password",
        ),
        (
            [*OPENTELEMETRY, "--trace-config=opentelemetry,url=ftp://a:b@c:x"],
            "must not hold a name or a password",
        ),
        (
            [*OPENTELEMETRY, "--trace-config=opentelemetry,url=ftp://x?key=y"],
            "or the like, not 'ftp://x'\n",
        ),
        (
            [*OPENTELEMETRY, "--trace-config=opentelemetry,url=http://x/\x01"],
            "url must be http://<host>:<port>/v1/tr",
        ),
        (
            [*OPENTELEMETRY, "--trace-config=opentelemetry,resource=x"],
            "resource must be <name>=<value>, not 'x'",
        ),
        ([*OPENTELEMETRY, "--trace-config=opentelemetry,colour=red"], "unknown setting 'colour'"),
        (
            [*OPENTELEMETRY, "--trace-config=opentelemetry,bsp_schedule_delay=0"],
            "must be a whole number above 0",
        ),
        (
            [*OPENTELEMETRY, "--trace-config=opentelemetry,bsp_max_export_batch_size=4096"],
            "more than the bsp_max",
        ),
        (
            [*OPENTELEMETRY, "--trace-config=level=TENSORS"],
            "the mode opentelemetry has no level TENSORS",
        ),
        (
            ["--model-repository=/a", "--trace-config=level=TIMESTAMPS"],
            "trace file name is not given",
        ),
        (["--model-repository=/a", "--trace-config=level=LOUD"], "level must be one of"),
        (["--model-repository=/a", "--trace-config=triton,colour=red"], "unknown setting 'colour'"),
        (
            ["--model-repository=/a", "--trace-config=triton,rate=fast"],
            "rate must be a whole number",
        ),
        (
            ["--model-repository=/a", "--cache-config=redis,host=x"],
            "the only cache is 'local'",
        ),
        (["--model-repository=/a", "--cache-config=local,host=x"], "has no setting 'host'"),
        (["--model-repository=/a", "--rate-limit=always"], "must be off or execution_count"),
        (
            ["--model-repository=/a", "--rate-limit-resource=R1:3"],
            "needs --rate-limit=execution_count",
        ),
        (
            ["--model-repository=/a", "--rate-limit=execution_count", "--rate-limit-resource=R1"],
            "must be <name>:<count>[:<device>]",
        ),
        (
            ["--model-repository=/a", "--metrics-config=summary_latencies=maybe"],
            "must be true or false",
        ),
        (["--model-repository=/a", "--metrics-config=colour=red"], "unknown setting 'colour'"),
        (
            ["--model-repository=/a", "--metrics-config=summary_quantiles=2:0.1"],
            "a quantile is between 0 and 1",
        ),
    ],
)
def test_an_impossible_setting_exits_with_code_1(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert tritonserver.run(flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("tritonserver: error: ")
    assert text in error
    assert error.count("\n") == 1


def test_default_ports_and_addresses_are_tritons() -> None:
    options = tritonserver.server_options(
        parse_flags(["--model-repository=/a", "--http-address=10.0.0.1"])
    )
    assert [
        (port.address, port.number, port.open)
        for port in (options.http, options.grpc, options.metrics)
    ] == [
        ("10.0.0.1", 8000, True),
        ("0.0.0.0", 8001, True),
        ("10.0.0.1", 8002, True),
    ]
    assert (options.control_mode, options.exit_timeout_seconds, options.strict_readiness) == (
        "none",
        30.0,
        True,
    )
    assert (options.allow_python_models, options.allow_client_shared_memory) == (False, False)


def test_trace_cache_limiter_and_metrics_flags_reach_the_options(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    flags = [
        "--model-repository=/a",
        f"--trace-config=triton,file={file}",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=level=TENSORS",
        "--trace-config",
        "rate=7",
        "--trace-config=triton,log-frequency=3",
        "--cache-config=local,size=1048576",
        "--rate-limit=execution_count",
        "--rate-limit-resource=R1:4",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=summary_quantiles=0.5:0.05,0.9:0.01",
    ]
    given = parse_flags(flags)
    options = tritonserver.server_options(given)
    assert options.trace_settings == {
        "trace_file": str(file),
        "trace_level": ["TIMESTAMPS", "TENSORS"],
        "trace_rate": "7",
        "log_frequency": "3",
    }
    assert (options.response_cache_bytes, options.rate_limits) == (1048576, {("R1", "global"): 4})
    assert options.metrics_settings == {"summary_latencies": True, "summary_quantiles": (0.5, 0.9)}
    assert given.ignored == []
    older = ["--trace-file", str(file), "--trace-level=MAX", "--trace-rate=1", "--trace-count=5"]
    settings = tritonserver.server_options(
        parse_flags(["--model-repository=/a", *older])
    ).trace_settings
    assert settings == {
        "trace_file": str(file),
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "1",
        "trace_count": "5",
    }


def test_flags_and_variables_set_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    bare = tritonserver.server_options(parse_flags([*OPENTELEMETRY, "--trace-config=rate=0"]))
    assert bare.trace_settings == {"trace_level": ["TIMESTAMPS"], "trace_rate": "0"}
    assert bare.trace_export == ExportSettings()
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:9/base/",
        "OTEL_BSP_MAX_QUEUE_SIZE": "100",
        "OTEL_BSP_SCHEDULE_DELAY": "70",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tritonserver.server_options(parse_flags(OPENTELEMETRY)).trace_export == ExportSettings(
        url="https://collector:9/base/v1/traces", queue_spans=100, batch_spans=100, delay_ms=70
    )
    given = [
        "url=http://own:1/v1/traces",
        "resource=service.name=x=y",
        "resource=k=v",
        "bsp_schedule_delay=5",
    ]
    flags = [*OPENTELEMETRY, *[f"--trace-config=opentelemetry,{one}" for one in given]]
    assert tritonserver.server_options(parse_flags(flags)).trace_export == ExportSettings(
        url="http://own:1/v1/traces",
        resource={"service.name": "x=y", "k": "v"},
        queue_spans=100,
        batch_spans=100,
        delay_ms=5,
    )
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "soon")
    with pytest.raises(FlagError, match="OTEL_BSP_SCHEDULE_DELAY must be a whole number"):
        tritonserver.server_options(parse_flags(OPENTELEMETRY))


def test_the_mode_opentelemetry_needs_the_sdk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "slipstream.server.tracing.span_export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert tritonserver.run(OPENTELEMETRY) == 1
    assert capsys.readouterr().err == (
        "tritonserver: error: --trace-config: the trace mode opentelemetry needs the OpenTelemetry "
        "SDK; install it with: pip install 'slipstream[otel]'\n"
    )


def test_trace_and_summary_flags_take_effect(
    serve: Callable[..., Tritonserver], tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    server = serve(
        f"--trace-config=triton,file={file}",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=1",
        "--metrics-config=summary_latencies=true",
    ).wait_started()
    assert generate(server).json()["text_output"] == "6 7 8"
    wait_for(file.exists)
    models = [one["model_name"] for one in json.loads(file.read_text()) if "model_name" in one]
    assert models == [MODEL]
    scraped = httpx.get(f"http://{server.place('Metrics Service')}/metrics", trust_env=False).text
    labels = f'model="{MODEL}",version="1"'
    assert f"nv_inference_request_summary_us_count{{{labels}}} 1" in scraped


def test_spans_are_exported_when_the_server_stops(serve: Callable[..., Tritonserver]) -> None:
    with Collector() as collector:
        server = serve(
            "--trace-config=mode=opentelemetry",
            f"--trace-config=opentelemetry,url={collector.url}",
            "--trace-config=opentelemetry,resource=service.name=chat",
            "--trace-config=rate=1",
            "--trace-config=level=TIMESTAMPS",
            "--trace-config=opentelemetry,bsp_schedule_delay=600000",
        ).wait_started()
        assert generate(server).json()["text_output"] == "6 7 8"
        scraped = httpx.get(
            f"http://{server.place('Metrics Service')}/metrics", trust_env=False
        ).text
        assert "slipstream_trace_spans_dropped_total 0\n" in scraped
        assert collector.received == []
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        spans = {span.name: span for span in collector.spans}
    about = attributes_of(collector.received[0].message.resource_spans[0].resource.attributes)
    assert about["service.name"] == "chat"
    assert spans[MODEL].parent_id == spans["InferRequest"].id
    told = {
        name: spans[MODEL].attributes[f"gen_ai.usage.{name}_tokens"] for name in ("input", "output")
    }
    assert told == {"input": 1, "output": 3}


UPPER = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]) for text in texts]
"""
UPPER_CONFIG = """backend: "python" response_cache { enable: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU rate_limiter { resources [ { name: "R" count: 2 } ] } } ]
"""


def test_cache_and_rate_limiter_work_for_a_python_model(
    serve: Callable[..., Tritonserver], tmp_path: Path
) -> None:
    (tmp_path / "more" / "upper" / "1").mkdir(parents=True)
    (tmp_path / "more" / "upper" / "1" / "model.py").write_text(UPPER)
    (tmp_path / "more" / "upper" / "config.pbtxt").write_text(UPPER_CONFIG)
    server = serve(
        f"--model-repository={tmp_path / 'more'}",
        "--allow-python-models=true",
        "--cache-config=local,size=1048576",
        "--rate-limit=execution_count",
        "--rate-limit-resource=R:2",
    ).wait_started()
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
    for _ in range(3):
        answer = httpx.post(
            f"{server.url}/v2/models/upper/infer", json={"inputs": [tensor]}, timeout=30
        )
        assert answer.json()["outputs"][0]["data"] == ["hello"]
    found = httpx.get(f"{server.url}/v2/models/upper/stats").json()["model_stats"][0]
    assert found["inference_count"] == 1
    assert found["inference_stats"]["cache_hit"]["count"] == 2
    scraped = httpx.get(f"http://{server.place('Metrics Service')}/metrics", trust_env=False).text
    assert 'nv_cache_num_hits_per_model{model="upper",version="1"} 2' in scraped


@NEEDS_OPENSSL
def test_grpc_flags_enable_tls(
    serve: Callable[..., Tritonserver], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    server = serve(
        "--grpc-address=127.0.0.1",
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={certificate}",
        f"--grpc-server-key={key}",
    ).wait_started()
    place = server.place("GRPCInferenceService")
    with tritonclient.grpc.InferenceServerClient(
        place, ssl=True, root_certificates=str(certificate)
    ) as client:
        assert client.is_model_ready(MODEL)
    with (
        tritonclient.grpc.InferenceServerClient(place) as plain,
        pytest.raises(InferenceServerException),
    ):
        plain.is_server_live(client_timeout=5)
    words = [
        "-u",
        place,
        "--ssl",
        "-r",
        str(certificate),
        "-S",
        "--text",
        "5",
        "--request-output-len",
        "4",
    ]
    assert run_command("client", words) == 0
    assert "Output sequence:  [5, 6, 7, 8, 9]\n" in capsys.readouterr().out


def test_grpc_flags_reach_its_options() -> None:
    flags = [
        "--grpc-transport=aio",
        "--grpc-keepalive-time=1000",
        "--grpc-keepalive-timeout=200",
        "--grpc-keepalive-permit-without-calls=true",
        "--grpc-http2-max-pings-without-data=5",
        "--grpc-http2-min-recv-ping-interval-without-data=40",
        "--grpc-http2-max-ping-strikes=6",
        "--grpc-max-connection-age=70",
        "--grpc-max-connection-age-grace=80",
        "--grpc-use-ssl-mutual=true",
        "--grpc-server-cert=c",
        "--grpc-server-key=k",
        "--grpc-root-cert=r",
    ]
    options = tritonserver.server_options(parse_flags(["--model-repository=/a", *flags]))
    grpc_options = GrpcOptions(**options.grpc_settings)
    assert grpc_options.transport == "aio"
    assert dict(grpc_options.channel_arguments()) | EXPECTED_ARGUMENTS == dict(
        grpc_options.channel_arguments()
    )
    files = (
        grpc_options.server_certificate,
        grpc_options.server_key,
        grpc_options.root_certificate,
    )
    assert files == (Path("c"), Path("k"), Path("r"))


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_every_flag(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tritonserver.run([option]) == 0
    printed = capsys.readouterr().out
    assert all(f"--{name} " in printed for name in FLAGS)

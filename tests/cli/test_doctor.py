"""`slipstream doctor`: its facts, its findings, and that it reveals no secrets."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cpu_steps import best_level
from tiny_hf_folder import save_tokenizer
from tiny_models import config_of, engine_tensors, random_model

from slipstream.cli.commands import run_command
from slipstream.cli.doctor import command as doctor
from slipstream.cli.doctor import engines as doctor_engines
from slipstream.cli.doctor import machine as doctor_machine
from slipstream.cli.doctor import ports as doctor_ports
from slipstream.cli.doctor.machine import TorchReport, gpus, processor, versions
from slipstream.cli.doctor.ranks import ranks
from slipstream.cli.doctor.report import HIDDEN, Finding, Report, Section, hide_in, hider
from slipstream.engine.memory.cores import usable_cores
from slipstream.engine.memory.host import HostMemory
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
from slipstream.engine_worker.cpu_probe import CpuChoice
from slipstream.kernels.cpu import machine as code_machine
from slipstream.kernels.cpu.compiler.instruction_levels import BY_NAME
from slipstream.repository.templates import write_repository
from slipstream.version import VERSION
from slipstream.weights.build import build_engine

ROOT = Path(__file__).parents[2]
CPU_TORCH = TorchReport({"torch": "2", "cuda_runtime": "", "cpu_instructions": "AVX2", "gpus": []})
GPU = {"name": "NVIDIA X", "capability": "9.0", "free": 3 << 30, "total": 4 << 30, "failure": ""}
TABLE = re.compile(r"  (\S.*?)  +(.*)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without problems: free ports, a torch for CPUs, an empty home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "ask_torch", lambda: CPU_TORCH)
    monkeypatch.setattr(cpu_probe, "choose", lambda cpu=None: CpuChoice("float32"))
    monkeypatch.setattr(
        doctor_ports, "PORTS", {name: free_port() for name in ("HTTP", "gRPC", "metrics")}
    )
    return tmp_path


@pytest.fixture
def run(machine: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: object) -> tuple[int, str]:
        code = run_command("doctor", [str(argument) for argument in arguments])
        return code, capsys.readouterr().out

    return run


def facts_of(text: str) -> dict[str, dict[str, str]]:
    """Read the text report: heading → name → value."""
    sections: dict[str, dict[str, str]] = {}
    for line in text.partition("\nfindings\n")[0].splitlines():
        if line and not line.startswith(" "):
            current = sections.setdefault(line, {})
        elif found := TABLE.fullmatch(line):
            current[found[1]] = found[2]
    return sections


Run = Callable[..., tuple[int, str]]


def test_a_good_machine_is_ready_to_serve(run: Run, machine: Path) -> None:
    code, text = run()
    assert code == 0
    facts = facts_of(text)
    assert facts["versions"]["slipstream"] == VERSION
    for name in ("torch", "tokenizers", "numpy"):
        assert facts["versions"][name] == metadata.version(name)
    assert facts["CPU"]["cores"] == f"{usable_cores():g} usable of {os.cpu_count()}"
    assert facts["model repository"]["folder"] == str(machine / "models")
    assert facts["disk"]["repository"].startswith(f"{machine / 'models'}, ")
    assert set(facts["ports"].values()) == {"free"}
    assert text.endswith("findings\n  ready to serve\n")


def test_json_and_text_hold_the_same_facts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "read_host_memory", lambda: HostMemory(2 << 30, 1 << 29))
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    (_, text), (code, document) = run(), run("--json")
    found = json.loads(document)
    assert (code, found["ready"]) == (0, True)
    sections = facts_of(text)
    del sections["disk"], found["sections"]["disk"]  # free space changes between the two runs
    assert sections == found["sections"]
    assert sections["environment"]["HF_ENDPOINT"] == "http://hub.example"
    (finding,) = found["findings"]
    assert finding["what"] == "only 0.5 GiB of memory is available"
    assert f"  note: {finding['what']}\n    -> {finding['remedy']}\n" in text


def test_a_broken_repository_blocks_serving(run: Run, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / "broken").mkdir(parents=True)
    (repository / "broken" / "config.pbtxt").write_text('name: "broken"\nmax_batch_sise: 4\n')
    code, document = run("--model-repository", repository, "--json")
    found = json.loads(document)
    assert (code, found["ready"]) == (1, False)
    assert any(
        "max_batch_sise" in finding["what"] and finding["blocks"] for finding in found["findings"]
    )
    assert all(
        f"slipstream check {repository}" in finding["remedy"] for finding in found["findings"]
    )
    code, text = run("--repo", tmp_path / "none")
    assert code == 1
    assert f"  error: {tmp_path / 'none'}" in text
    assert text.endswith("fix the errors above before serving\n")


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        ("avx2", "compiled code (avx2) in bfloat16"),
        ("off", "torch in float32: it is switched off"),
    ],
)
def test_each_engine_says_what_computes_it_and_why(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, line: str
) -> None:
    monkeypatch.setattr(doctor_engines, "choose_code", lambda: variable)
    monkeypatch.setattr(doctor_machine, "choose_code", lambda cpu: variable)
    monkeypatch.setattr(code_machine, "read_cpu", lambda: ("A CPU", BY_NAME["avx2"].flags))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv(code_machine.VARIABLE, variable)
    random_model(config_of("llama")).save_pretrained(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    folder = build_engine(tmp_path / "hf", tmp_path / "engine")
    write_repository(tmp_path / "repository", "m", folder, folder, 4)
    _, text = run("--model-repository", tmp_path / "repository")
    assert facts_of(text)["engines"] == {"tensorrt_llm": line}
    assert facts_of(text)["CPU"]["compiled code"].endswith(f"({code_machine.VARIABLE}={variable})")


def test_the_reason_for_torch_is_that_of_the_engine(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = engine_tensors(random_model(config_of("llama")))
    monkeypatch.setattr(doctor_engines, "choose_code", lambda: "off")
    monkeypatch.delenv(code_machine.VARIABLE, raising=False)
    own = EngineSettings(device="cpu", dtype="float16")
    line = doctor_engines.describe_engine(own, spec)
    assert line == "torch in float16: no compiled code passed the trial on this CPU"
    monkeypatch.setattr(doctor_engines, "choose_code", lambda: best_level().name)
    line = doctor_engines.describe_engine(own, spec)
    assert line == "torch in float16: activations are float16"
    two = EngineSettings(device="cpu", ranks=2)
    line = doctor_engines.describe_engine(two, spec)
    assert line == f"compiled code ({best_level().name}) in bfloat16"
    assert doctor_engines.describe_engine(EngineSettings(device="cuda"), spec) == "GPU"


# -- ports


class _Answers(BaseHTTPRequestHandler):
    pages: dict[str, bytes]

    def do_GET(self) -> None:
        body = self.pages.get(self.path)
        self.send_response(200 if body is not None else 404)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, bytes]], int]]:
    servers: list[HTTPServer] = []

    def start(pages: dict[str, bytes]) -> int:
        server = HTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"pages": pages}))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server.server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


TRITON = json.dumps({"name": "triton", "version": "2.51.0", "extensions": []}).encode()


@pytest.mark.parametrize(
    ("service", "pages", "who", "code"),
    [
        ("HTTP", {"/v2": TRITON}, "a Triton (triton 2.51.0)", 1),
        (
            "HTTP",
            {"/v2": TRITON, "/openapi.json": b'{"info":{"title":"Slipstream"}}'},
            "a Slipstream",
            0,
        ),
        ("HTTP", {"/": b"hello"}, "another HTTP server", 1),
        ("metrics", {"/metrics": b"# HELP\nnv_inference_count 1\n"}, "a Triton", 1),
        (
            "metrics",
            {"/metrics": b"# HELP\nnv_inference_count 1\nslipstream_x 1\n"},
            "a Slipstream",
            0,
        ),
        ("gRPC", {"/": b""}, "something that does not answer gRPC", 1),
    ],
)
def test_a_port_in_use_names_the_server_and_its_process(
    run: Run,
    serve: Callable[[dict[str, bytes]], int],
    service: str,
    pages: dict[str, bytes],
    who: str,
    code: int,
) -> None:
    port = doctor_ports.PORTS[service] = serve(pages)
    ended, document = run("--json")
    found = json.loads(document)
    comm = Path("/proc/self/comm").read_text().strip()
    usage = f"in use by {who} (process {os.getpid()}, {comm})"
    assert found["sections"]["ports"][f"{service} {port}"] == usage
    (finding,) = found["findings"]
    assert (ended, finding["what"]) == (code, f"port {port} ({service}) is {usage}")
    assert "-port and another number" in finding["remedy"]


def test_a_silent_port_is_reported(run: Run) -> None:
    with socket.socket() as silent:  # like a server that is still loading
        silent.bind(("127.0.0.1", 0))
        doctor_ports.PORTS["HTTP"] = silent.getsockname()[1]
        code, text = run()
    assert code == 1
    assert "is in use by something that does not answer HTTP" in text


# -- secrets

SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx",
    "SLIPSTREAM_API_KEY": "open sesame",
    "SLIPSTREAM_ADMIN_KEY": "Swordfish",
    "HTTPS_PROXY": "http://someone:Pa55w0rd@proxy.example:3128",
    "http_proxy": "http://other:h1dden@proxy.example",
    "HF_ENDPOINT": "https://hub.example/?token=query-secret&x=1",
    "TRITON_CACHE_DIR": "/cache/Swordfish/x",  # holds the secret of another variable
    "TORCH_THING": "ghp_0123456789abcdefghijABCDEFGHIJ",
}
NEVER = ("hf_abc", "sesame", "Swordfish", "Pa55w0rd", "someone", "h1dden", "query-secret", "ghp_0")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_secrets_never_appear(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: list[str]
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    failed = TorchReport(failure="cannot fetch with hf_abcdefghijklmnopqrstuvwx")
    monkeypatch.setattr(doctor, "ask_torch", lambda: failed)
    code, output = run("--repo", tmp_path / "Swordfish", *form)
    assert code == 1
    assert [secret for secret in NEVER if secret in output] == []
    assert [name for name in SECRETS if name not in output] == []  # the names are shown
    assert "proxy.example:3128" in output
    assert "torch does not load: cannot fetch with (hidden)" in output


@pytest.mark.parametrize(
    "harmless",
    [
        "TOKENIZERS_PARALLELISM is false",
        "/home/me/.cache/0123456789abcdef0123456789abcdef/x",
        "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        "http://proxy.example:3128/?page=2",
        "expandable_segments:True",
    ],
)
def test_harmless_text_is_shown(harmless: str) -> None:
    assert hide_in(harmless) == harmless


def test_secret_variables_are_recognised_by_words_in_their_names() -> None:
    facts = doctor.variables(
        {
            "HF_TOKEN": "x",
            "HF_MYTOKENS": "y",
            "HF_PASS": "z",
            "TOKENIZERS_PARALLELISM": "false",
            "HOME": "/h",
        }
    ).facts
    assert facts == {
        "HF_TOKEN": HIDDEN,
        "HF_MYTOKENS": HIDDEN,
        "HF_PASS": HIDDEN,
        "TOKENIZERS_PARALLELISM": "false",
    }
    # values of three letters occur in ordinary words
    assert hider({"MY_PASSWORD": "abc"})("abc or (abc)") == "abc or (abc)"


# -- kinds of machines


def test_gpus_are_listed_with_whether_kernels_run(tmp_path: Path) -> None:
    broken = {"name": "NVIDIA Y", "capability": "3.5", "failure": "RuntimeError: no kernel image"}
    found = gpus(TorchReport({"cuda_runtime": "12.8", "gpus": [GPU, broken]}), tmp_path)
    assert dict(found.facts) | {"engines run on": ""} == {
        "GPU 0": "NVIDIA X",
        "GPU 0 compute capability": "9.0",
        "GPU 0 memory": "3.0 GiB free of 4.0 GiB",
        "GPU 0 kernels": "run",
        "GPU 1": "NVIDIA Y",
        "GPU 1 compute capability": "3.5",
        "GPU 1 kernels": "do not run: RuntimeError: no kernel image",
        "engines run on": "",
    }
    (finding,) = found.findings
    assert finding.blocks
    assert "--device cpu" in finding.remedy


@pytest.mark.parametrize(
    ("runtime", "blocks", "words"), [("", False, "build for CPUs"), ("12.8", True, "no GPU")]
)
def test_a_driver_without_a_visible_gpu_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, blocks: bool, words: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    report = TorchReport({"cuda_runtime": runtime, "gpus": []})
    (finding,) = gpus(report, driver=tmp_path).findings
    assert (finding.blocks, words in finding.what) == (blocks, True)
    assert gpus(report, driver=tmp_path / "none").findings == []


def test_missing_and_broken_torch_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found.what for found in versions(TorchReport(failure="killed")).findings] == [
        "torch does not load: killed"
    ]
    assert "computes in" not in processor(TorchReport(failure="killed")).facts
    monkeypatch.setattr(doctor_machine, "installed", lambda name: "not installed")
    missing = versions(TorchReport(failure="No module named 'torch'"))
    assert [found.remedy for found in missing.findings] == [
        f"pip install {name}" for name in ("torch", "tokenizers", "numpy")
    ]
    assert missing.facts["CUDA runtime"] == "unknown"


@pytest.mark.parametrize(
    ("choice", "flags", "words"),
    [
        (CpuChoice("bfloat16"), {"avx512_bf16"}, "has instructions for it (avx512_bf16)"),
        (CpuChoice("bfloat16", "AVX512_CORE_BF16"), {"amx_bf16"}, "limited to AVX512_CORE_BF16"),
        (CpuChoice("float32"), {"amx_bf16"}, "failed a trial"),
        (CpuChoice("float32"), {"avx2"}, "no instructions for bfloat16"),
    ],
)
def test_the_choice_of_the_cpu_data_type_is_explained(
    monkeypatch: pytest.MonkeyPatch, choice: CpuChoice, flags: set[str], words: str
) -> None:
    monkeypatch.delenv(cpu_probe.ISA_VARIABLE, raising=False)
    assert words in cpu_probe.explain(choice, frozenset(flags))
    monkeypatch.setenv(cpu_probe.ISA_VARIABLE, "AVX2")
    assert (
        cpu_probe.explain(choice, frozenset(flags)) == "what works within ONEDNN_MAX_CPU_ISA=AVX2"
    )


def test_a_rank_variable_is_a_note() -> None:
    (finding,) = doctor.variables({"SLURM_PROCID": "3"}).findings
    assert ("SLURM_PROCID is 3" in finding.what, finding.blocks) == (True, False)
    assert doctor.variables({"SLURM_PROCID": "0"}).findings == []


def test_blocking_findings_come_first() -> None:
    sections = [
        Section("a", {}, [Finding("later", "x", blocks=False)]),
        Section("b", {}, [Finding("first", "y")]),
    ]
    assert [found.what for found in Report(sections).findings] == ["first", "later"]


# -- torch in its own process


def test_torch_is_loaded_in_another_process_only() -> None:
    """The command itself never imports torch."""
    found = doctor_machine.ask_torch()
    assert (found.failure, found.found["torch"]) == ("", metadata.version("torch"))
    code = "import sys; from slipstream.cli.doctor import command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_probed_kernel_gives_right_results() -> None:
    pytest.importorskip("triton")
    code = "import torch; from slipstream.cli.doctor.torch_probe import try_kernel; try_kernel(torch.device('cpu'))"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment).returncode == 0


def test_the_error_of_a_torch_that_does_not_load_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(
        "raise OSError('libcudart.so.12: cannot open shared object file')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert (
        doctor_machine.ask_torch().failure
        == "OSError: libcudart.so.12: cannot open shared object file"
    )


# -- ranks

TWO_MACHINES = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


def rank_findings(environment: dict[str, str], **found: object) -> dict[str, bool]:
    """Return the findings about ranks, with whether each blocks."""
    section = ranks(TorchReport(found), environment, Path("/"))
    return {finding.what: finding.blocks for finding in section.findings}


def test_a_machine_for_one_rank_has_no_findings_about_ranks(tmp_path: Path) -> None:
    section = ranks(TorchReport({"gpus": []}), {}, tmp_path / "no shared memory")
    assert section.findings == []
    assert section.facts == {
        "GPUs that reach each other": "no GPU",
        "NCCL": "none",
        "shared memory": f"0 MiB at {tmp_path / 'no shared memory'}",
        "cluster key": "none",
    }


def test_a_rank_of_an_unknown_number_is_a_finding() -> None:
    environment = {"PMIX_RANK": "1"}
    assert rank_findings(environment)["the place of this process is not known"] is True
    assert doctor.variables(environment).findings == []


def test_gpus_that_do_not_reach_each_other_and_little_shared_memory_are_notes(
    tmp_path: Path,
) -> None:
    found = {"gpus": [{}, {}, {}], "unreachable": [(0, 2)], "nccl": "2.28.9"}
    section = ranks(TorchReport(found), {}, tmp_path / "shm")
    assert section.facts["GPUs that reach each other"] == "all but 0 and 2"
    assert section.facts["NCCL"] == "2.28.9"
    assert [(finding.what, finding.blocks) for finding in section.findings] == [
        ("GPU 0 and GPU 2 cannot read each other's memory: ranks are slower", False),
        (f"{tmp_path / 'shm'} has 0 MiB, and NCCL may need 1 GiB for several ranks", False),
    ]


def test_a_cluster_key_that_is_missing_or_readable_by_others_is_found(tmp_path: Path) -> None:
    assert rank_findings(TWO_MACHINES) == {"the cluster key is missing": True}
    file = tmp_path / "key"
    file.write_text("the key of all ranks")
    file.chmod(0o644)
    variable = {"SLIPSTREAM_CLUSTER_KEY_FILE": str(file)}
    assert rank_findings(TWO_MACHINES | variable) == {"the cluster key cannot be used": True}
    assert rank_findings(variable) == {"the cluster key cannot be used": False}
    file.chmod(0o600)
    assert rank_findings(TWO_MACHINES | variable) == {}


def test_an_address_of_rank_0_that_does_not_resolve_is_found() -> None:
    key = {"SLIPSTREAM_CLUSTER_KEY": "the key of all ranks"}
    wrong = {"MASTER_ADDR": "no.such.host.invalid"}
    (what,) = rank_findings(TWO_MACHINES | key | wrong)
    assert what.startswith("the address of rank 0, no.such.host.invalid, does not resolve")
    (what,) = rank_findings(wrong)
    assert what.startswith("the address of rank 0, no.such.host.invalid, does not resolve")

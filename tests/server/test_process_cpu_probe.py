"""The CPU trial, with commands that crash on purpose in place of the real one."""

import json
import os
import sys

import pytest

from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
from slipstream.engine_worker.cpu_probe import CpuChoice, choose, choose_code
from slipstream.kernels.cpu import machine
from slipstream.kernels.cpu.compiler.levels import LEVELS

NATIVE = ("Some CPU", frozenset({"avx512f", "avx512_bf16"}))
PLAIN = ("Some CPU", frozenset({"avx2"}))


@pytest.fixture(autouse=True)
def no_inherited_isa_limit(monkeypatch):
    monkeypatch.delenv(cpu_probe.ISA_VARIABLE, raising=False)


class Trials:
    """Commands that work only for the given choices, and are killed by SIGILL otherwise."""

    def __init__(self, *working):
        self.working = working
        self.tried = []

    def __call__(self, choice):
        self.tried.append(choice)
        crash = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
        check = (
            f"import os; assert os.environ.get({cpu_probe.ISA_VARIABLE!r}, '') == {choice.isa!r}"
        )
        return [sys.executable, "-S", "-c", check if choice in self.working else crash]


def test_a_cpu_that_computes_bfloat16_uses_it(tmp_path):
    assert choose(Trials(CpuChoice("bfloat16")), NATIVE, tmp_path) == CpuChoice("bfloat16")


def test_a_crash_leads_to_the_next_candidate_under_its_limit(tmp_path):
    limited = CpuChoice("bfloat16", "AVX512_CORE_BF16")
    assert choose(Trials(limited, CpuChoice("float32")), NATIVE, tmp_path) == limited


def test_float32_is_chosen_when_bfloat16_crashes(tmp_path):
    assert choose(Trials(CpuChoice("float32")), NATIVE, tmp_path) == CpuChoice("float32")


def test_without_the_instructions_bfloat16_is_not_tried(tmp_path):
    trials = Trials(*cpu_probe.CANDIDATES)
    assert choose(trials, PLAIN, tmp_path) == CpuChoice("float32")
    assert trials.tried == [CpuChoice("float32")]


def test_when_no_format_works_float32_is_chosen(tmp_path, capfd):
    assert choose(Trials(), NATIVE, tmp_path) == CpuChoice("float32")
    assert "no number format passed" in capfd.readouterr().err


def test_a_trial_that_hangs_counts_as_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_probe, "TIME_LIMIT_SECONDS", 0.2)

    def command(choice):
        return ["true"] if choice.dtype == "float32" else ["sleep", "600"]

    assert choose(command, NATIVE, tmp_path) == CpuChoice("float32")


def test_a_stored_result_is_used_without_a_trial(tmp_path):
    first = choose(Trials(CpuChoice("bfloat16")), NATIVE, tmp_path)
    again = Trials()
    assert choose(again, NATIVE, tmp_path) == first
    assert again.tried == []
    stored = json.loads((tmp_path / "cpu-probe.json").read_text())
    assert list(stored.values()) == [{"dtype": "bfloat16", "isa": ""}]


def test_another_cpu_is_tried_and_both_results_are_stored(tmp_path):
    choose(Trials(CpuChoice("bfloat16")), NATIVE, tmp_path)
    trials = Trials(CpuChoice("float32"))
    assert choose(trials, PLAIN, tmp_path) == CpuChoice("float32")
    assert len(json.loads((tmp_path / "cpu-probe.json").read_text())) == 2


def test_a_damaged_cache_is_replaced(tmp_path, capfd):
    (tmp_path / "cpu-probe.json").write_text('{"half')
    assert choose(Trials(CpuChoice("float32")), PLAIN, tmp_path) == CpuChoice("float32")
    assert "cannot read" in capfd.readouterr().err
    assert len(json.loads((tmp_path / "cpu-probe.json").read_text())) == 1


def test_the_settings_win_over_the_trial(monkeypatch):
    monkeypatch.setattr(
        cpu_probe, "choose", lambda: pytest.fail("ran a trial although the format was set")
    )
    monkeypatch.setattr(
        cpu_probe, "choose_code", lambda: pytest.fail("ran a trial although the code was set")
    )
    own = EngineSettings(device="cpu", dtype="float32", cpu_code="off")
    for settings in (own, EngineSettings(device="cuda")):
        assert cpu_probe.prepare(settings) == settings


def test_the_device_is_named_before_torch_is_loaded(monkeypatch):
    monkeypatch.setattr(cpu_probe, "runs_on_cpu", lambda settings: True)
    chosen = cpu_probe.prepare(EngineSettings(dtype="float32", cpu_code="off"))
    assert chosen == EngineSettings(dtype="float32", cpu_code="off", device="cpu")


def test_the_choice_reaches_the_settings_and_the_environment(monkeypatch):
    monkeypatch.setattr(cpu_probe, "choose", lambda: CpuChoice("bfloat16", "AVX512_CORE_BF16"))
    monkeypatch.setattr(cpu_probe, "choose_code", lambda: "avx2")
    monkeypatch.setenv(cpu_probe.ISA_VARIABLE, "")
    prepared = cpu_probe.prepare(EngineSettings(device="cpu"))
    assert (prepared.dtype, prepared.cpu_code) == ("bfloat16", "avx2")
    assert os.environ[cpu_probe.ISA_VARIABLE] == "AVX512_CORE_BF16"


def test_the_real_trial_passes_in_float32(tmp_path):
    assert choose(cpu_probe.trial_command, PLAIN, tmp_path) == CpuChoice("float32")


def test_model_and_flags_are_read_from_the_first_processor(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: A\nflags\t\t: fpu avx2\n\nmodel name\t: B\nflags\t\t: none\n")
    assert machine.read_cpu(file) == ("A", frozenset({"fpu", "avx2"}))


class CodeTrials:
    """As `Trials`, for instruction levels."""

    def __init__(self, *working):
        self.working = working
        self.tried = []

    def __call__(self, level, home):
        self.tried.append(level.name)
        return ["true"] if level.name in self.working else ["false"]


@pytest.fixture
def x86(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    return "Some CPU", LEVELS[0].flags


def test_the_best_code_that_works_is_chosen_and_remembered(tmp_path, x86):
    trials = CodeTrials("avx2")
    assert choose_code(trials, x86, tmp_path) == "avx2"
    assert trials.tried == ["avx512-bf16", "avx512", "avx2"]
    assert choose_code(trials, x86, tmp_path) == "avx2"
    assert len(trials.tried) == 3


def test_without_code_that_works_torch_computes(tmp_path, x86, capfd):
    assert choose_code(CodeTrials(), x86, tmp_path) == "off"
    assert "no compiled code passed" in capfd.readouterr().err
    trials = CodeTrials("avx2")
    assert choose_code(trials, ("Some CPU", frozenset({"sse2"})), tmp_path) == "off"
    assert trials.tried == []


def test_the_variable_limits_the_trials(tmp_path, x86, monkeypatch):
    monkeypatch.setenv(machine.VARIABLE, "avx512")
    trials = CodeTrials("avx512-bf16", "avx512", "avx2")
    assert choose_code(trials, x86, tmp_path) == "avx512"
    assert trials.tried == ["avx512"]
    monkeypatch.setenv(machine.VARIABLE, "off")
    assert choose_code(trials, x86, tmp_path) == "off"


def test_the_real_code_trial_passes_and_keeps_the_code(tmp_path, monkeypatch):
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    level = choose_code(home=tmp_path)
    kept = sorted(path.name for path in (tmp_path / "cpu-code").iterdir())
    assert kept[0].startswith(level + "-")
    assert kept[1:] == ["trials.json"]

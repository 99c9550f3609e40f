"""The CPU trial, with commands that crash on purpose in place of the real one."""

import json
import os
import sys
from dataclasses import replace

import pytest
from rank_models import save_rank_model
from tiny_models import config_of, engine_tensors, random_model

from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe, trials
from slipstream.engine_worker.code_trial import choose_code
from slipstream.engine_worker.cpu_probe import CpuChoice, choose
from slipstream.engine_worker.process import start_real_engine
from slipstream.engine_worker.ranks import disconnect
from slipstream.kernels.cpu import machine, objects, trial
from slipstream.kernels.cpu.compiler.instruction_levels import BY_NAME, LEVELS, possible_levels
from slipstream.kernels.cpu.operations import WeightFormat
from slipstream.server.engine_link.child import ENGINE_COMMAND
from slipstream.server.engine_link.rank_processes import FollowerProcesses
from slipstream.weights.build import build_engine
from slipstream.weights.home import cpu_code_folder

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
    monkeypatch.setattr(trials, "TIME_LIMIT_SECONDS", 0.2)

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
        cpu_probe,
        "choose_code",
        lambda progress: pytest.fail("ran a trial although the code was set"),
    )
    own = EngineSettings(device="cpu", dtype="float32", cpu_code="off")
    for settings in (own, EngineSettings(device="cuda")):
        assert cpu_probe.prepare(settings, None) == settings


def test_the_device_is_named_before_torch_is_loaded(monkeypatch):
    monkeypatch.setattr(cpu_probe, "runs_on_cpu", lambda settings: True)
    chosen = cpu_probe.prepare(EngineSettings(dtype="float32", cpu_code="off"), None)
    assert chosen == EngineSettings(dtype="float32", cpu_code="off", device="cpu")


def test_the_choice_reaches_the_settings_and_the_environment(monkeypatch):
    monkeypatch.setattr(cpu_probe, "choose", lambda: CpuChoice("bfloat16", "AVX512_CORE_BF16"))
    monkeypatch.setattr(cpu_probe, "choose_code", lambda progress: "avx2")
    monkeypatch.setenv(cpu_probe.ISA_VARIABLE, "")
    prepared = cpu_probe.prepare(EngineSettings(device="cpu"), None)
    assert (prepared.dtype, prepared.cpu_code) == ("bfloat16", "avx2")
    assert os.environ[cpu_probe.ISA_VARIABLE] == "AVX512_CORE_BF16"


def llama_spec():
    return engine_tensors(random_model(config_of("llama")))[0]


@pytest.fixture
def old_cpu(monkeypatch):
    """A CPU with AVX2 at most, on which torch computes in float32."""
    flags = BY_NAME["avx2"].flags
    for module in (cpu_probe, machine):
        monkeypatch.setattr(module, "read_cpu", lambda: ("Some CPU", flags))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_probe, "choose_code", lambda progress: "avx2")
    monkeypatch.setattr(cpu_probe, "choose", lambda: CpuChoice("float32"))


def test_compiled_code_computes_in_bfloat16_on_every_cpu(old_cpu, monkeypatch):
    spec = llama_spec()
    assert cpu_probe.prepare(EngineSettings(device="cpu"), spec).dtype == "bfloat16"
    own = EngineSettings(device="cpu", dtype="float32")
    assert cpu_probe.prepare(own, spec).dtype == "float32"


@pytest.mark.parametrize(
    ("settings", "heads"),
    [({"ranks": 2}, 8), ({"cpu_code": "off"}, 16), ({}, 8), ({"cpu_code": "avx512"}, 16)],
    ids=str,
)
def test_where_torch_computes_it_decides_the_format(old_cpu, settings, heads):
    spec = replace(llama_spec(), head_size=heads)
    prepared = cpu_probe.prepare(EngineSettings(device="cpu", **settings), spec)
    assert prepared.dtype == "float32"


def test_each_rank_computes_in_bfloat16_where_torch_would_not(tmp_path, monkeypatch):
    """A server starts all ranks with the same settings, and each rank chooses for itself."""
    home = tmp_path / "home"
    monkeypatch.setenv("SLIPSTREAM_HOME", str(home))
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    # every process finds this result of the trial, as on a CPU without instructions for bfloat16
    assert choose(Trials(CpuChoice("float32")), machine.read_cpu(), home).dtype == "float32"
    save_rank_model("llama", tmp_path / "hf")
    folder = str(build_engine(tmp_path / "hf", tmp_path / "engine"))
    settings = EngineSettings(device="cpu", ranks=2, threads=1, cache_tokens=256)
    followers = FollowerProcesses(ENGINE_COMMAND, folder, settings)
    try:
        loop = start_real_engine(folder, settings, followers.place)
        assert (loop.info.dtype, loop.info.ranks) == ("bfloat16", 2)
        loop.close()
    finally:
        followers.close()
        disconnect(settings)


def test_amx_is_tried_before_adapters_use_it(old_cpu, monkeypatch):
    flags = BY_NAME["avx2"].flags | {"amx_tile"}
    monkeypatch.setattr(cpu_probe, "read_cpu", lambda: ("Some CPU", flags))
    monkeypatch.setattr(cpu_probe, "choose", lambda: CpuChoice("float32", "AVX512_CORE"))
    monkeypatch.setenv(cpu_probe.ISA_VARIABLE, "")
    spec = llama_spec()
    assert cpu_probe.prepare(EngineSettings(device="cpu"), spec).dtype == "bfloat16"
    assert os.environ[cpu_probe.ISA_VARIABLE] == "AVX512_CORE"


def test_a_quantised_engine_keeps_its_bits_without_instructions_for_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setenv(machine.VARIABLE, "avx2")
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cpu_probe, "choose", lambda: pytest.fail("torch was tried"))
    monkeypatch.setattr(objects, "_loaded", {})
    phases = []
    monkeypatch.setattr(cpu_probe, "show_progress", lambda *phase: phases.append(phase))
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    random_model(config_of("llama", **sizes)).save_pretrained(tmp_path / "hf")
    folder = build_engine(tmp_path / "hf", tmp_path / "engine", weight_only="int4")
    loop = start_real_engine(str(folder), EngineSettings(device="cpu", cache_tokens=256))
    assert (loop.info.dtype, loop.runner._steps.team.code.level.name) == ("bfloat16", "avx2")
    assert {part.format for part in loop.runner.model.layers[0].up.parts} == {WeightFormat.INT4}
    assert phases == [(objects.PHASE, 0, 1), (objects.PHASE, 1, 1)]
    loop.close()


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
    assert trials.tried == ["avx512-bf16", "avx512-vnni", "avx512", "avx2"]
    assert choose_code(trials, x86, tmp_path) == "avx2"
    assert len(trials.tried) == 4


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


def test_a_trial_that_took_too_long_is_run_again(tmp_path, x86, monkeypatch, capfd):
    monkeypatch.setattr(trials, "TIME_LIMIT_SECONDS", 0.2)
    assert choose_code(lambda level, home: ["sleep", "600"], x86, tmp_path) == "off"
    trials_again = CodeTrials("avx2")
    assert choose_code(trials_again, x86, tmp_path) == "avx2"
    assert "no compiled code passed" in capfd.readouterr().err


def test_results_of_other_machines_are_kept(tmp_path, x86):
    choose_code(CodeTrials("avx2"), x86, tmp_path)
    choose_code(CodeTrials("avx512"), ("Another CPU", x86[1]), tmp_path)
    again = CodeTrials()
    assert choose_code(again, x86, tmp_path) == "avx2"
    assert again.tried == []


def test_the_real_code_trial_passes_and_keeps_the_code(tmp_path, monkeypatch):
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    phases = []
    level = choose_code(home=tmp_path, progress=lambda *phase: phases.append(phase))
    assert level == possible_levels(machine.read_cpu()[1])[0].name
    assert phases == [(objects.PHASE, 0, 1), (objects.PHASE, 1, 1)]
    kept = sorted(path.name for path in (tmp_path / "cpu-code").iterdir())
    assert kept[0].startswith(level + "-")
    assert kept[1:] == ["trials.json"]
    (tmp_path / "cpu-code" / "trials.json").unlink()
    choose_code(home=tmp_path, progress=lambda *phase: phases.append(phase))
    assert len(phases) == 2  # only the trial ran again


def test_without_a_home_code_is_compiled_once_and_one_warning_says_so(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    monkeypatch.setattr(objects, "_loaded", {})
    (tmp_path / "file").write_text("")
    home = tmp_path / "file" / "home"
    monkeypatch.setenv("SLIPSTREAM_HOME", str(home))
    level = BY_NAME[choose_code()]
    monkeypatch.setattr(objects, "_compile", lambda level: pytest.fail("compiled again"))
    assert objects.load_code(level, cpu_code_folder(home)).level is level
    [record] = caplog.records
    assert "cannot keep the compiled CPU kernels" in record.getMessage()


def test_a_trial_finds_code_that_computes_something_else(tmp_path, monkeypatch):
    """A wrong result is not taken for a right one, whatever the operation."""
    level = possible_levels(machine.read_cpu()[1])[0]
    code = objects.load_code(level, None)
    for name in ("_multiply", "_attend"):
        right = getattr(trial, name)
        with monkeypatch.context() as patch:
            patch.setattr(trial, name, lambda *given, right=right: right(*given) + 2)
            with pytest.raises(ValueError, match="is wrong"):
                trial.run_trial(code)
    trial.run_trial(code)

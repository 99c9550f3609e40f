"""Compiling, keeping and loading code; the life of a team of threads."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from cpu_steps import address, best_level, new_team, run

from slipstream.kernels.cpu import machine, objects
from slipstream.kernels.cpu.code.step import write_module
from slipstream.kernels.cpu.compiler.build import compile_object
from slipstream.kernels.cpu.compiler.instruction_levels import BY_NAME, LEVELS, possible_levels
from slipstream.kernels.cpu.operations import Copy, Entry, Format


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(objects, "_loaded", {})


def works(team) -> bool:
    source = np.arange(64, dtype=np.float32).reshape(2, 32)
    target = np.zeros_like(source)
    copy = Copy(address(source), 128, 0, address(target), 128, 0, Format.F32, 32)
    run(team, [Entry(copy)], 2)
    return bool((source == target).all())


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_every_level_compiles(level):
    """On any machine: the objects of a release are made on one."""
    assert compile_object(write_module(level), level)[:4] == b"\x7fELF"


def test_code_is_compiled_once_and_kept(tmp_path):
    phases = []
    level = best_level()
    objects.load_code(level, tmp_path, lambda *phase: phases.append(phase))
    assert phases == [(objects.PHASE, 0, 1), (objects.PHASE, 1, 1)]
    [kept] = tmp_path.iterdir()
    objects._loaded.clear()
    code = objects.load_code(level, tmp_path, lambda *phase: phases.append(phase))
    assert len(phases) == 2
    assert [kept] == list(tmp_path.iterdir())
    assert code.serve != code.launch


def test_a_damaged_file_is_compiled_again(tmp_path, caplog):
    level = best_level()
    objects.load_code(level, tmp_path)
    [kept] = tmp_path.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    objects._loaded.clear()
    assert objects.load_code(level, tmp_path).level is level
    assert "is damaged" in caplog.text
    assert kept.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    objects.load_code(best_level(), tmp_path / "file" / "folder")
    assert "cannot keep the compiled CPU kernels" in caplog.text


def test_a_cached_start_does_not_write_code(tmp_path):
    objects.load_code(best_level(), tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from slipstream.kernels.cpu import machine, objects\n"
        f"objects.load_code(machine.choose_level('auto')[0], Path({str(tmp_path)!r}))\n"
        "print([name for name in ('torch', 'llvmlite', 'slipstream.kernels.cpu.code.step')"
        " if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr) == ("[]\n", "")


def test_levels_follow_the_flags_of_the_cpu():
    names = [level.name for level in LEVELS if level.machine == "x86_64"]
    everything = LEVELS[0].flags | {"avx_vnni"}
    assert [level.name for level in possible_levels(everything, "x86_64")] == names
    assert possible_levels(frozenset({"sse2"}), "x86_64") == []
    old = BY_NAME["avx2"].flags
    assert [level.name for level in possible_levels(old, "x86_64")] == ["avx2"]
    names = [level.name for level in possible_levels(old | {"avx_vnni"}, "x86_64")]
    assert names == ["avx2-vnni", "avx2"]
    names = [level.name for level in possible_levels(BY_NAME["avx512-vnni"].flags, "x86_64")]
    assert names == ["avx512-vnni", "avx512", "avx2"]
    assert possible_levels(LEVELS[0].flags, "riscv64") == []


def test_the_setting_and_the_variable_choose_the_level(monkeypatch):
    flags = LEVELS[0].flags
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    assert machine.choose_level("auto", flags) == (LEVELS[0], "")
    assert machine.choose_level("avx2", flags) == (BY_NAME["avx2"], "")
    monkeypatch.setenv(machine.VARIABLE, "avx512")
    assert machine.choose_level("auto", flags) == (BY_NAME["avx512"], "")
    assert machine.choose_level("avx2", flags) == (BY_NAME["avx2"], "")  # the setting is stronger
    monkeypatch.setenv(machine.VARIABLE, "off")
    assert machine.choose_level("auto", flags) == (None, "it is switched off")
    level, reason = machine.choose_level("avx512", BY_NAME["avx2"].flags)
    assert (level, reason) == (None, "this CPU lacks instructions of avx512")
    with pytest.raises(ValueError, match="cpu_code must be auto, off or one of avx512-bf16"):
        machine.choose_level("avx1024", flags)


def test_several_teams_run_and_end():
    before = set(threading.enumerate())
    teams = [new_team(threads) for threads in (1, 2, 3)]
    assert all(works(team) for team in teams * 3)
    for team in teams:
        team.close()
        team.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="have ended"):
        works(teams[1])


def test_a_team_that_is_dropped_ends_its_threads():
    gc.collect()  # teams of other tests
    before = set(threading.enumerate())
    team = new_team(3)
    assert works(team)
    assert len(set(threading.enumerate()) - before) == 2
    del team
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_idle_threads_sleep():
    """Threads that wait are asleep in the kernel, so that an idle engine uses no CPU."""
    team = new_team(3)
    assert works(team)
    deadline = threading.Event()
    for _ in range(200):
        states = [task_state(thread.native_id) for thread in team._threads]
        if states == ["S", "S"]:
            break
        deadline.wait(0.05)
    assert states == ["S", "S"]
    assert works(team)
    team.close()


def task_state(thread: int) -> str:
    with open(f"/proc/{os.getpid()}/task/{thread}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]

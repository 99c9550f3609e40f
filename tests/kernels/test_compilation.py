"""Kernels are compiled in other processes, without a GPU, and found by the one that launches them."""

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.kernels.gpu.compilation import pool as pools

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = Path(__file__).parents[2]


class Job:
    """What the pool needs of a job."""

    kernel = "_softmax"

    def to_json(self) -> str:
        return "{}"


def test_collected_kernels_are_found_compiled(tmp_path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, str(SUPPORT / "compile_ahead.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    sampling = ["scan_parts", "weigh_parts", "scan_again", "_choose"]
    kernels = ["_silu_gated", "_step_inputs", "_write_back", *sampling]
    assert found["collected"] == kernels, "each variant once, although it was launched more often"
    assert found["cached"] == dict.fromkeys(kernels, True)
    assert found["reports"] == [[done, 8] for done in range(1, 9)]
    assert found["tokens"] == [0, 0, 0], "nothing was launched, and new memory was zero"
    assert "the kernel _missing could not be compiled ahead: AttributeError" in ended.stderr


def test_a_worker_that_ends_leaves_the_rest_to_the_first_launch(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pools, "_WORKER", "ending_worker")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    pool = pools.CompilePool(2, tmp_path / "marker")
    reports = []
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pool.submit(Job())
        pool.wait(lambda done, total: reports.append((done, total)))
    assert reports == [(1, 3)]
    assert "2 of 3 kernels are compiled one after the other" in caplog.text
    assert not (tmp_path / "marker").exists()
    pool.close()  # once more does no harm


def test_a_pool_starts_only_for_kernels_that_are_not_compiled(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(pools, "version", lambda package: "3.6.0")
    monkeypatch.setattr(pools, "CompilePool", lambda *given: started.append(given))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pools.start_pool("a model", 8)
    ((processes, marker),) = started
    assert processes == 7
    marker.touch()
    pools.start_pool("a model", 8)
    assert len(started) == 1
    pools.start_pool("another model", 8)
    assert len(started) == 2
    monkeypatch.setattr(pools, "version", lambda package: "3.7.0")
    pools.start_pool("a model", 8)
    assert len(started) == 3
    pools.start_pool("a third model", 2)
    assert len(started) == 3


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    wanted = tmp_path / "file" / "cache"  # no folder can be made there
    monkeypatch.setenv("TRITON_CACHE_DIR", str(wanted))
    monkeypatch.setattr(pools.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = pools.prepare_cache_folder()
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)
    assert f"because {wanted} cannot be written" in caplog.text
    monkeypatch.setenv("TRITON_CACHE_DIR", str(wanted))
    assert pools.prepare_cache_folder() == folder, "the next start finds what this one compiled"


def test_a_temporary_folder_that_others_can_write_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(pools.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(pools.tempfile, "tempdir", str(tmp_path))
    other = tmp_path / f"slipstream-kernels-{os.getuid()}"
    other.mkdir()
    other.chmod(0o777)
    folder = pools.prepare_cache_folder()
    assert folder != other
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_cache_that_can_be_written_stays(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert pools.prepare_cache_folder() == tmp_path / ".triton" / "cache"

"""How many processes a server has by default."""

import importlib.metadata
import subprocess
import sys

import pytest

from slipstream.server.engine_link.visible_gpus import runs_on_gpu, visible_gpus
from slipstream.server.frontends.count import choose_count


@pytest.mark.parametrize(
    ("on_gpu", "cores", "count"),
    [
        (False, 2, 1),
        (False, 128, 1),
        (True, 1, 1),
        (True, 4, 1),
        (True, 7.9, 1),
        (True, 8, 2),
        (True, 11, 2),
        (True, 12, 3),
        (True, 16, 4),
        (True, 31.5, 7),
        (True, 32, 8),
        (True, 256, 8),
    ],
)
def test_the_number_of_front_ends_follows_the_cores_beside_a_gpu(on_gpu, cores, count):
    assert choose_count(on_gpu, cores) == count


@pytest.mark.parametrize(
    ("device", "visible", "driver", "version", "on_gpu"),
    [
        ("cpu", None, True, "2.9.0", False),
        ("cuda", None, False, "2.9.0", True),
        ("auto", None, False, "2.9.0", False),
        ("auto", None, True, "2.9.0", True),
        ("auto", None, True, "2.9.0+cpu", False),
        ("auto", "1", True, "2.9.0", True),
        ("auto", "", True, "2.9.0", False),
        ("auto", "-1", True, "2.9.0", False),
    ],
)
def test_an_engine_runs_on_a_gpu_where_there_is_one(
    tmp_path, monkeypatch, device, visible, driver, version, on_gpu
):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    path = tmp_path / "nvidiactl"
    if driver:
        path.touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert runs_on_gpu(device, environment, path) is on_gpu


def test_visible_gpus_are_counted_without_torch(tmp_path, monkeypatch):
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.11.0+cu130")

    def count(environment, device="auto"):
        return visible_gpus(device, environment, driver, tmp_path / "gpus")

    assert count({}) == 0  # no driver
    driver.touch()
    assert count({}) == 1  # a driver that lists no GPU
    for name in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert count({}) == 2
    assert count({"CUDA_VISIBLE_DEVICES": "0,2,3"}) == 3
    assert count({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert count({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert count({}, device="cpu") == 0


def test_the_choice_does_not_load_torch():
    program = (
        "import sys; from slipstream.server.frontends.count import *; "
        "from slipstream.engine.memory.cores import usable_cores; "
        "from slipstream.server.engine_link.visible_gpus import *; visible_gpus('auto'); "
        "choose_count(runs_on_gpu('auto'), usable_cores()); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "False\n", ran.stderr

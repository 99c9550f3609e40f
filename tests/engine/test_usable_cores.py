"""The cores that a process may use, from files as Linux writes them."""

import os

import pytest

from slipstream.engine.memory.cores import usable_cores

VERSION_2 = "0::/\n"
VERSION_1 = "9:cpu,cpuacct:/\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("", {}, 16.0),
        (VERSION_2, {}, 16.0),
        (VERSION_2, {"cpu.max": "max 100000"}, 16.0),
        (VERSION_2, {"cpu.max": "400000 100000"}, 4.0),
        (VERSION_2, {"cpu.max": "250000 100000"}, 2.5),
        (VERSION_2, {"cpu.max": "6400000 100000"}, 16.0),
        (VERSION_2, {"cpu.max": "nonsense"}, 16.0),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16.0),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
    ],
)
def test_a_container_has_the_cores_of_its_quota(tmp_path, monkeypatch, groups, files, cores):
    assert cores_of(tmp_path, monkeypatch, groups, files) == cores


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        # the process's own group has the quota
        ("0::/system.slice/a.service\n", {"system.slice/a.service/cpu.max": "300000 100000"}, 3.0),
        # a group above it has it
        (
            "0::/user.slice/session\n",
            {
                "user.slice/cpu.max": "150000 100000",
                "user.slice/session/cpu.max": "max 100000",
            },
            1.5,
        ),
        # both have one, and the smaller one applies
        (
            "0::/a/b\n",
            {"a/cpu.max": "200000 100000", "a/b/cpu.max": "600000 100000"},
            2.0,
        ),
        # version 1
        (
            "4:memory:/other\n3:cpu,cpuacct:/a/b\n",
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "cpu/a/b/cpu.cfs_quota_us": "50000",
                "cpu/a/b/cpu.cfs_period_us": "50000",
            },
            1.0,
        ),
        # a group that this process is not in
        ("0::/a\n", {"b/cpu.max": "100000 100000"}, 16.0),
    ],
    ids=["own group", "group above", "both", "version 1", "another group"],
)
def test_quotas_of_all_groups_apply(tmp_path, monkeypatch, groups, files, cores):
    assert cores_of(tmp_path, monkeypatch, groups, files) == cores


def cores_of(root, monkeypatch, groups, files):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"cgroup/{name}": f"{text}\n" for name, text in files.items()},
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return usable_cores(root / "proc", root / "cgroup")

"""The systemd unit, the files of GitHub, and what a container build may read."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from manifests import DEPLOY, ROOT

from slipstream.cli.commands import create_parser
from slipstream.version import VERSION

UNIT = DEPLOY / "systemd" / "slipstream.service"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PYTEST = PYPROJECT["tool"]["pytest"]["ini_options"]


@pytest.fixture(scope="module")
def unit():
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read(UNIT)
    return parser


def test_the_unit_runs_a_command_whose_flags_exist(unit):
    program, command, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name in PROJECT["scripts"]
    given = create_parser(command).parse_args(flags)
    assert str(given.api_key) == "${CREDENTIALS_DIRECTORY}/api-key"
    # a stop must not cut what the server itself still finishes
    assert float(unit["Service"]["TimeoutStopSec"]) == given.exit_timeout_secs + 30


def test_the_unit_serves_the_folder_that_it_may_write(unit):
    service = unit["Service"]
    assert service["Environment"] == f"HOME=/var/lib/{service['StateDirectory']}"
    assert service["LoadCredential"].startswith("api-key:")
    assert (service["DynamicUser"], service["ProtectSystem"]) == ("yes", "strict")


@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit(tmp_path):
    program = Path(sys.executable).with_name("slipstream")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/slipstream/bin/slipstream", str(program)))
    found = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_container_build_may_read_what_the_containerfile_copies():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
    allowed = [line[1:] for line in lines if line.startswith("!")]
    assert lines[0] == "*"
    copied = [
        name
        for line in (DEPLOY / "Containerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for name in line.split()[1:-1]
    ]
    assert sorted(copied) == sorted(allowed)
    assert any(fnmatch("slipstream/__pycache__", line) for line in lines[1:])


def test_the_workflow_runs_the_check_of_the_repository():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    check = workflow["jobs"]["check"]
    assert {"run": ".ci/run"} in check["steps"]
    versions = check["strategy"]["matrix"]["python"]
    known = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert set(versions) <= set(known)
    assert PROJECT["requires-python"] == f">={versions[0]}"
    commands = [step.get("run", "") for step in workflow["jobs"]["browser"]["steps"]]
    assert any("pytest -m browser" in command for command in commands)


def test_the_nightly_workflow_runs_what_the_default_tests_leave_out():
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    commands = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
    marked = {found for text in commands for found in re.findall(r"pytest -m (\w+)", text)}
    every = {marker.partition(":")[0] for marker in PYTEST["markers"]}
    # gates are in ci.yml, clusters in cluster.yml; the others need a GPU or nvidia-pytriton
    elsewhere = {"gate", "cluster", "gpu", "live"}
    assert marked == every - elsewhere
    image = "\n".join(step.get("run", "") for step in workflow["jobs"]["image"]["steps"])
    guide = (ROOT / "docs" / "first-hour.md").read_text()
    imported = re.search(r"docker compose run --rm server slipstream .*", guide)[0]
    assert imported in image


def test_the_notes_of_a_release_are_its_part_of_the_changelog():
    program = [sys.executable, ROOT / ".ci" / "release_notes.py"]
    found = subprocess.run([*program, VERSION], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("The first version.\n\n### Added\n")
    assert "## 0." not in found.stdout
    found = subprocess.run([*program, "9.9.9"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == f"the tag is for 9.9.9, but slipstream/version.py says {VERSION}\n"


def test_the_workflow_for_clusters_runs_the_tests_of_launchers_and_ray():
    workflow = yaml.safe_load((ROOT / ".github/workflows/cluster.yml").read_text())
    job = workflow["jobs"]["cluster"]
    names = [
        Path(word).stem for words in job["strategy"]["matrix"]["tests"] for word in words.split()
    ]
    tests = ROOT / "tests" / "deploy"
    assert all("mark.cluster" in (tests / f"{name}.py").read_text() for name in names)
    marked = {path.stem for path in tests.glob("test_*.py") if "mark.cluster" in path.read_text()}
    # manifests and service files need no cluster for most; pods need namespaces of their own
    assert marked - set(names) == {"test_manifests", "test_pods", "test_service_files"}
    installed = job["steps"][0]["run"].split()
    assert {"slurm-wlm", "munge", "openmpi-bin", "libpmix-dev", "nginx", "prometheus"} <= set(
        installed
    )


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_an_issue_form_has_the_fields_that_github_needs(name):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert form["name"]
    assert form["description"]
    for field in form["body"]:
        assert field["type"] in ("textarea", "input")
        assert field["attributes"]["label"]
    assert len({field["id"] for field in form["body"]}) == len(form["body"])

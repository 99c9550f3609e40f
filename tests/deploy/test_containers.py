"""The Containerfile, the compose files, and the commands in all files of deploy/."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
from manifests import DEPLOY, ROOT, all_documents, documents, pod_templates

from slipstream.cli.commands import create_parser
from slipstream.cli.compat.tritonserver_flags import FlagError, parse_flags
from slipstream.version import VERSION

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTAINERFILE = DEPLOY / "Containerfile"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
INSTRUCTIONS = {"FROM", "RUN", "COPY", "ENV", "USER", "EXPOSE", "CMD"}
SERVICE_FIELDS = {
    "build", "cap_drop", "command", "deploy", "environment", "healthcheck", "image", "ports",
    "read_only", "restart", "security_opt", "shm_size", "stop_grace_period", "tmpfs", "volumes",
}  # fmt: skip


def instructions():
    """Return (instruction, arguments) of each line of the Containerfile."""
    lines = [line for line in CONTAINERFILE.read_text().splitlines() if not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def arguments(name):
    return [text for instruction, text in instructions() if instruction == name]


def test_the_containerfile_has_known_instructions_and_ends_as_a_user():
    names = [name for name, _ in instructions()]
    assert set(names) == INSTRUCTIONS
    assert (names[0], len(names)) == ("FROM", 10)
    assert arguments("USER") == ["10001:10001"]
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")
    assert arguments("EXPOSE") == ["8000 8001 8002"]


def test_the_containerfile_copies_and_installs_what_exists():
    (image,) = arguments("FROM")
    assert re.fullmatch(r"python:3\.12-slim", image)
    assert "3.12" in " ".join(PROJECT["classifiers"])
    copied = [name for text in arguments("COPY") for name in text.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    # what pyproject.toml names must be there when pip builds the package
    assert {"pyproject.toml", PROJECT["readme"], "slipstream"} <= set(copied)
    (extras,) = re.findall(r'"/src\[([\w,]+)\]"', " ".join(arguments("RUN")))
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_image_has_the_version_of_the_package():
    images = re.findall(r"slipstream:(\d[\w.]*)", COMPOSE.read_text() + CONTAINERFILE.read_text())
    tags = [
        image["newTag"]
        for path in DEPLOY.rglob("kustomization.yaml")
        for document in documents(path)
        for image in document.get("images", [])
    ]
    assert len(tags) == 4
    assert {*images, *tags} == {VERSION}


def commands():
    """Return (place, words) of every command that files of deploy/ start in a container or a job."""
    for document in all_documents():
        for template in pod_templates(document):
            for container in template["spec"]["containers"]:
                yield document["metadata"]["name"], container["command"] + container["args"]
    (compose,) = documents(COMPOSE)
    yield "compose", compose["services"]["server"]["command"]
    yield "Containerfile", shlex.split(arguments("CMD")[0].strip("[]").replace(",", " "))
    for path in sorted((DEPLOY / "slurm").glob("*.sub")):
        text = path.read_text().replace("\\\n", " ")
        (line,) = (line for line in text.splitlines() if line.startswith("srun "))
        words = shlex.split(line)
        # numbers and folders that the shell puts in
        known = [re.sub(r"\$\(?\(?.*$", "1", word) for word in words]
        yield path.name, known[known.index("tritonserver") :]


COMMANDS = list(commands())


@pytest.mark.parametrize(("place", "words"), COMMANDS, ids=[place for place, _ in COMMANDS])
def test_a_command_has_flags_that_exist(place, words):
    program, *flags = words
    assert program in PROJECT["scripts"]
    if program == "tritonserver":
        given = parse_flags(flags)
        assert given["model-repository"]
        assert given.ignored == []
    else:
        command, *rest = flags
        assert create_parser(command).parse_args(rest).model


def test_a_flag_that_does_not_exist_is_found():
    assert len(COMMANDS) == 10
    with pytest.raises(FlagError):
        parse_flags([*COMMANDS[0][1][1:], "--exit-timeout-sec=1"])


def test_compose_has_known_fields_and_files_that_exist():
    (compose,) = documents(COMPOSE)
    (gpu,) = documents(DEPLOY / "compose" / "gpu.yaml")
    assert compose.keys() == {"services", "volumes"}
    assert gpu["services"].keys() == {"server"}
    assert compose["services"].keys() == {"server", "prometheus", "grafana"}
    for service in [*compose["services"].values(), gpu["services"]["server"]]:
        assert service.keys() <= SERVICE_FIELDS
        for mount in service.get("volumes", []):
            source = mount.partition(":")[0]
            known = (COMPOSE.parent / source).exists() if source[0] == "." else False
            assert known or source in compose["volumes"], mount
        assert [
            port for port in service.get("ports", []) if not port.startswith("127.0.0.1:")
        ] == []
    build = compose["services"]["server"]["build"]
    assert (COMPOSE.parent / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == CONTAINERFILE


def test_compose_confines_the_server_and_gives_it_time_to_stop():
    (compose,) = documents(COMPOSE)
    server = compose["services"]["server"]
    assert (server["read_only"], server["cap_drop"]) == (True, ["ALL"])
    timeout = parse_flags(server["command"][1:])["exit-timeout-secs"]
    assert server["stop_grace_period"] == f"{timeout + 30:g}s"


@pytest.mark.cluster
@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="docker-compose is not installed"
)
def test_compose_is_read_by_compose():
    files = ["-f", str(COMPOSE), "-f", str(COMPOSE.with_name("gpu.yaml"))]
    found = subprocess.run(["docker-compose", *files, "config", "--services"], capture_output=True)
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.split()) == [b"grafana", b"prometheus", b"server"]


@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_slurm_scripts_have_no_mistakes_of_the_shell():
    scripts = sorted(map(str, (DEPLOY / "slurm").glob("*.sub")))
    assert len(scripts) == 3
    found = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")

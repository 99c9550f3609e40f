"""Replicas of an engine model in config.pbtxt: instance_group and gpu_device_ids."""

import pytest
from tiny_server import make_repository

from slipstream.engine.settings import MAX_REPLICAS
from slipstream.repository.describe import config_document, with_instances
from slipstream.repository.models import inspect_repository

ONE = "instance_group [ { count: 1 kind: KIND_CPU } ]"


def read(folder, groups=ONE, devices=None):
    """Return settings, problems and the lines of the file."""
    repo = make_repository(folder)
    config = repo / "tensorrt_llm" / "config.pbtxt"
    text = config.read_text()
    assert ONE in text
    key = 'key: "gpu_device_ids"'
    lines = [line for line in text.replace(ONE, groups).splitlines() if key not in line]
    if devices is not None:
        lines.append(
            f'parameters {{ key: "gpu_device_ids" value {{ string_value: "{devices}" }} }}'
        )
    config.write_text("\n".join(lines))
    found, problems = inspect_repository(repo)
    assert not problems.warnings
    model = found.models["tensorrt_llm"]
    return model.config, found.engines["tensorrt_llm"].settings, problems.errors, lines


@pytest.mark.parametrize(
    ("groups", "devices", "replicas", "used"),
    [
        (ONE, None, 1, ()),
        ("", None, 1, ()),
        ("instance_group [ { count: 0 kind: KIND_CPU } ]", None, 1, ()),
        ("instance_group [ { count: 2 kind: KIND_CPU } ]", None, 2, ()),
        ("instance_group [ { count: 2 }, { count: 3 } ]", None, 5, ()),
        (ONE, "3", 1, (3,)),
        ("instance_group [ { count: 2 kind: KIND_CPU } ]", "1;0", 2, (1, 0)),
        ("instance_group [ { count: 3 kind: KIND_CPU } ]", " 0 ; 0;1 ", 3, (0, 0, 1)),
        ("instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0, 2 ] } ]", None, 2, (0, 2)),
        (
            "instance_group [ { count: 2 gpus: [ 1 ] }, { count: 1 gpus: [ 0 ] } ]",
            None,
            3,
            (1, 1, 0),
        ),
        ("instance_group [ { count: 1 gpus: [ 1 ] }, { count: 1 } ]", None, 2, ()),
    ],
)
def test_instances_are_replicas(tmp_path, groups, devices, replicas, used):
    _, settings, errors, _ = read(tmp_path, groups, devices)
    assert not errors
    assert (settings.replicas, tuple(settings.devices)) == (replicas, used)


@pytest.mark.parametrize(
    ("count", "devices", "text"),
    [
        (
            3,
            "0,1;2",
            "'0,1;2' has 2 sets of GPUs, but instance_group has 3 instances: give one set for each "
            "instance, separated by ';', or change the count",
        ),
        (1, "0;1", "'0;1' has 2 sets of GPUs, but instance_group has 1 instance: give one set"),
        (2, "0", "'0' has 1 set of GPUs, but instance_group has 2 instances: give one set"),
        (2, "0,1;2", "'0,1;2': give each instance the same number of GPUs"),
        (1, "0,0", "'0,0': an instance names the same GPU twice"),
        (2, "0;", "expected GPU numbers, with ';' between instances and ',' within one, such as"),
        (1, "-1", "expected GPU numbers, with ';' between instances"),
        (1, "cuda:0", "expected GPU numbers, with ';' between instances"),
        (1, "99999999999999", "expected GPU numbers, with ';' between instances"),
    ],
)
def test_wrong_gpu_device_ids_are_refused_with_file_line_and_key(tmp_path, count, devices, text):
    groups = f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]"
    _, _, errors, lines = read(tmp_path, groups, devices)
    (error,) = errors
    assert error.file.endswith("tensorrt_llm/config.pbtxt")
    assert error.line == len(lines)
    assert error.key == "parameters.gpu_device_ids"
    assert error.text.startswith(text)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (
            "instance_group [ { count: 65 kind: KIND_CPU } ]",
            f"65 instances: an engine model may have 1 to {MAX_REPLICAS}",
        ),
        (
            "instance_group [ { gpus: [ -1 ] } ]",
            "devices must be GPU numbers from 0 on, not [-1]",
        ),
    ],
)
def test_wrong_instance_groups_are_refused_with_file_line_and_key(tmp_path, groups, text):
    _, _, errors, lines = read(tmp_path, groups)
    (error,) = errors
    assert (error.key, error.text) == ("instance_group", text)
    assert "instance_group" in lines[error.line - 1]


def test_the_configuration_shows_the_instances_that_run(tmp_path):
    config, _, _, _ = read(tmp_path, "instance_group [ { count: 2 kind: KIND_CPU } ]")
    (group,) = config_document(config, False)["instance_group"]
    assert (group["count"], group["kind"]) == (2, "KIND_CPU")
    (group,) = config_document(with_instances(config, 5), False)["instance_group"]
    assert (group["count"], group["kind"], group["name"]) == (5, "KIND_CPU", "tensorrt_llm_0")


def test_mpi_parameters_are_accepted_and_explained(tmp_path):
    repo = make_repository(tmp_path)
    config = repo / "tensorrt_llm" / "config.pbtxt"
    more = [
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
        for name, value in (("participant_ids", "1,2"), ("num_nodes", "2"))
    ]
    config.write_text("\n".join([config.read_text(), *more]))
    found, problems = inspect_repository(repo)
    assert found.engines["tensorrt_llm"].settings.replicas == 1
    assert not problems.errors
    assert [(problem.key, problem.text) for problem in problems.warnings] == [
        (
            "parameters.participant_ids",
            "'1,2' has no effect: the server starts a process for each instance itself, without "
            "MPI",
        ),
        (
            "parameters.num_nodes",
            "'2' has no effect: all instances run on this machine; start a server on each of the "
            "others",
        ),
    ]

"""Reading one config.pbtxt: all problems with their lines, and defaults of unfilled variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.repository.config import ModelConfig, VersionPolicy, read_model_config
from slipstream.repository.describe import config_document
from slipstream.repository.ensembles import check_graph
from slipstream.repository.problems import Problems
from slipstream.repository.schema import ENUMS, MESSAGES

INPUT = 'input [ { name: "a" data_type: TYPE_INT32 dims: [ -1 ] } ]\n'


def read(folder: Path, text: str, name: str = "m") -> tuple[ModelConfig | None, Problems]:
    model = folder / name
    model.mkdir(exist_ok=True)
    (model / "config.pbtxt").write_text(text, encoding="utf-8")
    problems = Problems()
    return read_model_config(model, problems), problems


def problem_texts(problems: Problems) -> list[str]:
    """Return the problems without the name of the folder."""
    return [str(problem).partition("config.pbtxt:")[2] for problem in problems.found]


def test_fields_of_a_configuration_are_read(tmp_path: Path) -> None:
    config, problems = read(
        tmp_path,
        """
        name: "m" backend: "python" max_batch_size: 8
        model_transaction_policy { decoupled: True }
        input [
          { name: "text" data_type: TYPE_STRING dims: [ -1 ] },
          { name: "k" data_type: TYPE_UINT64 dims: [ 1 ] reshape: { shape: [ ] } optional: true }
        ]
        output: [ { name: "out" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
        instance_group [ { count: 2 kind: KIND_CPU } ]
        dynamic_batching { preferred_batch_size: [ 4 8 ] max_queue_delay_microseconds: 100
                           default_queue_policy { max_queue_size: 7 timeout_action: DELAY } }
        version_policy { specific { versions: [ 1, 3 ] } }
        parameters { key: "flag" value { string_value: "TRUE" } }
        """,
    )
    assert config is not None
    assert problem_texts(problems) == []
    assert (config.name, config.backend, config.max_batch_size, config.decoupled) == (
        "m",
        "python",
        8,
        True,
    )
    text, k = config.inputs
    assert (text.datatype, text.dims, text.optional, text.reshape) == ("BYTES", (-1,), False, None)
    assert (k.datatype, k.dims, k.optional, k.reshape) == ("UINT64", (1,), True, ())
    assert config.outputs[0].dims == (-1, 4)
    assert [(group.kind, group.count) for group in config.instance_groups] == [("KIND_CPU", 2)]
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_size == (4, 8)
    assert config.dynamic_batching.queue_policy.max_queue_size == 7
    assert config.dynamic_batching.queue_policy.timeout_action == "DELAY"
    assert config.version_policy.choose((1, 2, 3)) == (1, 3)
    assert config.flag("flag") is True


def test_all_problems_are_reported_with_their_lines(tmp_path: Path) -> None:
    _, problems = read(
        tmp_path,
        'name: "other"\n'
        "max_batch_size: many\n"
        "decoupld: true\n"
        "input [\n"
        '  { name: "a" data_tpye: TYPE_INT32 dims: [ 1 ] },\n'
        '  { name: "b" data_type: TYPE_INT33 dims: [ 0 ] },\n'
        '  { name: "b" data_type: TYPE_INT32 }\n'
        "]\n"
        "instance_group [ { count: 99999999999 } ]\n"
        "model_transaction_policy { decoupled: maybe }\n"
        "parameters: 7\n"
        "backend: python\n",
    )
    assert all(problem.fatal for problem in problems.found)
    assert [
        (problem.line, problem.key)
        for problem in sorted(problems.found, key=lambda p: (p.line, p.key))
    ] == [
        (1, "name"),
        (2, "max_batch_size"),
        (3, "decoupld"),
        (5, "input[0]"),
        (5, "input[0].data_tpye"),
        (6, "input[1].data_type"),
        (6, "input[1].dims"),
        (7, "input[2]"),
        (7, "input[2].name"),
        (9, "instance_group[0].count"),
        (10, "model_transaction_policy.decoupled"),
        (11, "parameters"),
        (12, "backend"),
    ]
    lines = "\n".join(problem_texts(problems))
    assert "input[0].data_tpye: there is no such field; did you mean 'data_type'?" in lines
    assert "expected one of TYPE_INVALID, TYPE_BOOL" in lines
    assert "did you mean 'TYPE_INT32'?" in lines
    assert "max_batch_size: expected an integer, got many" in lines
    assert "99999999999 is not within -2147483648 to 2147483647" in lines
    assert "backend: expected a string in quotes, got python" in lines


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (
            "priority_queue_policy [ { key: 1 value: { max_queue_size: 3 } } ]",
            "requests of every priority use the default_queue_policy",
        ),
        ("preserve_ordering: true", "responses are sent as soon as they are ready"),
    ],
)
def test_unsupported_settings_of_batching_are_reported_without_effect(
    tmp_path: Path, field: str, why: str
) -> None:
    _, problems = read(tmp_path, INPUT + "dynamic_batching { preserve_ordering: false }")
    assert problems.found == []
    _, problems = read(tmp_path, INPUT + "dynamic_batching {\n" + field + "\n}")
    key = "dynamic_batching." + re.split(r"[: ]", field)[0]
    (found,) = problems.warnings
    assert (found.key, found.text) == (key, f"has no effect: {why}")
    assert found.line == INPUT.count("\n") + 2


@pytest.mark.parametrize(
    ("levels", "default", "fits"),
    [(0, 0, True), (0, 7, True), (3, 1, True), (3, 3, True), (3, 0, False), (3, 4, False)],
)
def test_the_default_priority_must_be_one_of_the_levels(
    tmp_path: Path, levels: int, default: int, fits: bool
) -> None:
    batching = f"dynamic_batching {{ priority_levels: {levels} default_priority_level: {default} }}"
    config, problems = read(tmp_path, INPUT + batching)
    told = [(found.line, found.key, found.text) for found in problems.errors]
    if fits:
        assert config is not None
        assert config.dynamic_batching is not None
        assert (config.dynamic_batching.priority_levels, told) == (levels, [])
    else:
        assert told == [
            (
                2,
                "dynamic_batching.priority_levels",
                "default priority level must be in range [1, 3] for m",
            )
        ]


def test_a_file_that_is_not_text_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.pbtxt").write_bytes(b"\xff\xfe\x00")
    problems = Problems()
    assert read_model_config(folder, problems) is None
    assert [problem.text for problem in problems.errors] == ["is not UTF-8 text"]


@pytest.mark.parametrize(
    ("field", "key", "expected"),
    [
        (
            "model_transaction_policy { decoupled: ${decoupled_mode} }",
            "model_transaction_policy.decoupled",
            False,
        ),
        ("instance_group [ { count: ${bls_instance_count} } ]", "instance_group.count", 1),
        (
            "dynamic_batching { max_queue_delay_microseconds: ${max_queue_delay_microseconds} }",
            "dynamic_batching.max_queue_delay_microseconds",
            0,
        ),
        (
            "dynamic_batching { default_queue_policy { max_queue_size: ${max_queue_size} } }",
            "dynamic_batching.default_queue_policy.max_queue_size",
            0,
        ),
        (
            "dynamic_batching { preferred_batch_size: [ ${triton_max_batch_size} ] }",
            "dynamic_batching.preferred_batch_size",
            [],
        ),
        ('backend: "${triton_backend}"', "backend", "tensorrtllm"),
        (
            'output [ { name: "l" data_type: ${logits_datatype} dims: [ 1 ] } ]',
            "output.data_type",
            "TYPE_FP32",
        ),
    ],
)
def test_an_unfilled_variable_gets_its_default_with_one_warning(
    tmp_path: Path, field: str, key: str, expected: object
) -> None:
    config, problems = read(tmp_path, INPUT + field)
    assert config is not None
    value: object = config.document
    for part in key.split("."):
        value = value[0] if isinstance(value, list) else value
        assert isinstance(value, dict)
        value = value[part]
    assert value == expected
    assert problems.errors == ()
    assert len(problems.warnings) == 1
    assert "was not filled" in problems.warnings[0].text
    assert problems.warnings[0].line == 2


def test_an_unfilled_string_parameter_is_unset_and_kept_in_the_document(tmp_path: Path) -> None:
    config, problems = read(
        tmp_path,
        'parameters { key: "a" value { string_value: "${a}" } }\n'
        'parameters { key: "b" value { string_value: "" } }\n'
        'parameters { key: "c" value { string_value: "no" } }\n'
        'parameters { key: "d" value { string_value: "False" } }\n',
    )
    assert config is not None
    assert [config.parameter(name) for name in "abcx"] == [None, None, "no", None]
    assert [config.flag(name) for name in "abcdx"] == [None, None, None, False, None]
    assert config_document(config, False)["parameters"]["a"] == {"string_value": "${a}"}
    assert config.unfilled == {"parameters.a"}
    assert problems.warnings == ()  # the reader of parameters warns


def test_version_policies_choose_versions() -> None:
    assert VersionPolicy().choose((1, 3, 2)) == (3,)
    assert VersionPolicy("latest", 2).choose((1, 3, 2)) == (2, 3)
    assert VersionPolicy("all").choose((3, 1)) == (1, 3)
    assert VersionPolicy("specific", versions=(2, 9)).choose((1, 2)) == (2,)


def test_every_type_of_the_schema_is_declared() -> None:
    scalars = {"string", "bool", "float", "int32", "uint32", "int64", "uint64"}
    used = {kind.rpartition(" ")[2] for message in MESSAGES.values() for kind in message.values()}
    assert used - scalars - set(ENUMS) - set(MESSAGES) == set()


def test_the_first_problems_of_a_file_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    text = INPUT + "".join(f"field_{number}: 1\n" for number in range(2000))
    _, problems = read(tmp_path, text)
    lines = [str(problem) for problem in problems.found]
    assert len(lines) == len(problems.errors) == 21
    assert lines[0].endswith("config.pbtxt:2: field_0: there is no such field")
    assert lines[-1].endswith("config.pbtxt: and 1980 more errors")
    assert (problems.count(fatal=True), problems.count(fatal=False)) == (2000, 0)


def test_warnings_of_a_file_are_counted_apart_from_its_errors(tmp_path: Path) -> None:
    repeated = 'parameters { key: "k" value { string_value: "x" } }\n'
    _, problems = read(tmp_path, INPUT + "wrong: 1\n" + repeated * 151)
    assert (problems.count(fatal=True), problems.count(fatal=False)) == (1, 150)
    assert str(problems.warnings[-1]).endswith("and 50 more warnings")
    assert problems.found[0].fatal
    assert len(problems.found) == 102


def test_a_long_text_of_the_file_is_shortened_in_the_problem(tmp_path: Path) -> None:
    _, problems = read(tmp_path, f'name: "{"a" * 60_000}"\n')
    (problem,) = problems.errors
    assert len(str(problem)) < 1000 + len(str(tmp_path))
    assert problem.text.startswith("'aaa")
    assert problem.text.endswith("folder, 'm'")


def test_an_ensemble_with_too_many_steps_is_refused(tmp_path: Path) -> None:
    steps = 'step { model_name: "x" }\n' * 501
    text = f'platform: "ensemble"\n{INPUT}ensemble_scheduling {{\n{steps}}}'
    config, problems = read(tmp_path, text)
    assert config is not None
    check_graph(config, {"m": config}, problems)
    (problem,) = problems.errors
    assert problem.text == "has 501 steps; at most 500 are possible"

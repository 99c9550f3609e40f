"""`sequence_batching` of a configuration: settings that are read, refused or without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.repository.config import ModelConfig, read_model_config
from slipstream.repository.describe import config_document
from slipstream.repository.problems import Problems
from slipstream.repository.sequences import Control, SequenceBatching

HEAD = 'name: "m"\nbackend: "python"\ninput [ { name: "a" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
START = '{ name: "S" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] }'


def read(folder: Path, text: str) -> tuple[ModelConfig | None, list[tuple[bool, int, str, str]]]:
    (folder / "m").mkdir()
    (folder / "m" / "config.pbtxt").write_text(text)
    problems = Problems()
    config = read_model_config(folder / "m", problems)
    return config, [(found.fatal, found.line, found.key, found.text) for found in problems.found]


@pytest.mark.parametrize(
    ("rows", "text", "idle", "held", "together"),
    [
        (0, "", 1_000_000, 1, 1),
        (4, "direct { } max_sequence_idle_microseconds: 7", 7, 4, 1),
        (4, "oldest { }", 1_000_000, 4, 4),
        (4, "oldest { max_candidate_sequences: 9 }", 1_000_000, 9, 4),
    ],
)
def test_sequence_settings_are_read(
    tmp_path: Path, rows: int, text: str, idle: int, held: int, together: int
) -> None:
    corrid = '{ name: "I" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] }'
    batching = f"max_batch_size: {rows}\nsequence_batching {{ {text} control_input [ {START}, {corrid} ] }}"
    config, told = read(tmp_path, HEAD + batching)
    assert told == []
    assert config is not None
    start, identity = "CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_CORRID"
    controls = (Control("S", start, "INT32", (0, 1)), Control("I", identity, "BYTES"))
    assert config.sequence_batching == SequenceBatching(idle, held, together, controls)
    assert (
        config_document(config, False)["sequence_batching"]["max_sequence_idle_microseconds"]
        == idle
    )


BOTH = "one of int32_false_true, fp32_false_true, bool_false_true, with two values"
TYPES = "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING"
AS_THEY_COME = "has no effect: requests are executed as soon as an instance is free"


@pytest.mark.parametrize(
    ("fatal", "text", "key", "problem"),
    [
        (
            True,
            'state [ { input_name: "i" output_name: "o" } ]',
            "state",
            "is not supported: a Python model stores its own state",
        ),
        (
            True,
            "iterative_sequence: true",
            "iterative_sequence",
            "is not supported: a model receives each request once",
        ),
        (True, "direct { } oldest { }", "oldest", "cannot be given together with direct"),
        (
            True,
            'control_input [ { name: "S" } ]',
            "control_input[0]",
            "must have a name and one control",
        ),
        (
            True,
            f"control_input [ {START}, {START} ]",
            "control_input[1]",
            "CONTROL_SEQUENCE_START is given more than once",
        ),
        (
            True,
            'control_input [ { name: "S" control [ { kind: CONTROL_SEQUENCE_END } ] } ]',
            "control_input[0]",
            f"CONTROL_SEQUENCE_END must have {BOTH}",
        ),
        (
            True,
            f"control_input [ {START.replace('0, 1', '1')} ]",
            "control_input[0]",
            f"CONTROL_SEQUENCE_START must have {BOTH}",
        ),
        (
            True,
            'control_input [ { name: "S" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } ] } ]',
            "control_input[0]",
            f"CONTROL_SEQUENCE_CORRID must have a data_type of {TYPES}, and nothing else",
        ),
        (
            False,
            f"control_input [ {START.replace('START', 'READY')} ]",
            "control_input[0]",
            "has no effect: without oldest, requests are executed one by one, and each of them is ready",
        ),
        (
            False,
            "direct { minimum_slot_utilization: 0.5 }",
            "direct.minimum_slot_utilization",
            AS_THEY_COME,
        ),
        (
            False,
            "direct { max_queue_delay_microseconds: 5 }",
            "direct.max_queue_delay_microseconds",
            AS_THEY_COME,
        ),
        (
            False,
            "oldest { max_queue_delay_microseconds: 5 }",
            "oldest.max_queue_delay_microseconds",
            AS_THEY_COME,
        ),
        (
            False,
            "oldest { preferred_batch_size: [ 2 ] }",
            "oldest.preferred_batch_size",
            "has no effect: a batch holds all requests that are waiting",
        ),
        (
            False,
            "oldest { preserve_ordering: true }",
            "oldest.preserve_ordering",
            "has no effect: responses are sent as soon as they are ready",
        ),
    ],
)
def test_unsupported_sequence_settings_are_reported(
    tmp_path: Path, fatal: bool, text: str, key: str, problem: str
) -> None:
    _, told = read(tmp_path, f"{HEAD}max_batch_size: 4\nsequence_batching {{\n{text} }}")
    assert told == [(fatal, 6, f"sequence_batching.{key}", problem)]


def test_sequence_batching_outside_a_python_model_is_reported(tmp_path: Path) -> None:
    _, told = read(tmp_path, HEAD + "sequence_batching { }\ndynamic_batching { }")
    assert told == [
        (True, 4, "sequence_batching", "cannot be given together with dynamic_batching")
    ]
    (tmp_path / "other").mkdir()
    config, told = read(
        tmp_path / "other", HEAD.replace("python", "tensorrtllm") + "sequence_batching { }"
    )
    assert config is not None
    assert config.sequence_batching is None
    why = "has no effect: only Python models keep state between requests"
    assert told == [(False, 4, "sequence_batching", why)]

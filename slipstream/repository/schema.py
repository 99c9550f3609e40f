"""The fields of a Triton model configuration, and the reader of a parsed config.pbtxt.

`MESSAGES` lists the fields of every message in the order of model_config.proto, which is the order
of `/config`. A type is a scalar, an enum or a message. It may follow `repeated`, `map` (with string
keys) or `maybe` (a scalar without a default). A test compares `MESSAGES` with the proto.

The result has the form of protobuf's JSON: scalars and lists are always present, messages only
where the file has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slipstream.repository.pbtxt import EMPTY_LIST, Message, Scalar
from slipstream.repository.problems import Problems, did_you_mean

ENUMS: dict[str, tuple[str, ...]] = {
    "DataType": (
        "TYPE_INVALID",
        "TYPE_BOOL",
        "TYPE_UINT8",
        "TYPE_UINT16",
        "TYPE_UINT32",
        "TYPE_UINT64",
        "TYPE_INT8",
        "TYPE_INT16",
        "TYPE_INT32",
        "TYPE_INT64",
        "TYPE_FP16",
        "TYPE_FP32",
        "TYPE_FP64",
        "TYPE_STRING",
        "TYPE_BF16",
    ),
    "Format": ("FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"),
    "InstanceKind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
    "SecondaryKind": ("KIND_NVDLA",),
    "Priority": ("PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"),
    "TimeoutAction": ("REJECT", "DELAY"),
    "BatchInputKind": (
        "BATCH_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
        "BATCH_ITEM_SHAPE",
        "BATCH_ITEM_SHAPE_FLATTEN",
    ),
    "BatchOutputKind": ("BATCH_SCATTER_WITH_INPUT_SHAPE",),
    "ControlKind": (
        "CONTROL_SEQUENCE_START",
        "CONTROL_SEQUENCE_READY",
        "CONTROL_SEQUENCE_END",
        "CONTROL_SEQUENCE_CORRID",
    ),
}

INTEGER_RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint64": (0, 2**64 - 1),
}
_SCALARS = {"string": "", "bool": False, "float": 0.0, **dict.fromkeys(INTEGER_RANGES, 0)}

MESSAGES: dict[str, dict[str, str]] = {
    "ModelConfig": {
        "name": "string",
        "platform": "string",
        "backend": "string",
        "runtime": "string",
        "version_policy": "VersionPolicy",
        "max_batch_size": "int32",
        "input": "repeated Input",
        "output": "repeated Output",
        "batch_input": "repeated BatchInput",
        "batch_output": "repeated BatchOutput",
        "optimization": "Optimization",
        "dynamic_batching": "DynamicBatching",
        "sequence_batching": "SequenceBatching",
        "ensemble_scheduling": "Ensembling",
        "instance_group": "repeated InstanceGroup",
        "default_model_filename": "string",
        "cc_model_filenames": "map string",
        "metric_tags": "map string",
        "parameters": "map Parameter",
        "model_warmup": "repeated Warmup",
        "model_operations": "Operations",
        "model_transaction_policy": "TransactionPolicy",
        "model_repository_agents": "RepositoryAgents",
        "response_cache": "Switch",
        "model_metrics": "Metrics",
    },
    "VersionPolicy": {"latest": "Latest", "all": "Nothing", "specific": "Specific"},
    "Latest": {"num_versions": "uint32"},
    "Nothing": {},
    "Specific": {"versions": "repeated int64"},
    "Shape": {"shape": "repeated int64"},
    "Input": {
        "name": "string",
        "data_type": "DataType",
        "format": "Format",
        "dims": "repeated int64",
        "reshape": "Shape",
        "is_shape_tensor": "bool",
        "allow_ragged_batch": "bool",
        "optional": "bool",
        "is_non_linear_format_io": "bool",
    },
    "Output": {
        "name": "string",
        "data_type": "DataType",
        "dims": "repeated int64",
        "reshape": "Shape",
        "label_filename": "string",
        "is_shape_tensor": "bool",
        "is_non_linear_format_io": "bool",
    },
    "BatchInput": {
        "kind": "BatchInputKind",
        "target_name": "repeated string",
        "data_type": "DataType",
        "source_input": "repeated string",
    },
    "BatchOutput": {
        "target_name": "repeated string",
        "kind": "BatchOutputKind",
        "source_input": "repeated string",
    },
    "Optimization": {
        "graph": "Graph",
        "priority": "Priority",
        "cuda": "Cuda",
        "execution_accelerators": "Accelerators",
        "input_pinned_memory": "Switch",
        "output_pinned_memory": "Switch",
        "gather_kernel_buffer_threshold": "uint32",
        "eager_batching": "bool",
    },
    "Graph": {"level": "int32"},
    "Cuda": {
        "graphs": "bool",
        "busy_wait_events": "bool",
        "graph_spec": "repeated GraphSpec",
        "output_copy_stream": "bool",
    },
    "GraphSpec": {"batch_size": "int32", "input": "map Dim", "graph_lower_bound": "LowerBound"},
    "LowerBound": {"batch_size": "int32", "input": "map Dim"},
    "Dim": {"dim": "repeated int64"},
    "Accelerators": {
        "gpu_execution_accelerator": "repeated Accelerator",
        "cpu_execution_accelerator": "repeated Accelerator",
    },
    "Accelerator": {"name": "string", "parameters": "map string"},
    "Switch": {"enable": "bool"},
    "DynamicBatching": {
        "preferred_batch_size": "repeated int32",
        "max_queue_delay_microseconds": "uint64",
        "preserve_ordering": "bool",
        "priority_levels": "uint64",
        "default_priority_level": "uint64",
        "default_queue_policy": "QueuePolicy",
        "priority_queue_policy": "map QueuePolicy",
    },
    "QueuePolicy": {
        "timeout_action": "TimeoutAction",
        "default_timeout_microseconds": "uint64",
        "allow_timeout_override": "bool",
        "max_queue_size": "uint32",
    },
    "SequenceBatching": {
        "direct": "Direct",
        "oldest": "Oldest",
        "max_sequence_idle_microseconds": "uint64",
        "control_input": "repeated ControlInput",
        "state": "repeated State",
        "iterative_sequence": "bool",
    },
    "Direct": {"max_queue_delay_microseconds": "uint64", "minimum_slot_utilization": "float"},
    "Oldest": {
        "max_candidate_sequences": "int32",
        "preferred_batch_size": "repeated int32",
        "max_queue_delay_microseconds": "uint64",
        "preserve_ordering": "bool",
    },
    "ControlInput": {"name": "string", "control": "repeated Control"},
    "Control": {
        "kind": "ControlKind",
        "int32_false_true": "repeated int32",
        "fp32_false_true": "repeated float",
        "bool_false_true": "repeated bool",
        "data_type": "DataType",
    },
    "State": {
        "input_name": "string",
        "output_name": "string",
        "data_type": "DataType",
        "dims": "repeated int64",
        "initial_state": "repeated InitialState",
        "use_same_buffer_for_input_output": "bool",
        "use_growable_memory": "bool",
    },
    "InitialState": {
        "data_type": "DataType",
        "dims": "repeated int64",
        "zero_data": "maybe bool",
        "data_file": "maybe string",
        "name": "string",
    },
    "Ensembling": {"step": "repeated Step"},
    "Step": {
        "model_name": "string",
        "model_version": "int64",
        "input_map": "map string",
        "output_map": "map string",
        "model_namespace": "string",
    },
    "InstanceGroup": {
        "name": "string",
        "kind": "InstanceKind",
        "count": "int32",
        "rate_limiter": "RateLimiter",
        "gpus": "repeated int32",
        "secondary_devices": "repeated SecondaryDevice",
        "profile": "repeated string",
        "passive": "bool",
        "host_policy": "string",
    },
    "RateLimiter": {"resources": "repeated Resource", "priority": "uint32"},
    "Resource": {"name": "string", "global": "bool", "count": "uint32"},
    "SecondaryDevice": {"kind": "SecondaryKind", "device_id": "int64"},
    "Parameter": {"string_value": "string"},
    "Warmup": {
        "name": "string",
        "batch_size": "uint32",
        "inputs": "map WarmupInput",
        "count": "uint32",
    },
    "WarmupInput": {
        "data_type": "DataType",
        "dims": "repeated int64",
        "zero_data": "maybe bool",
        "random_data": "maybe bool",
        "input_data_file": "maybe string",
    },
    "Operations": {"op_library_filename": "repeated string"},
    "TransactionPolicy": {"decoupled": "bool"},
    "RepositoryAgents": {"agents": "repeated Accelerator"},
    "Metrics": {"metric_control": "repeated MetricControl"},
    "MetricControl": {
        "metric_identifier": "MetricIdentifier",
        "histogram_options": "HistogramOptions",
    },
    "MetricIdentifier": {"family": "string"},
    "HistogramOptions": {"buckets": "repeated float"},
}

# Values of template variables that were not filled. Other variables get the default of their type.
VARIABLE_DEFAULTS: dict[str, Any] = {
    "decoupled_mode": False,
    "max_queue_delay_microseconds": 0,
    "max_queue_size": 0,
    "preprocessing_instance_count": 1,
    "postprocessing_instance_count": 1,
    "bls_instance_count": 1,
    "triton_backend": "tensorrtllm",
    "logits_datatype": "TYPE_FP32",
    "encoder_input_features_data_type": "TYPE_FP16",
    "prompt_embedding_table_data_type": "TYPE_FP16",
}

_TRUE = {"true", "True", "t", "1"}
_FALSE = {"false", "False", "f", "0"}


@dataclass
class FileReading:
    """The state of reading one file: problems, line numbers, and fields left as `${…}`."""

    file: str
    problems: Problems
    lines: dict[str, int] = field(default_factory=dict)  # "parameters.tokenizer_dir" → line
    unfilled: set[str] = field(default_factory=set)

    def message(self, type_name: str, message: Message, path: str = "") -> dict[str, Any]:
        """Return the fields of a message with defaults filled in. Wrong fields are reported."""
        declared = MESSAGES[type_name]
        values = {name: _default(kind) for name, kind in declared.items()}
        given: set[str] = set()
        for item in message.fields:
            where = f"{path}{item.name}"
            if item.name not in declared:
                keeps = self.problems.keeps_errors(self.file)
                hint = did_you_mean(item.name, declared) if keeps else ""
                self.problems.error(self.file, item.line, where, f"there is no such field{hint}")
                continue
            kind = declared[item.name]
            if item.value is EMPTY_LIST:
                self.lines.setdefault(where, item.line)
                continue
            if item.name in given and not kind.startswith(("repeated ", "map ")):
                self.problems.error(self.file, item.line, where, "given more than once")
                continue
            given.add(item.name)
            self.lines.setdefault(where, item.line)
            self._store(values, item.name, kind, item.value, where, item.line)
        return {name: value for name, value in values.items() if value is not None}

    def _store(
        self,
        values: dict[str, Any],
        name: str,
        kind: str,
        value: Scalar | Message,
        where: str,
        line: int,
    ) -> None:
        shape, _, element = kind.rpartition(" ")
        if shape == "map":
            self._store_entry(values[name], element, value, where, line)
            return
        if shape == "repeated":
            where = f"{where}[{len(values[name])}]"
            self.lines[where] = line
        read = self.value(element, value, where, line)
        if read is None:
            return  # the problem was reported; the default stays
        if shape == "repeated":
            values[name].append(read)
        else:
            values[name] = read

    def _store_entry(
        self, entries: dict[str, Any], element: str, value: Scalar | Message, where: str, line: int
    ) -> None:
        """Store one entry of a map, which the file writes as a message of `key` and `value`."""
        if not isinstance(value, Message):
            self.problems.error(self.file, line, where, "expected { key: … value: … }")
            return
        parts = {item.name: item.value for item in value.fields}
        key = parts.pop("key", None)
        content = parts.pop("value", None)
        if not isinstance(key, Scalar) or parts:
            extra = f", not '{next(iter(parts))}'" if parts else ""
            self.problems.error(self.file, line, where, f"expected {{ key: … value: … }}{extra}")
            return
        where = f"{where}.{key.text}"
        self.lines[where] = line
        if key.text in entries:
            self.problems.warn(self.file, line, where, "given more than once; the last one counts")
        read = None if content is None else self.value(element, content, where, line)
        entries[key.text] = read if read is not None else _empty(element)

    def value(self, kind: str, value: Scalar | Message, where: str, line: int) -> Any:
        """Return the value, or None after reporting that it is wrong or that a default is used."""
        if kind in MESSAGES:
            if isinstance(value, Message):
                return self.message(kind, value, where + ".")
            self.problems.error(
                self.file, line, where, f"expected a message in braces, got {value.text}"
            )
            return None
        if isinstance(value, Message):
            self.problems.error(
                self.file, line, where, f"expected {_describe_type(kind)}, got a message in braces"
            )
            return None
        if value.kind == "placeholder":
            return self._use_default(kind, value, where)
        problem, read = _scalar(kind, value)
        if problem:
            self.problems.error(self.file, value.line, where, problem)
        return read

    def _use_default(self, kind: str, value: Scalar, where: str) -> Any:
        """Return the value of a template variable that was not filled, with a warning."""
        self.unfilled.add(where)
        default = VARIABLE_DEFAULTS.get(value.text, _empty(kind))
        in_list = where.endswith("]") and value.text not in VARIABLE_DEFAULTS
        meaning = "using the default"
        if in_list:
            meaning = "left out"
        elif default != "":
            meaning = f"using the default ({default})"
        # max_batch_size defaults to the engine's, which the reader of engines reports
        if where != "max_batch_size":
            self.problems.warn(
                self.file, value.line, where, f"${{{value.text}}} was not filled: {meaning}"
            )
        return None if in_list else default


def _default(kind: str) -> Any:
    shape, _, element = kind.rpartition(" ")
    if shape == "repeated":
        return []
    if shape == "map":
        return {}
    if shape == "maybe" or element in MESSAGES:
        return None
    return _empty(element)


def _empty(kind: str) -> Any:
    if kind in ENUMS:
        return ENUMS[kind][0]
    if kind in MESSAGES:
        return FileReading("", Problems()).message(kind, Message((), 0))
    return _SCALARS[kind]


def _describe_type(kind: str) -> str:
    if kind in ENUMS:
        return "one of " + ", ".join(ENUMS[kind])
    return {"string": "a string in quotes", "bool": "true or false", "float": "a number"}.get(
        kind, "an integer"
    )


def _scalar(kind: str, value: Scalar) -> tuple[str, Any]:
    """Return (problem, value): an empty problem, or a problem and None."""
    shown = f'"{value.text}"' if value.kind == "string" else value.text
    wrong = f"expected {_describe_type(kind)}, got {shown}"
    if kind == "string":
        return ("", value.text) if value.kind == "string" else (wrong, None)
    if value.kind == "string":
        return wrong, None
    if kind == "bool":
        return ("", value.text in _TRUE) if value.text in _TRUE | _FALSE else (wrong, None)
    if kind in ENUMS:
        if value.text in ENUMS[kind]:
            return "", value.text
        return wrong + did_you_mean(value.text[:100], ENUMS[kind]), None
    number = _number(kind, value.text)
    if number is None:
        return wrong, None
    low, high = INTEGER_RANGES.get(kind, (number, number))
    if low <= number <= high:
        return "", number
    return f"{shown} is not within {low} to {high}", None


def _number(kind: str, text: str) -> int | float | None:
    try:
        if kind == "float":
            return float(text.rstrip("fF") if text.lower() not in ("inf", "-inf") else text)
        digits = text.lstrip("-")
        if digits.startswith("0") and digits.isdigit() and len(digits) > 1:
            return int(text, 8)
        return int(text, 16 if digits.lower().startswith("0x") else 10)
    except ValueError:
        return None

"""Requests to an engine model, tensor by tensor, and what its answers hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from slipstream.client.tensors import Array


@dataclass(frozen=True)
class TokenRequest:
    """What a token-level client asks for; None: the tensor is not sent."""

    tokens: list[int]
    output_length: int
    end_id: int | None = None
    pad_id: int | None = None
    beam_width: int = 1
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.0
    streaming: bool = False
    return_log_probs: bool = False
    # tensor name: a number or a truth value
    optional: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)  # tensors sent as they are

    def inputs(self) -> dict[str, Array]:
        sent = {
            "input_ids": numpy.array([self.tokens], dtype=numpy.int32),
            "input_lengths": scalar(len(self.tokens)),
            "request_output_len": scalar(self.output_length),
            "beam_width": scalar(self.beam_width),
            "temperature": scalar(self.temperature),
            "streaming": scalar(self.streaming),
            "runtime_top_k": scalar(self.top_k),
            "runtime_top_p": scalar(self.top_p),
            "return_log_probs": scalar(self.return_log_probs),
        }
        for name, value in {"end_id": self.end_id, "pad_id": self.pad_id, **self.optional}.items():
            if value is not None:
                sent[name] = scalar(value)
        return {**sent, **self.arrays}


def scalar(value: bool | int | float) -> Array:
    """[[value]] in the type that the protocol's scalars of its kind have."""
    kind = (
        numpy.bool_
        if isinstance(value, bool)
        else numpy.int32
        if isinstance(value, int)
        else numpy.float32
    )
    return numpy.array([[value]], dtype=kind)


_FLOATS = {"FP16": "float16", "FP32": "float32"}


def as_declared(inputs: Mapping[str, Array], declared: Mapping[str, str]) -> dict[str, Array]:
    """The tensors in the types a model declares: lengths were UINT32 before 0.7, and INT32 from
    then on.

    A tensor that the model does not know is left out where it asks for nothing.
    """
    fitting = {}
    for name, array in inputs.items():
        wanted = declared.get(name)
        if wanted in ("INT32", "UINT32") and array.dtype in (numpy.int32, numpy.uint32):
            array = array.astype(wanted.lower())
        elif wanted in _FLOATS and array.dtype in (numpy.float16, numpy.float32):
            array = array.astype(_FLOATS[wanted])
        if wanted is not None or array.dtype == object or array.any():
            fitting[name] = array
    return fitting


def stop_inputs() -> dict[str, Array]:
    """The tensors of a stop order; a request needs some tokens to be one."""
    return {
        "input_ids": scalar(0),
        "input_lengths": scalar(0),
        "request_output_len": scalar(0),
        "stop": scalar(True),
    }


def lora_arrays(folder: Path | None, task_id: int | None) -> dict[str, Array]:
    """The tensors of an adapter that `slipstream lora` (or hf_lora_convert.py) wrote; its number
    alone where the server has it already.
    """
    arrays: dict[str, Array] = {}
    if task_id:
        arrays["lora_task_id"] = numpy.array([[task_id]], dtype=numpy.uint64)
    if folder is None:
        return arrays
    weights = folder / "model.lora_weights.npy"
    config = folder / "model.lora_config.npy"
    if not config.is_file():
        config = folder / "model.lora_keys.npy"  # its name before 0.8
    for path in (weights, config):
        if not path.is_file():
            raise ValueError(
                f"{path} is missing; make it with: slipstream lora -i ADAPTER -o {folder}"
            )
    arrays["lora_weights"] = numpy.load(weights, allow_pickle=False)
    arrays["lora_config"] = numpy.load(config, allow_pickle=False)
    return arrays


def prompt_table_arrays(path: Path, task: int, dtype: str) -> dict[str, Array]:
    """One task's rows of a table [tasks, rows, hidden], as tensors of a request."""
    table = numpy.load(path, allow_pickle=False)
    rows = table[task].astype(dtype)
    return {"prompt_embedding_table": rows[None], "prompt_vocab_size": scalar(int(rows.shape[0]))}


def beams_of(outputs: Mapping[str, Array], prompt: list[int]) -> list[list[int]]:
    """The new tokens of each beam, whether or not the server sent the prompt back before them."""
    beams = []
    rows = outputs["output_ids"][0]
    whole = numpy.full(len(rows), rows.shape[-1])  # before 0.6 nothing said how long an answer is
    for row, length in zip(rows, outputs.get("sequence_length", whole).reshape(-1), strict=True):
        tokens = [int(token) for token in row[: int(length)]]
        beams.append(tokens[len(prompt) :] if tokens[: len(prompt)] == prompt else tokens)
    return beams

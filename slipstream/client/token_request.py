"""The tensors of requests to an engine model, and the tokens of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from slipstream.client.tensors import Array, scalar


@dataclass(frozen=True)
class TokenRequest:
    """A request of a token-level client. A tensor whose value is None is not sent."""

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
    # tensor name: a number or a boolean
    optional: Mapping[str, Any] = field(default_factory=dict)
    # further tensors
    arrays: Mapping[str, Array] = field(default_factory=dict)

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


_FLOATS = {"FP16": "float16", "FP32": "float32"}


def as_declared(inputs: Mapping[str, Array], declared: Mapping[str, str]) -> dict[str, Array]:
    """Return the tensors in the types that a model declares.

    Lengths were UINT32 before 0.7 and are INT32 since then. A tensor that the model does not
    declare is left out if all its values are zero.
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
    """Return the tensors of a stop request, with the tokens that every request must have."""
    return {
        "input_ids": scalar(0),
        "input_lengths": scalar(0),
        "request_output_len": scalar(0),
        "stop": scalar(True),
    }


def lora_arrays(folder: Path | None, task_id: int | None) -> dict[str, Array]:
    """Return the tensors of an adapter that `slipstream lora` (or hf_lora_convert.py) wrote.

    Without a folder this is the task id only: the server has the adapter in its cache.
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
    """Return the request tensors for one task of a table [tasks, rows, hidden]."""
    table = numpy.load(path, allow_pickle=False)
    rows = table[task].astype(dtype)
    return {"prompt_embedding_table": rows[None], "prompt_vocab_size": scalar(int(rows.shape[0]))}


def beam_tokens(outputs: Mapping[str, Array], prompt: list[int]) -> list[list[int]]:
    """Return the new tokens of each beam, without the prompt that some servers put before them."""
    beams = []
    rows = outputs["output_ids"][0]
    whole = numpy.full(len(rows), rows.shape[-1])  # before 0.6 there was no sequence_length
    for row, length in zip(rows, outputs.get("sequence_length", whole).reshape(-1), strict=True):
        tokens = [int(token) for token in row[: int(length)]]
        beams.append(tokens[len(prompt) :] if tokens[: len(prompt)] == prompt else tokens)
    return beams


def gpt_inputs(
    tokens: Array,
    output_length: int,
    beam_width: int,
    top_k: int,
    top_p: float,
    pad_id: int,
    end_id: int,
) -> dict[str, Array]:
    """Return the tensors for the engine model of the gpt repository. `tokens`: [batch, length]."""
    batch = tokens.shape[0]
    scalars = {
        "input_lengths": tokens.shape[1],
        "request_output_len": output_length,
        "pad_id": pad_id,
        "end_id": end_id,
        "beam_width": beam_width,
        "temperature": 1.0,
        "runtime_top_k": top_k,
        "runtime_top_p": top_p,
        "len_penalty": 1.0,
        "repetition_penalty": 1.0,
        "min_length": 1,
        "presence_penalty": 0.0,
    }
    inputs = {"input_ids": tokens.astype(numpy.int32)}
    inputs |= {name: numpy.repeat(scalar(value), batch, axis=0) for name, value in scalars.items()}
    inputs["random_seed"] = numpy.zeros((batch, 1), dtype=numpy.uint64)
    return inputs

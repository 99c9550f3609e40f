"""llama.cpp through the low-level bindings of llama_cpp.

A batch holds one token of every sequence, as in llama.cpp's server.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import llama_cpp
import numpy as np
from worker_protocol import Generate, Timed, serve

BATCH_TOKENS = 2048  # tokens per llama_decode call, the default of llama.cpp


class Context:
    """Cache for some sequences of a length, each in its own part, which is the faster layout."""

    def __init__(self, model: llama_cpp.llama_model_p, sequences: int, length: int) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = sequences * -(-length // 256) * 256
        parameters.n_seq_max = sequences
        parameters.n_batch = BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = len(os.sched_getaffinity(0))
        self.handle = llama_cpp.llama_init_from_model(model, parameters)
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        assert self.handle, "llama.cpp could not make a context"

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Decode a batch and return the most likely next token by sequence.

        An entry is (token, position, sequence, whether to sample after it).
        """
        batch = self.batch
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, samples) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.logits[index] = samples
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
        assert llama_cpp.llama_decode(self.handle, batch) == 0, "llama_decode failed"
        return {entry[2]: self._best(index) for index, entry in enumerate(entries) if entry[3]}

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.handle, index)
        array = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocabulary)).contents
        return int(np.frombuffer(array, np.float32).argmax())

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), True)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.handle)


def start(options: dict[str, Any]) -> Generate:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        options["model"].encode(), llama_cpp.llama_model_default_params()
    )
    assert model, f"llama.cpp cannot load {options['model']}"

    def generate(prompts: list[list[int]], max_tokens: int) -> Timed:
        context = Context(model, len(prompts), max(map(len, prompts)) + max_tokens)
        context.decode([(0, 0, 0, True)])  # the first call allocates memory
        context.clear()
        timed = _generate(context, prompts, max_tokens)
        context.close()
        return timed

    return generate


def _generate(context: Context, prompts: list[list[int]], max_tokens: int) -> Timed:
    began = time.perf_counter()
    entries = [
        (token, position, sequence, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    tokens: list[list[int]] = [[] for _ in prompts]
    first = 0.0
    for begin in range(0, len(entries), BATCH_TOKENS):
        for sequence, token in context.decode(entries[begin : begin + BATCH_TOKENS]).items():
            first = first or time.perf_counter() - began
            tokens[sequence].append(token)
    for step in range(max_tokens - 1):
        decoded = context.decode(
            [(tokens[n][-1], len(prompt) + step, n, True) for n, prompt in enumerate(prompts)]
        )
        for sequence, token in decoded.items():
            tokens[sequence].append(token)
    return Timed(first, time.perf_counter() - began, tokens)


if __name__ == "__main__":
    serve(start)

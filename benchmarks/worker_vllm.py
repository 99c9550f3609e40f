"""vLLM on a CPU: its engine runs in its own process and is stepped from here."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from worker_protocol import Generate, Timed, serve

# Size of the KV cache in GiB, enough for every case. The default is half of the memory.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def start(options: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    engine = LLM(
        options["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=32,
        enforce_eager=options.get("eager", False),
    ).llm_engine
    numbers = itertools.count()

    def generate(prompts: list[list[int]], max_tokens: int) -> Timed:
        parameters = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        # vLLM adds a suffix to request ids, so answers are identified by the number in front.
        numbered = {str(next(numbers)): prompt for prompt in prompts}
        for number, prompt in numbered.items():
            engine.add_request(number, {"prompt_token_ids": prompt}, parameters)
        tokens: dict[str, list[int]] = {}
        first = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                first = first or time.perf_counter() - began
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        return Timed(first, time.perf_counter() - began, [tokens[number] for number in numbered])

    return generate


if __name__ == "__main__":
    serve(start)

"""Figures of peers from an earlier run, printed where the shape and the workload are the same."""

from __future__ import annotations

from serving.cells import COMPLETIONS, Cell, Figures, Spread

# vLLM 0.26.0 on one H200, 2026-11-16, `vllm bench serve --backend openai --dataset-name random
# --ignore-eos`, prefix caching off, its PyTorch sampler: (shape, prompt tokens, output tokens) →
# (concurrency, sampled) → (tok/s, mean TTFT, p99 TTFT, mean TPOT)
_VLLM = {
    ("llama3-8b-49k", 512, 128): {
        (1, False): (208.1, 24.7, 41.5, 4.65),
        (64, False): (5089.0, 528.0, 867.0, 8.48),
        (256, False): (6516.0, 1902.0, 3477.0, 24.4),
        (256, True): (4413.0, 3262.0, 9156.0, 32.5),
    }
}
NOTE = "an earlier run"
_NONE = float("nan")


def published(shape: str, cell: Cell) -> Figures | None:
    """Return the published figures of `vllm serve` for a load, if there are any."""
    known = _VLLM.get((shape, cell.prompt_tokens, cell.output_tokens), {})
    found = known.get((cell.concurrency, cell.sampled))
    if found is None or cell.rate or cell.api != COMPLETIONS:
        return None
    rate, mean, high, tpot = found
    ttft = Spread(mean, _NONE, high)
    itl = Spread(tpot, _NONE, _NONE)
    return Figures("vllm*", "vllm bench", cell, rate, ttft=ttft, itl=itl, tpot=tpot, note=NOTE)

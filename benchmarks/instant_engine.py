"""An engine process whose model takes no time, to measure the server alone.

Each token is the token before it plus 1. The environment variable INSTANT_ENGINE_STEP_MS sets a
minimum time per step, so that tokens do not queue up.
"""

from __future__ import annotations

import os
import time

from slipstream.engine.messages import EngineInfo, EngineStats, StepOutputs
from slipstream.engine.request import FinishReason, GenerateRequest
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.process import run
from slipstream.server.engine_link.link import RankPlace

WORDS = 1000


class InstantLoop:
    def __init__(self) -> None:
        self.info = EngineInfo(
            vocab_size=WORDS,
            max_sequence_tokens=4096,
            max_rows=1024,
            total_blocks=128,
            block_tokens=32,
            device="cpu",
            dtype="float32",
            weight_bytes=0,
            cache_bytes=0,
            load_seconds=0.0,
        )
        # request → (last token, number of tokens left)
        self._running: dict[int, tuple[int, int]] = {}
        self._outputs = StepOutputs()
        self._steps = 0
        self._step_seconds = float(os.environ.get("INSTANT_ENGINE_STEP_MS", "0")) / 1000

    def submit(self, request: GenerateRequest) -> None:
        self._running[request.request_id] = (request.prompt[-1], request.sampling.max_tokens)

    def cancel(self, request_ids: list[int], reason: FinishReason = "cancelled") -> None:
        for request_id in request_ids:
            if self._running.pop(request_id, None) is not None:
                self._add_output(request_id, [], reason)

    def has_work(self) -> bool:
        return bool(self._running or self._outputs.request_ids)

    def step(self) -> StepOutputs | None:
        """Return one token for every request."""
        self._steps += 1
        if self._step_seconds:
            time.sleep(self._step_seconds)
        for request_id, (last, left) in list(self._running.items()):
            token = (last + 1) % WORDS
            self._add_output(request_id, [token], "" if left > 1 else "length")
            if left > 1:
                self._running[request_id] = (token, left - 1)
            else:
                del self._running[request_id]
        outputs = self._outputs
        self._outputs = StepOutputs()
        return outputs if outputs.request_ids else None

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running), free_blocks=128, total_blocks=128, steps=self._steps
        )

    def check_integrity(self) -> None:
        """Do nothing: this engine has no blocks and no rows."""

    def _add_output(self, request_id: int, tokens: list[int], finish_reason: str) -> None:
        self._outputs.request_ids.append(request_id)
        self._outputs.token_counts.append(len(tokens))
        self._outputs.finish_reasons.append(finish_reason)
        self._outputs.cached_tokens.append(0)
        self._outputs.tokens += tokens


def start_instant(
    engine_folder: str, settings: EngineSettings, place: RankPlace | None
) -> InstantLoop:
    return InstantLoop()


if __name__ == "__main__":
    run(start_instant)

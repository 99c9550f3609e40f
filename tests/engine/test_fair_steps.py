"""A request for many sequences takes no step from the streams that run beside it."""

from __future__ import annotations

from run_engine import CACHE_TOKENS
from tiny_engine import build_tiny_engine

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.weights.load import start_engine

SEQUENCES = 128
STREAM = 1


def test_a_stream_gets_a_token_in_each_step_beside_many_sequences_with_log_probs(tmp_path):
    settings = EngineSettings(
        device="cpu", dtype="float32", cache_tokens=CACHE_TOKENS, max_rows=SEQUENCES + 1, threads=1
    )
    loop = start_engine(build_tiny_engine(tmp_path), settings)
    loop.submit(GenerateRequest(STREAM, [5, 6, 7], SamplingParams(max_tokens=40)))
    loop.step()
    for number in range(SEQUENCES):
        sampling = SamplingParams(
            max_tokens=20, temperature=1.0, seed=number, log_probs=True, top_log_probs=20
        )
        loop.submit(GenerateRequest(100 + number, [8] * 12, sampling))
    most = 0
    for _ in range(30):
        outputs = loop.step()
        assert outputs is not None
        counts = dict(zip(outputs.request_ids, outputs.token_counts, strict=True))
        assert counts[STREAM] == 1
        most = max(most, len(counts))
    assert most == SEQUENCES + 1

"""Runs of engines with one rank or several, for comparison. Run as a script it is one rank.

`python rank_runs.py RANK SIZE FOLDER DEVICE`: FOLDER/cases.json lists the runs, [name, engine folder,
kind] each. FOLDER/NAME.plans holds the plans of a run that are replayed, in hexadecimal. Rank 0 writes the results to FOLDER/results.json. All runs use one process group. With the
DEVICE cuda all ranks run on the first GPU, where NCCL takes each of them for a machine of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.loop import EngineLoop
from slipstream.engine.messages import Scores
from slipstream.engine.plan import StepPlan
from slipstream.engine.ranks.following import Follower, follow
from slipstream.engine.ranks.leading import LeadingRunner, RankFailed
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.ranks import connect, disconnect
from slipstream.server.engine_link.link import RankPlace
from slipstream.server.engine_link.rank_link import (
    FollowerLinks,
    LeaderLink,
    decode_order,
    encode_order,
)
from slipstream.weights.load import start_engine, start_follower

VOCABULARY = 515
BLOCK_TOKENS = 16
# NCCL refuses two ranks on one GPU. With other host ids they are on different machines for it.
_ONE_GPU = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
FLIPPED_PLAN = 3  # the plan after which the follower's token is flipped


@dataclass(frozen=True)
class Kind:
    """One kind of run: the engine's settings and the sampling of request i."""

    settings: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    requests: int = 5
    again: bool = False  # the same requests run twice
    cancels: int = 0  # requests that are cancelled at random steps


KINDS = {
    "greedy": Kind(),
    "sampled": Kind(sampling={"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.01}),
    "penalties": Kind(
        sampling={
            "temperature": 0.8,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.1,
            "no_repeat_ngram": 3,
            "logit_bias": ((3, 2.0),),
            "bad_words": ((5,), (6, 7)),
            "min_tokens": 4,
            "end_ids": (9,),
        }
    ),
    "beams": Kind(sampling={"beam_width": 3, "max_tokens": 10}, requests=2),
    "scores": Kind(
        sampling={
            "log_probs": True,
            "top_log_probs": 3,
            "prompt_log_probs": True,
            "context_logits": True,
            "generation_logits": True,
            "max_tokens": 6,
        },
        requests=3,
    ),
    "preempted": Kind({"policy": "max_utilization", "cache_tokens": 9 * BLOCK_TOKENS}),
    "host": Kind({"cache_tokens": 9 * BLOCK_TOKENS, "host_cache_bytes": 1 << 24}, again=True),
    "lookup": Kind({"lookup_tokens": 4}),
    "windowed": Kind({"attention_windows": (32,), "cache_tokens": 40 * BLOCK_TOKENS}),
    "adapters": Kind(requests=6),
    "cancels": Kind(cancels=100),
    "more cancels": Kind(cancels=1_000),
    "many cancels": Kind(cancels=10_000),
    "flipped": Kind(),
}


def settings_of(kind: Kind, ranks: int, device: str = "cpu") -> EngineSettings:
    values = {"cache_tokens": 64 * BLOCK_TOKENS, **kind.settings}
    return EngineSettings(
        dtype="float32",
        device=device,
        devices=(0,) * ranks if device == "cuda" else (),
        threads=1,
        max_rows=8,
        step_tokens=64,
        block_tokens=BLOCK_TOKENS,
        max_sequence_tokens=128,
        ranks=ranks,
        **values,
    )


def requests_of(kind: Kind, name: str, folder: str) -> list[GenerateRequest]:
    draw = random.Random(3)
    shared = [draw.randrange(VOCABULARY) for _ in range(34)]
    found = []
    for number in range(kind.requests):
        own = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(3, 30))]
        prompt = (shared if number % 2 else []) + own
        sampling = SamplingParams(**{"max_tokens": 20, "seed": number, **kind.sampling})
        adapter: dict[str, Any] = {}
        if name == "adapters" and number % 3:
            path = str(Path(folder).parent / f"adapter{number % 3}")
            adapter = {"adapter": number % 3, "adapter_source": AdapterSource(folder=path)}
        found.append(GenerateRequest(number, prompt, sampling, **adapter))
    return found


def collect(loop: EngineLoop, requests: list[GenerateRequest]) -> dict[str, Any]:
    """Return all outputs in a form that JSON keeps."""
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    numbers: dict[str, list[float]] = {}
    beams: dict[str, list[list[int]]] = {}
    scores: dict[int, Scores] = {}
    for request in requests:
        loop.submit(request)
    while loop.has_work():
        outputs = loop.step()
        if outputs is None:
            continue
        place = 0
        columns = (outputs.request_ids, outputs.token_counts, outputs.finish_reasons)
        for request_id, count, reason in zip(*columns, strict=True):
            tokens.setdefault(str(request_id), []).extend(outputs.tokens[place : place + count])
            if outputs.log_probs:
                values = outputs.log_probs[place : place + count]
                numbers.setdefault(str(request_id), []).extend(v for v in values if v == v)
            place += count
            if reason:
                reasons[str(request_id)] = reason + outputs.errors.get(request_id, "")
        for request_id, found in outputs.beams.items():
            beams[str(request_id)] = [beam.tokens for beam in found]
        for request_id, newer in outputs.scores.items():
            scores.setdefault(request_id, Scores()).merge(newer)
    for request_id, found in scores.items():
        numbers[f"{request_id} prompt"] = found.prompt_log_probs
        numbers[f"{request_id} context"] = _floats(found.context_logits)
        numbers[f"{request_id} generation"] = _floats(found.generation_logits)
    return {"tokens": tokens, "reasons": reasons, "numbers": numbers, "beams": beams}


def _floats(values: bytes) -> list[float]:
    return memoryview(bytes(values)).cast("f").tolist() if values else []


def cancel_at_random(loop: EngineLoop, count: int) -> dict[str, Any]:
    """Submit and cancel requests at random steps; return how they ended."""
    draw = random.Random(11)
    live: set[int] = set()
    ended: dict[str, int] = {}
    submitted = 0
    while submitted < count or loop.has_work():
        while submitted < count and len(live) < 12:
            prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 40))]
            loop.submit(
                GenerateRequest(
                    submitted,
                    prompt,
                    SamplingParams(
                        max_tokens=draw.randrange(1, 60), temperature=1.0, seed=submitted
                    ),
                )
            )
            live.add(submitted)
            submitted += 1
        loop.cancel([number for number in live if draw.random() < 0.4])
        outputs = loop.step()
        if outputs is not None:
            columns = (outputs.request_ids, outputs.finish_reasons)
            for request_id, reason in zip(*columns, strict=True):
                if reason:
                    live.discard(request_id)
                    ended[reason] = ended.get(reason, 0) + 1
    return {"ended": ended, "preemptions": loop.stats().preemptions}


def run(loop: EngineLoop, name: str, folder: str) -> dict[str, Any]:
    """Run one kind of run to its end, with the checks of the engine."""
    kind = KINDS[name]
    if kind.cancels:
        result = cancel_at_random(loop, kind.cancels)
    else:
        result = collect(loop, requests_of(kind, name, folder))
    if kind.again:
        result["again"] = collect(loop, requests_of(kind, name, folder))["tokens"]
    try:
        loop.check_integrity()
    except RankFailed as error:
        result["problem"] = str(error)
    stats = loop.stats()
    assert stats.free_blocks == stats.total_blocks
    result["preemptions"] = stats.preemptions
    result["draft_tokens"] = stats.draft_tokens
    result["reused_blocks"] = stats.reused_blocks
    result["ranks"] = loop.info.ranks
    result["compiled"] = isinstance(loop.runner.cache, np.ndarray)  # not torch's
    result["most_scored"] = loop.scheduler.prompt_limits.most_scored
    result["weight_bytes"] = loop.info.weight_bytes
    return result


def run_alone(folder: str, name: str, device: str = "cpu") -> dict[str, Any]:
    return run(start_engine(folder, settings_of(KINDS[name], 1, device)), name, folder)


def record_plans(folder: str, name: str, plans: int) -> tuple[list[bytes], list[list[int]]]:
    """Return the first plans of a run with one rank, as the leader would send them, and the tokens
    that each of them sampled.
    """
    loop = start_engine(folder, settings_of(KINDS[name], 1))
    frames: list[bytes] = []
    tokens: list[list[int]] = []
    launch = loop.runner.launch

    def launch_recorded(plan: StepPlan) -> Any:
        launched = launch(plan)
        if len(frames) < plans:
            frames.append(encode_order(plan))
            tokens.append(launched.result().tokens)
        return launched

    loop.runner.launch = launch_recorded  # type: ignore[method-assign]
    run(loop, name, folder)
    return frames, tokens


def replay(loop: EngineLoop, frames: list[bytes]) -> dict[str, Any]:
    """Carry out recorded plans, and return the tokens that each of them sampled."""
    tokens = []
    for frame in frames:
        plan = decode_order(frame)
        assert isinstance(plan, StepPlan)
        tokens.append(loop.runner.launch(plan).result().tokens)
    assert isinstance(loop.runner, LeadingRunner)
    loop.runner.check_integrity()  # the digests of all ranks are equal
    return {"tokens": tokens, "ranks": loop.info.ranks}


def run_ranks(
    size: int, cases: list[tuple[str, str, str]], folder: Path, device: str = "cpu"
) -> dict[str, Any]:
    """Run the cases with this many ranks, each a process. Return the results by name."""
    (folder / "cases.json").write_text(json.dumps(cases))
    logs = [folder / f"rank{rank}.log" for rank in range(size)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            command = [sys.executable, __file__, str(rank), str(size), str(folder), device]
            environment = os.environ | {"NCCL_HOSTID": f"rank{rank}"} | _ONE_GPU
            started.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
    try:
        codes = [process.wait(timeout=1800) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * size, "\n".join(log.read_text() for log in logs)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def flip_token(follower: Follower) -> None:
    """Change a token that the follower holds after a few plans."""
    launch = follower.runner.launch
    plans = 0

    def launch_and_flip(plan: Any) -> Any:
        nonlocal plans
        plans += 1
        launched = launch(plan)
        if plans == FLIPPED_PLAN:
            follower.runner.rows.tokens[2, 0] += 1
        return launched

    follower.runner.launch = launch_and_flip  # type: ignore[method-assign]


def main() -> None:
    rank = int(sys.argv[1])
    size = int(sys.argv[2])
    folder = Path(sys.argv[3])
    device = sys.argv[4]
    place = RankPlace(rank, size, str(folder / "store"), [])
    ranks = connect(place, settings_of(KINDS["greedy"], size, device))
    results = {}
    for number, (case, engine, name) in enumerate(json.loads((folder / "cases.json").read_text())):
        paths = [str(folder / f"s{number}.{other}") for other in range(1, size)]
        settings = settings_of(KINDS[name], size, device)
        if rank:
            link = LeaderLink(paths[rank - 1])
            follower = start_follower(engine, settings, ranks)
            if name == "flipped" and rank == 1:
                flip_token(follower)
            follow(follower, link.orders(), link.answer)
            link.close()
        else:
            loop = start_engine(engine, settings, ranks=ranks, followers=FollowerLinks(paths))
            recorded = folder / f"{case}.plans"
            if recorded.exists():
                frames = [bytes.fromhex(line) for line in recorded.read_text().split()]
                results[case] = replay(loop, frames)
            else:
                results[case] = run(loop, name, engine)
            loop.close()
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    ranks.meet()  # no rank leaves while another one still needs it
    if device == "cuda":
        os._exit(0)  # as an engine process: NCCL would wait for captured graphs
    disconnect(settings_of(KINDS["greedy"], size, device))


if __name__ == "__main__":
    main()

"""A server with two replicas of a real engine on a CPU: same answers, and conversations that stay
where their keys and values are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from real_server import RealServer, limit_cache
from test_frontends import read_metric
from tiny_models import config_of, random_model
from tiny_server import MODEL, children_of, command_of, wait_for

from slipstream.repository.templates import write_repository
from slipstream.weights.build import build_engine

CONVERSATIONS = 100
TURNS = 8
WORDS = 96  # of the vocabulary


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    random_model(config_of("llama", max_position_embeddings=2048)).save_pretrained(folder / "model")
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(WORDS)}, "unk_token": "0"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": words,
    }
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model" / "tokenizer_config.json").write_text("{}")
    engine = build_engine(folder / "model", folder / "engine", dtype="float32")
    write_repository(folder / "repository", MODEL, engine, engine, 64)
    limit_cache(folder / "repository", 128 * 1024)
    return folder / "repository"


def start(repository: Path, folder: Path, replicas: int) -> RealServer:
    flags = ["--dtype", "float32", "--device", "cpu", "--replicas", str(replicas)]
    program = ["-m", "slipstream.cli.main", "start", "--repo", str(repository), *flags]
    return RealServer(repository, folder, *program).wait()


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory) -> Iterator[RealServer]:
    running = start(repository, tmp_path_factory.mktemp("two"), 2)
    yield running
    running.close()


def ask(server: RealServer, prompt: str, count: int, **more) -> str:
    given = {"text_input": prompt, "max_tokens": count, "end_id": -1, **more}
    url = f"http://{server.http}/v2/models/{MODEL}/generate"
    answer = httpx.post(url, json=given, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["text_output"]


def metric(server: RealServer, name: str, **labels: str) -> float:
    return read_metric(httpx.get(f"http://{server.metrics}/metrics").text, name, **labels)


def engine_processes(server: RealServer) -> list[int]:
    module = "slipstream.engine_worker.process"
    return [found for found in children_of(server.process_id) if module in command_of(found)]


def test_two_processes_give_one_answer(server):
    assert len(engine_processes(server)) == 2
    before = metric(server, "slipstream_requests_finished_total")
    prompt = " ".join(str(number) for number in range(5, 45))
    names = {"temperature": 0.8, "top_p": 0.9, "random_seed": 7}
    with ThreadPoolExecutor(16) as pool:
        greedy = list(pool.map(lambda _: ask(server, prompt, 24), range(16)))
        sampled = list(pool.map(lambda _: ask(server, prompt, 24, **names), range(16)))
    assert len(set(greedy)) == 1
    assert len(set(sampled)) == 1
    assert len(greedy[0].split()) == 24
    for number in range(20):
        ask(server, f"{number} 1 2 3", 4)
    wait_for(lambda: metric(server, "slipstream_requests_finished_total") == before + 52)
    finished = [
        metric(server, "slipstream_replica_requests_finished_total", replica=str(index))
        for index in range(2)
    ]
    assert sum(finished) == before + 52
    assert min(finished) > 0


def converse(server: RealServer, seed: int) -> int:
    """Hold a conversation; return how many turns found the turn before in the cache."""
    chance = random.Random(seed)
    text = ""
    reused = 0
    for turn in range(TURNS):
        before = len(text.split()) // 32 * 32
        text += " " + " ".join(str(chance.randrange(WORDS)) for _ in range(chance.randrange(8, 40)))
        url = f"http://{server.http}/v1/completions"
        length = chance.randrange(5, 60)
        given = {"model": MODEL, "prompt": text, "max_tokens": length, "ignore_eos": True}
        answer = httpx.post(url, json=given, timeout=120).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        reused += turn > 0 and cached >= before
        text += " " + answer["choices"][0]["text"]
    return reused


@pytest.mark.slow
def test_turns_of_conversations_reuse_their_own_cache(server):
    blocks = metric(server, "slipstream_kv_blocks_reused_total")
    with ThreadPoolExecutor(16) as pool:
        reused = sum(pool.map(lambda seed: converse(server, seed), range(CONVERSATIONS)))
    assert reused >= 0.9 * CONVERSATIONS * (TURNS - 1)
    assert metric(server, "slipstream_kv_blocks_reused_total") > blocks
    requests = [
        metric(server, "slipstream_replica_requests_finished_total", replica=str(index))
        for index in range(2)
    ]
    assert min(requests) > 0.3 * sum(requests)

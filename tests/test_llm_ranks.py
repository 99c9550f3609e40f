"""`LLM(ranks=2)`: the leading rank in the caller's process, the other one in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import text_samples
from rank_models import save_rank_model
from tiny_server import is_running, wait_for

from slipstream.llm import LLM, GenerationFailed
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.build import build_engine

SETTINGS = {"device": "cpu", "cache_tokens": 1024, "max_rows": 8, "threads": 1}
GUIDE = {"guide_type": "regex", "guide": "(red|green|blue), (one|two) [a-z]{3}"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llm")
    tokenizer = text_samples.byte_level()
    vocabulary = Tokenizer.load(tokenizer).vocab_size
    model = save_rank_model("llama", folder / "model", vocab_size=vocabulary)
    for path in tokenizer.iterdir():
        shutil.copy(path, model)
    return build_engine(model, folder / "engine", dtype="float32")


def own_children() -> set[int]:
    """Return the processes that any thread of this process has started."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        found.update(int(word) for word in path.read_text().split())
    return found


def answers(llm: LLM) -> list[list[int]]:
    prompts = ["The quick brown fox", "a", "two words"]
    sampled = llm.generate(prompts, max_tokens=12, temperature=1.0, seed=3, ignore_end=True)
    guided = llm.generate(prompts, max_tokens=24, **GUIDE)
    assert all(re.fullmatch(GUIDE["guide"], completion.text) for completion in guided)
    return [completion.tokens for completion in (*sampled, *guided)]


def test_two_ranks_answer_as_one_and_leave_no_process(engine):
    with LLM(engine, "float32", **SETTINGS) as llm:
        expected = answers(llm)
    before = own_children()
    with LLM(engine, "float32", ranks=2, **SETTINGS) as llm:
        assert answers(llm) == expected
        started = own_children() - before
        assert len(started) == 1
    assert not any(is_running(process) for process in started)


def test_a_killed_rank_fails_the_request_that_runs(engine):
    before = own_children()
    with LLM(engine, "float32", tensor_parallel_size=2, **SETTINGS) as llm:
        (rank,) = own_children() - before
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not is_running(rank))
        with pytest.raises(GenerationFailed, match="rank 1: killed by SIGKILL"):
            llm.generate("5 6 7", max_tokens=12)


def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused(engine):
    before = own_children()
    with pytest.raises(ValueError, match="tp_size 3 does not divide this model: it has 4 heads"):
        LLM(engine, "float32", ranks=3, **SETTINGS)
    assert own_children() == before
    with pytest.raises(ValueError, match="ranks must be at least 1, not 0"):
        LLM(engine, "float32", ranks=0, **SETTINGS)

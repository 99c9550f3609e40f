"""With a draft model the text equals that of the target model alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from grpc_stack import SETTINGS
from http_support import RunningServer, post
from tiny_engine import VOCABULARY, build_tiny_engine

from slipstream.engine.sampling_params import SamplingParams
from slipstream.repository.models import inspect_repository, read_repository
from slipstream.repository.templates import write_repository
from slipstream.server.engine_link.engine import AdapterUse, TextOutput, TextRequest
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.health import ServerState
from slipstream.server.models.build import build_registry
from slipstream.server.models.drafting import DraftedGenerator
from slipstream.server.services import create_app
from slipstream.server.text.pipeline import PromptError, TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.load import start_engine

PROMPT = "5 9 33 71 20 8 44 2 17 63"


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def target(engine_folder) -> Iterator[TextGenerator]:
    engine = InProcessEngine(start_engine(engine_folder, SETTINGS))
    yield TextGenerator(Tokenizer.load(engine_folder), engine)
    engine.close()


class Wrong:
    """A draft model whose tokens are accepted only by chance."""

    async def generate(self, request: TextRequest):
        yield TextOutput(
            [
                (len(request.prompt) * 7 + i) % VOCABULARY
                for i in range(request.sampling.max_tokens)
            ],
            finish_reason="length",
        )


async def whole(generator: Any, request: TextRequest) -> tuple[str, list[int], list[float], str]:
    deltas = [delta async for delta in generator.generate(request)]
    assert [bool(delta.finish_reason) for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    log_probs = [round(value, 3) for delta in deltas for value in delta.log_probs or []]
    tokens = [token for delta in deltas for token in delta.tokens]
    return "".join(delta.text for delta in deltas), tokens, log_probs, deltas[-1].finish_reason


@pytest.mark.parametrize(
    "request_",
    [
        TextRequest(PROMPT, SamplingParams(max_tokens=20), ignore_end=True),
        TextRequest(
            PROMPT,
            SamplingParams(max_tokens=20, temperature=1.2, seed=5, log_probs=True),
            ignore_end=True,
        ),
        TextRequest(
            PROMPT,
            SamplingParams(max_tokens=20, repetition_penalty=1.3),
            stop_words=["4 "],
            ignore_end=True,
        ),
        TextRequest(PROMPT, SamplingParams(max_tokens=20, end_ids=tuple(range(40)), min_tokens=6)),
        TextRequest(PROMPT, SamplingParams(max_tokens=1), ignore_end=True),
    ],
    ids=["greedy", "sampled", "stop word", "end", "one token"],
)
async def test_the_text_does_not_depend_on_the_draft_tokens(target, request_):
    expected = await whole(target, request_)
    for draft in (target, Wrong()):
        for count in (1, 4, 30):
            assert (
                await whole(DraftedGenerator(target, target.tokenizer, draft, count), request_)
                == expected
            )


class Short:
    """Refuses every prompt as too long."""

    async def generate(self, request: TextRequest):
        raise PromptError("Prompt length exceeds maximum input length.")
        yield


async def test_text_ends_at_the_context_limit_as_without_drafts(target):
    request = TextRequest(PROMPT, SamplingParams(max_tokens=10_000), ignore_end=True)
    expected = await whole(target, request)
    assert len(expected[1]) == target.client.info.max_sequence_tokens - 10
    for draft in (target, Short()):
        assert (
            await whole(DraftedGenerator(target, target.tokenizer, draft, 30), request) == expected
        )


async def test_only_the_target_uses_the_adapter_and_timing_covers_all_rounds(target):
    seen = []

    class RecordingDraft:
        async def generate(self, request: TextRequest):
            seen.append(request.adapter)
            yield TextOutput([1, 1], finish_reason="length")

    sampling = SamplingParams(max_tokens=6, timing=True)
    drafted = DraftedGenerator(target, target.tokenizer, RecordingDraft(), 2)
    request = TextRequest(PROMPT, sampling, adapter=AdapterUse(7, "seven"), ignore_end=True)
    refused = [delta async for delta in drafted.generate(request)]
    assert "seven not found" in refused[-1].error
    assert seen == [None]
    deltas = [
        delta async for delta in drafted.generate(TextRequest(PROMPT, sampling, ignore_end=True))
    ]
    times = [delta.timing for delta in deltas]
    assert len(times) > 1
    assert {time.arrived_ns for time in times} == {times[0].arrived_ns}
    assert times[-1].draft_tokens > times[0].draft_tokens == 2
    assert times[-1].last_token_ns > times[0].last_token_ns


async def test_presence_penalty_cannot_be_combined_with_drafts(target):
    request = TextRequest(PROMPT, SamplingParams(max_tokens=8, presence_penalty=0.5))
    with pytest.raises(
        InferenceError, match="presence_penalty cannot be combined with num_draft_tokens"
    ):
        await whole(DraftedGenerator(target, target.tokenizer, Wrong(), 4), request)


def write_with_draft(folder: Path, engine: Path) -> Path:
    write_repository(folder, "chat", engine, engine, 8)
    shutil.copytree(folder / "tensorrt_llm", folder / "small")
    config = folder / "small" / "config.pbtxt"
    config.write_text(config.read_text().replace('"tensorrt_llm"', '"small"', 1))
    bls = folder / "chat" / "config.pbtxt"
    lines = [
        line for line in bls.read_text().splitlines() if "tensorrt_llm_draft_model_name" not in line
    ]
    value = '{ key: "tensorrt_llm_draft_model_name" value { string_value: "small" } }'
    bls.write_text("\n".join([*lines, f"parameters {value}"]))
    return folder


def test_num_draft_tokens_uses_the_configured_draft_model(engine_folder, target, tmp_path):
    repository = read_repository(write_with_draft(tmp_path / "repo", engine_folder))
    assert set(repository.needed_by("chat")) >= {"tensorrt_llm", "small"}
    with ExitStack() as stack:
        registry = build_registry(repository, {"tensorrt_llm": target, "small": target})
        port = stack.enter_context(
            RunningServer(create_app(registry, ServerState([target.client])))
        ).port

        def ask(model: str = "chat", status: int = 200, **fields: Any) -> dict[str, Any]:
            body = {"text_input": PROMPT, "max_tokens": 12, "end_id": -1, **fields}
            answer = post(port, f"/v2/models/{model}/generate", json.dumps(body).encode())
            assert answer.status == status, answer.body
            return json.loads(answer.body)

        plain = ask()
        drafted = ask(num_draft_tokens=3)
        assert drafted["text_output"] == plain["text_output"]
        counted = ask(num_draft_tokens=3, return_perf_metrics=True)
        assert counted["total_accepted_draft_tokens"] > 0
        assert (
            "bad_words cannot be combined"
            in ask(status=400, num_draft_tokens=3, bad_words=["7"])["error"]
        )
        assert (
            "use_draft_logits is not supported"
            in ask(status=400, num_draft_tokens=3, use_draft_logits=True)["error"]
        )


def test_missing_draft_model_is_a_problem_of_the_repository(engine_folder, tmp_path):
    folder = write_with_draft(tmp_path / "repo", engine_folder)
    shutil.rmtree(folder / "small")
    _, problems = inspect_repository(folder)
    assert [problem.text for problem in problems.errors] == [
        "there is no engine model 'small' here"
    ]

"""Optional outputs that a model's configuration declares, over HTTP and gRPC on a real engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpc_stack import ask, request, running, tensor, text_inputs, token_inputs
from http_support import RunningServer, post
from optional_tensors import OUTPUTS, write_declared
from run_engine import all_logits
from tiny_engine import VOCABULARY, build_tiny_engine

from slipstream.repository.models import read_repository
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.kserve.health import ServerState
from slipstream.server.models.build import build_registry
from slipstream.server.services import create_app
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.load import start_engine

PROMPT = "5 9 33 71 20 8 44 2 17 63"
IDS = [int(word) for word in PROMPT.split()]
TEXT_MODELS = ["ensemble", "chat"]
COUNT_FLAGS = {
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_num_cached_tokens": True,
    "return_finish_reason": True,
}


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine"))


class Server:
    def __init__(self, port: int) -> None:
        self.port = port

    def generate(self, model: str, **fields: Any) -> dict[str, Any]:
        body = json.dumps({"text_input": PROMPT, "max_tokens": 6, "end_id": -1, **fields}).encode()
        answer = post(self.port, f"/v2/models/{model}/generate", body)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    def refused(self, model: str, **fields: Any) -> str:
        body = json.dumps({"text_input": PROMPT, "max_tokens": 6, **fields}).encode()
        answer = post(self.port, f"/v2/models/{model}/generate", body)
        assert answer.status == 400, answer.body
        return json.loads(answer.body)["error"]

    def stream(self, model: str, **fields: Any) -> list[dict[str, Any]]:
        fields = {"text_input": PROMPT, "max_tokens": 6, "end_id": -1, "stream": True, **fields}
        answer = post(self.port, f"/v2/models/{model}/generate_stream", json.dumps(fields).encode())
        assert answer.status == 200, answer.body
        return [json.loads(chunk.removeprefix(b"data: ")) for chunk in answer.chunks]


def serve(stack: ExitStack, engine_folder: Path, repo: Path) -> Server:
    from grpc_stack import SETTINGS

    engine = InProcessEngine(start_engine(engine_folder, SETTINGS))
    stack.callback(engine.close)
    generator: Any = TextGenerator(Tokenizer.load(engine_folder), engine)
    registry = build_registry(read_repository(repo), {"tensorrt_llm": generator})
    return Server(
        stack.enter_context(RunningServer(create_app(registry, ServerState([engine])))).port
    )


@pytest.fixture(scope="module")
def server(engine_folder, tmp_path_factory) -> Iterator[Server]:
    with ExitStack() as stack:
        yield serve(
            stack,
            engine_folder,
            write_declared(tmp_path_factory.mktemp("flags") / "repo", engine_folder),
        )


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_counts_and_finish_reason_are_returned_on_request(server, model):
    plain = server.generate(model)
    assert not set(plain) & set(OUTPUTS)
    asked = server.generate(model, **COUNT_FLAGS)
    assert asked["text_output"] == plain["text_output"]
    assert (asked["finish_reason"], asked["num_input_tokens"], asked["num_output_tokens"]) == (
        "length",
        len(IDS),
        6,
    )
    assert asked["num_cached_tokens"] == 0
    only = server.generate(model, return_finish_reason=True, return_num_input_tokens=False)
    assert set(only) & set(OUTPUTS) == {"finish_reason"}
    stopped = server.generate(
        model, **COUNT_FLAGS, stop_words=[" ".join(plain["text_output"].split()[:3])]
    )
    assert (stopped["finish_reason"], stopped["num_output_tokens"]) == ("stop", 3)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_last_event_of_a_stream_has_the_finish_reason(server, model):
    events = server.stream(model, **COUNT_FLAGS, return_perf_metrics=True)
    assert [event["finish_reason"] for event in events] == [""] * (len(events) - 1) + ["length"]
    assert [event["num_output_tokens"] for event in events][-1] == 6
    assert ["last_token_time_ns" in event for event in events] == [False] * (len(events) - 1) + [
        True
    ]


def test_repeated_prompt_reports_its_cached_tokens(server):
    prompt = " ".join(str(number % VOCABULARY) for number in range(7, 87))
    first, second = (
        server.generate("ensemble", text_input=prompt, **COUNT_FLAGS) for _ in range(2)
    )
    # blocks hold 32 tokens
    assert (first["num_cached_tokens"], second["num_cached_tokens"]) == (0, 64)


def test_output_declared_without_a_flag_is_always_returned(engine_folder, tmp_path):
    with ExitStack() as stack:
        server = serve(
            stack, engine_folder, write_declared(tmp_path / "repo", engine_folder, flags=False)
        )
        for model in TEXT_MODELS:
            answer = server.generate(model)
            assert answer["finish_reason"] == "length"
            assert len(answer["prompt_log_probs"]) == len(IDS) - 1
            assert server.generate(model, return_finish_reason=False).get("finish_reason") is None


def test_a_parameter_requests_outputs_that_are_not_declared(engine_folder, tmp_path):
    from slipstream.repository.templates import write_repository

    write_repository(tmp_path / "repo", "chat", engine_folder, engine_folder, 8)
    with ExitStack() as stack:
        server = serve(stack, engine_folder, tmp_path / "repo")
        for model in TEXT_MODELS:
            answer = server.generate(
                model, return_finish_reason=True, parameters={"top_log_probs": 2}
            )
            assert answer["finish_reason"] == "length"
            assert len(answer["output_top_ids"]) == 2 * 6
            echoed = server.generate(model, exclude_input_in_output=False)
            assert echoed["text_output"].startswith(PROMPT)
            assert "top_log_probs must be at least 0" in server.refused(
                model, parameters={"top_log_probs": 200}
            )
            assert "return_finish_reason must be of type BOOL" in server.refused(
                model, return_finish_reason="yes"
            )


def test_performance_metrics_have_upstreams_names(server):
    answer = server.generate("ensemble", text_input="1 2 3", return_perf_metrics=True)
    times = [
        answer[name]
        for name in (
            "arrival_time_ns",
            "first_scheduled_time_ns",
            "first_token_time_ns",
            "last_token_time_ns",
        )
    ]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1]
    assert (answer["kv_cache_alloc_new_blocks"], answer["kv_cache_reused_blocks"]) == (1, 0)
    assert answer["kv_cache_alloc_total_blocks"] == 1
    assert (answer["acceptance_rate"], answer["total_draft_tokens"]) == (0.0, 0)
    blocks = server.generate("ensemble", text_input="1 2 3", return_kv_cache_reuse_stats=True)
    assert set(blocks) & set(OUTPUTS) == {name for name in OUTPUTS if name.startswith("kv_cache")}


# --- logits and log-probabilities ---


@pytest.fixture(scope="module")
def reference(engine_folder, server) -> tuple[list[int], torch.Tensor]:
    answer = [int(word) for word in server.generate("ensemble")["text_output"].split()]
    return answer, all_logits(engine_folder, torch.float32, [IDS + answer])[0]


def close(given: Any, expected: torch.Tensor) -> bool:
    return np.allclose(np.array(given).reshape(-1), expected.reshape(-1).numpy(), atol=1e-3)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_logits_and_log_probs_equal_the_models(server, reference, model):
    answer, logits = reference
    found = server.generate(
        model,
        return_context_logits=True,
        return_generation_logits=True,
        return_log_probs=True,
        return_prompt_log_probs=True,
        top_log_probs=3,
    )
    assert close(found["context_logits"], logits[: len(IDS)])
    assert close(found["generation_logits"], logits[len(IDS) - 1 : -1])
    log_probs = logits.log_softmax(-1)
    of_answer = log_probs[range(len(IDS) - 1, len(IDS) + 5), answer]
    assert close(found["output_log_probs"], of_answer)
    # normalised by the length, which is upstream's default
    assert close(found["cum_log_probs"], of_answer.mean())
    assert close(found["prompt_log_probs"], log_probs[range(len(IDS) - 1), IDS[1:]])
    top = log_probs[len(IDS) - 1 : -1].topk(3, dim=-1)
    assert found["output_top_ids"] == top.indices.flatten().tolist()
    assert close(found["output_top_log_probs"], top.values)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_streamed_logits_joined_equal_the_models(server, reference, model):
    _, logits = reference
    events = server.stream(
        model,
        return_context_logits=True,
        return_generation_logits=True,
        return_log_probs=True,
        top_log_probs=2,
    )
    assert close(events[0]["context_logits"], logits[: len(IDS)])
    # this repository sends zeros in place of absent outputs
    assert all(event["context_logits"] == 0.0 for event in events[1:])
    joined = [number for event in events for number in event["generation_logits"]]
    assert close(joined, logits[len(IDS) - 1 : -1])
    assert sum(len(np.atleast_1d(event["output_log_probs"])) for event in events) == 6
    assert sum(len(event["output_top_ids"]) for event in events) == 12


async def test_logits_over_grpc_have_upstreams_shapes(engine_folder, tmp_path, reference):
    answer, logits = reference
    repo = write_declared(tmp_path / "repo", engine_folder)
    flags = [
        tensor(name, [True], "BOOL")
        for name in (
            "return_context_logits",
            "return_generation_logits",
            "return_log_probs",
            "return_finish_reason",
        )
    ]
    async with running(engine_folder, repo.parent, keep=True) as stack:
        for model, inputs in (
            ("tensorrt_llm", token_inputs(IDS, 6, stream=False)),
            ("ensemble", [*text_inputs(PROMPT, 6, stream=False), tensor("end_id", [-1], "INT32")]),
        ):
            ((result, error),) = await ask(stack.client, request(model, [*inputs, *flags]))
            assert error is None
            context = result.as_numpy("context_logits")
            generation = result.as_numpy("generation_logits")
            assert (context.shape, context.dtype) == ((1, len(IDS), VOCABULARY), np.float32)
            assert generation.shape == (1, 1, 6, VOCABULARY)
            assert close(context, logits[: len(IDS)])
            assert close(generation, logits[len(IDS) - 1 : -1])
            assert result.as_numpy("cum_log_probs").shape == (1, 1)
            assert result.as_numpy("output_log_probs").shape == (1, 1, 6)
            assert result.as_numpy("finish_reason").tolist() == [[b"length"]]
        answers = await ask(stack.client, request("tensorrt_llm", [*token_inputs(IDS, 6), *flags]))
        pieces = [
            result.as_numpy("generation_logits")
            for result, _ in answers
            if "generation_logits" in str(result.get_response())
        ]
        assert close(np.concatenate(pieces, axis=2), logits[len(IDS) - 1 : -1])
        assert [
            token for result, _ in answers for token in result.as_numpy("output_ids").flatten()
        ] == answer


def test_logits_over_the_size_limit_are_refused_by_name(server, monkeypatch):
    monkeypatch.setattr("slipstream.server.text.pipeline.MAX_LOGITS_BYTES", 4 * VOCABULARY * 12)
    assert "context_logits of 10 tokens and generation_logits of 6 tokens exceed" in server.refused(
        "ensemble", return_context_logits=True, return_generation_logits=True
    )
    assert "generation_logits of 13 tokens exceed the bound" in server.refused(
        "chat", return_generation_logits=True, max_tokens=13
    )
    assert (
        len(server.generate("chat", return_context_logits=True)["context_logits"])
        == 10 * VOCABULARY
    )


# --- sampling parameters ---


def test_sampling_fields_reach_the_engine(server):
    plain = server.generate("chat", max_tokens=40)["text_output"].split()
    assert len(set(itertools.pairwise(plain))) < 39  # the plain answer repeats itself
    fresh = server.generate("chat", max_tokens=40, no_repeat_ngram_size=2)["text_output"].split()
    assert len(set(itertools.pairwise(fresh))) == 39
    shrinking = {"top_p": 0.9999, "random_seed": 3, "temperature": 3.0, "max_tokens": 20}
    drawn = server.generate("chat", **shrinking)["text_output"].split()
    narrowed = server.generate("chat", **shrinking, parameters={"top_p_decay": 1e-6})[
        "text_output"
    ].split()
    assert drawn[0] == narrowed[0]
    assert drawn != narrowed


async def test_embedding_bias_and_word_ids_of_the_engine_model(engine_folder, tmp_path):
    repo = write_declared(tmp_path / "repo", engine_folder)
    async with running(engine_folder, repo.parent, keep=True) as stack:
        drawn = [
            tensor("temperature", [2.0], "FP32"),
            tensor("runtime_top_p", [1.0], "FP32"),
            tensor("random_seed", [5], "UINT64"),
        ]

        async def answer(*inputs: Any) -> Any:
            ((result, error),) = await ask(
                stack.client,
                request("tensorrt_llm", [*token_inputs(IDS, 8, stream=False), *drawn, *inputs]),
            )
            return str(error) if error else result.as_numpy("output_ids").flatten().tolist()

        plain = await answer()
        bias = [0.0] * VOCABULARY
        bias[7] = 1000.0
        assert await answer(tensor("embedding_bias", bias, "FP32")) == [7] * 8
        assert await answer(tensor("embedding_bias", [], "FP32")) == plain
        assert "embedding_bias must have a number for each of 96 tokens, got 3" in await answer(
            tensor("embedding_bias", [1.0, 2.0, 3.0], "FP32")
        )
        bias[9] = float("nan")
        assert "embedding_bias must be a finite number, got nan" in await answer(
            tensor("embedding_bias", bias, "FP32")
        )
        words = [[plain[0], plain[2], plain[3]], [1, 3, -1]]  # one word of one token, one of two
        banned = await answer(tensor("bad_words_list", words, "INT32"))
        assert plain[0] not in banned
        assert (plain[2], plain[3]) not in itertools.pairwise(banned)
        ended = await answer(tensor("stop_words_list", [[plain[1], plain[2]], [2, -1]], "INT32"))
        assert ended == plain[:3]  # the ids include the tokens of the stop word
        held = await answer(
            tensor("end_id", [plain[2]], "INT32"), tensor("min_length", [6], "INT32")
        )
        assert len(held) >= 6
        assert plain[2] not in held[:6]


@pytest.mark.parametrize("kind", ["FP16", "BF16"])
async def test_logits_have_the_declared_data_type(engine_folder, tmp_path, reference, kind):
    _, logits = reference
    repo = write_declared(tmp_path / "repo", engine_folder)
    for model in ("ensemble", "tensorrt_llm"):
        file = repo / model / "config.pbtxt"
        text = file.read_text()
        for name in ("context_logits", "generation_logits"):
            assert f'"{name}" data_type: TYPE_FP32' in text
            text = text.replace(
                f'"{name}" data_type: TYPE_FP32', f'"{name}" data_type: TYPE_{kind}'
            )
        file.write_text(text)
    async with running(engine_folder, repo.parent, keep=True) as stack:
        asks = [tensor("return_context_logits", [True], "BOOL"), tensor("end_id", [-1], "INT32")]
        ((result, error),) = await ask(
            stack.client, request("ensemble", [*text_inputs(PROMPT, 6, False), *asks])
        )
        assert error is None
        output = result.get_output("context_logits")
        assert (output.datatype, list(output.shape)) == (kind, [1, len(IDS), VOCABULARY])
        assert np.allclose(
            result.as_numpy("context_logits").astype(np.float32),
            logits[: len(IDS)].numpy(),
            atol=0.05,
            rtol=0.02,
        )

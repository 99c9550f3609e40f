"""Beams and samples of one prompt, from the server and `slipstream.LLM` with a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc_stack
import numpy as np
import pytest
import torch
from grpc_stack import ask, request, running, tensor, token_inputs
from http_support import RunningServer, post
from run_engine import all_logits, engine, run_all
from tiny_engine import build_tiny_engine
from tiny_text import EchoEngine

from slipstream import LLM
from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.messages import Beam
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.repository.models import read_repository
from slipstream.repository.templates import write_repository
from slipstream.server.engine_link.engine import AdapterUse, TextRequest
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.kserve.health import ServerState
from slipstream.server.models.build import build_registry
from slipstream.server.services import create_app
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.load import start_engine

PROMPT = "5 9 33 71 20 8 44 2 17 63"
IDS = [int(word) for word in PROMPT.split()]
SETTINGS = replace(grpc_stack.SETTINGS, max_beam_width=4)


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine"))


class Server:
    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, model: str, how: str = "generate", status: int = 200, **fields: Any) -> Any:
        body = {"text_input": PROMPT, "max_tokens": 6, "end_id": -1, **fields}
        answer = post(self.port, f"/v2/models/{model}/{how}", json.dumps(body).encode())
        assert answer.status == status, answer.body
        if how == "generate_stream":
            return [json.loads(chunk.removeprefix(b"data: ")) for chunk in answer.chunks]
        return json.loads(answer.body)


@pytest.fixture(scope="module")
def server(engine_folder, tmp_path_factory) -> Iterator[Server]:
    repo = tmp_path_factory.mktemp("repository") / "repo"
    write_repository(repo, "chat", engine_folder, engine_folder, 8)
    with ExitStack() as stack:
        engine = InProcessEngine(start_engine(engine_folder, SETTINGS))
        stack.callback(engine.close)
        generator: Any = TextGenerator(Tokenizer.load(engine_folder), engine)
        registry = build_registry(read_repository(repo), {"tensorrt_llm": generator})
        yield Server(
            stack.enter_context(RunningServer(create_app(registry, ServerState([engine])))).port
        )


def search(engine_folder: Path, **sampling: Any) -> list[Beam]:
    answers = run_all(
        engine(engine_folder), [GenerateRequest(1, IDS, SamplingParams(max_tokens=6, **sampling))]
    )
    return answers.beams[1]


@pytest.mark.parametrize("model", ["ensemble", "chat"])
def test_text_output_has_one_text_per_beam_with_the_best_first(server, engine_folder, model):
    expected = search(engine_folder, beam_width=3)
    answer = server.ask(model, beam_width=3, return_log_probs=True)
    texts = [" ".join(map(str, beam.tokens)) for beam in expected]
    assert answer["text_output"] == texts
    assert len(set(texts)) == 3
    means = [beam.total_log_prob / 6 for beam in expected]
    assert answer["cum_log_probs"] == pytest.approx(means, abs=1e-4)
    assert answer["output_log_probs"] == pytest.approx(
        [p for beam in expected for p in beam.log_probs], abs=1e-4
    )
    (event,) = server.ask(model, "generate_stream", beam_width=3, stream=True)
    assert event["text_output"] == texts


def test_beam_search_fields_reach_the_engine(server, engine_folder):
    plain = search(engine_folder, beam_width=4)
    ends = sorted({token for beam in plain for token in beam.tokens[1:4]})[0]
    seen = set()
    for penalty, early in ((0.0, 1), (3.0, 0), (-3.0, 0)):
        expected = search(
            engine_folder,
            beam_width=4,
            end_ids=(ends,),
            length_penalty=penalty,
            early_stopping=early,
        )
        answer = server.ask(
            "chat", beam_width=4, end_id=ends, length_penalty=penalty, early_stopping=early
        )
        assert answer["text_output"] == [" ".join(map(str, beam.tokens)) for beam in expected]
        seen.add(tuple(answer["text_output"]))
    assert len(seen) > 1
    spread = server.ask("chat", beam_width=4, beam_search_diversity_rate=50.0)["text_output"]
    assert spread != [" ".join(map(str, beam.tokens)) for beam in plain]


@pytest.mark.parametrize("stop", [False, True])
def test_generation_logits_of_each_beam_equal_the_models(server, engine_folder, stop):
    """The shape is [1, beams, tokens, vocabulary]."""
    word = server.ask("chat", beam_width=3)["text_output"][0].split()[2]
    fields = {"stop_words": [word]} if stop else {}
    answer = server.ask("chat", beam_width=3, return_generation_logits=True, **fields)
    beams = [[int(token) for token in text.split()] for text in answer["text_output"]]
    if stop:
        assert len({len(beam) for beam in beams}) > 1
        # the logits of the stop word's tokens are included
        beams = [[*beam, int(word)] if len(beam) < 6 else beam for beam in beams]
    longest = max(map(len, beams))
    logits = np.array(answer["generation_logits"], np.float32).reshape(3, longest, -1)
    expected = all_logits(engine_folder, torch.float32, [IDS + beam for beam in beams])
    for row, beam, theirs in zip(logits, beams, expected, strict=True):
        assert np.allclose(row[: len(beam)], theirs[len(IDS) - 1 : -1].numpy(), atol=1e-4)
        assert not row[len(beam) :].any()


def test_each_beam_is_cut_at_the_stop_word(server):
    whole = server.ask("chat", beam_width=3)["text_output"]
    word = whole[0].split()[2]
    cut = server.ask("chat", beam_width=3, stop_words=[word])["text_output"]
    assert cut == [text[: text.find(word)] if word in text else text for text in whole]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beam_width": 5}, "Requested beam width 5 is larger than configured max beam width 4"),
        ({"beam_width": 2, "top_k": 5}, "top_k cannot be combined with beam width 2"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p cannot be combined with beam width 2"),
        ({"beam_width": 2, "top_p_decay": 0.5}, "top_p_decay cannot be combined with beam width 2"),
        ({"beam_width": 2, "num_return_sequences": 3}, "3 sequences were asked for"),
        ({"beam_width": 0}, "beam_width must be over 0"),
    ],
)
def test_invalid_beam_search_fields_are_refused_by_name(server, fields, words):
    assert words in server.ask("chat", status=400, **fields)["error"]


def test_samples_have_their_own_seeds_and_are_reproducible(server):
    drawing = {"temperature": 1.5, "top_p": 1.0, "random_seed": 7, "max_tokens": 8}
    alone = server.ask("chat", **drawing)["text_output"]
    three = server.ask("chat", **drawing, num_return_sequences=3)
    assert three["text_output"][0] == alone
    assert len(set(three["text_output"])) == 3
    assert (
        server.ask("chat", **drawing, num_return_sequences=3)["text_output"] == three["text_output"]
    )
    assert "sequence_index" not in three


def test_pieces_of_a_stream_have_the_index_of_their_sample(server):
    drawing = {
        "temperature": 1.5,
        "top_p": 1.0,
        "random_seed": 7,
        "max_tokens": 8,
        "num_return_sequences": 3,
    }
    whole = server.ask("chat", **drawing)["text_output"]
    joined = ["", "", ""]
    for event in server.ask("chat", "generate_stream", stream=True, **drawing):
        joined[event["sequence_index"]] += event["text_output"]
    assert joined == whole


def test_the_scores_of_the_prompt_are_sent_once(server):
    asked = {
        "return_prompt_log_probs": True,
        "temperature": 1.5,
        "top_p": 1.0,
        "random_seed": 7,
        "num_return_sequences": 3,
    }
    alone = server.ask("chat", return_prompt_log_probs=True)["prompt_log_probs"]
    assert len(alone) == len(IDS) - 1
    assert server.ask("chat", **asked)["prompt_log_probs"] == pytest.approx(alone, abs=1e-4)
    assert server.ask("chat", return_prompt_log_probs=True, beam_width=3)[
        "prompt_log_probs"
    ] == pytest.approx(alone, abs=1e-4)
    events = server.ask("chat", "generate_stream", stream=True, **asked)
    found = [event for event in events if "prompt_log_probs" in event]
    assert [event["sequence_index"] for event in found] == [0]
    assert found[0]["prompt_log_probs"] == pytest.approx(alone, abs=1e-4)


async def test_adapter_and_prompt_log_probs_are_sent_for_the_first_sequence_only(engine_folder):
    sent: list[Any] = []

    class Recorder(EchoEngine):
        def submit(self, request):
            loads_adapter = request.adapter_source is not None
            sent.append((request.adapter, loads_adapter, request.sampling.prompt_log_probs))
            return super().submit(request)

    adapter = AdapterUse(7, "seven", AdapterSource(weights=b"1234"))
    request = TextRequest(
        [5, 6], SamplingParams(max_tokens=2, prompt_log_probs=True), sequences=3, adapter=adapter
    )
    generator = TextGenerator(Tokenizer.load(engine_folder), Recorder())
    assert len([delta async for delta in generator.generate(request) if delta.finish_reason]) == 3
    assert sent == [(7, True, True), (7, False, False), (7, False, False)]


async def test_output_ids_of_beams_have_upstreams_shapes(engine_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(grpc_stack, "SETTINGS", SETTINGS)
    expected = search(engine_folder, beam_width=3, end_ids=(0,), min_tokens=0)
    async with running(engine_folder, tmp_path) as stack:
        more = [
            tensor("beam_width", [3], "INT32"),
            tensor("return_log_probs", [True], "BOOL"),
            tensor("end_id", [0], "INT32"),
        ]
        ((result, error),) = await ask(
            stack.client, request("tensorrt_llm", [*token_inputs(IDS, 6, False), *more])
        )
        assert error is None
        ids = result.as_numpy("output_ids")
        lengths = result.as_numpy("sequence_length")
        assert (ids.shape[:2], lengths.shape) == ((1, 3), (1, 3))
        prompt = [] if lengths[0, 0] == len(expected[0].tokens) else IDS
        for beam, row, length in zip(expected, ids[0], lengths[0], strict=True):
            assert row[:length].tolist() == prompt + beam.tokens
            assert (row[length:] == -1).all()
        assert result.as_numpy("cum_log_probs").shape == (1, 3)
        assert result.as_numpy("output_log_probs").shape == (
            1,
            3,
            max(len(beam.tokens) for beam in expected),
        )
        assert np.isclose(
            result.as_numpy("output_log_probs")[0, 0, 0], expected[0].log_probs[0], atol=1e-4
        )


async def test_draft_tokens_of_a_client_do_not_change_the_output(engine_folder, tmp_path):
    plain = run_all(engine(engine_folder), [GenerateRequest(1, IDS, SamplingParams(max_tokens=6))])[
        1
    ]
    async with running(engine_folder, tmp_path) as stack:
        for draft, right in ((plain[:4], 4), ([*plain[:2], (plain[2] + 1) % 96], 2)):
            inputs = [*token_inputs(IDS, 6, False), tensor("draft_input_ids", draft, "INT32")]
            asked = request("tensorrt_llm", inputs, parameters={"return_perf_metrics": True})
            ((result, error),) = await ask(stack.client, asked)
            assert error is None
            assert result.as_numpy("output_ids")[0, 0, -6:].tolist() == plain
            assert result.as_numpy("total_draft_tokens").item() == len(draft)
            assert result.as_numpy("total_accepted_draft_tokens").item() == right


def test_different_cache_salts_share_no_cached_prompt(server):
    prompt = " ".join(str(number) for number in range(70))
    asked = {"text_input": prompt, "max_tokens": 1, "return_num_cached_tokens": True}
    cached = [
        server.ask("chat", **asked, cache_salt=salt)["num_cached_tokens"]
        for salt in ("a", "a", "b", "b")
    ]
    assert cached == [0, 64, 0, 64]


def test_llm_returns_the_best_sequence_with_the_others_attached(engine_folder):
    expected = search(engine_folder, beam_width=3)
    with LLM(engine_folder, dtype="float32", threads=1, cache_tokens=2048, max_rows=4) as llm:
        (found,) = llm.generate([IDS], max_tokens=6, beam_width=3, ignore_end=True, log_probs=True)
        assert [one.tokens for one in (found, *found.others)] == [beam.tokens for beam in expected]
        assert found.total_log_prob == pytest.approx(expected[0].total_log_prob, abs=1e-4)
        (two,) = llm.generate([IDS], max_tokens=6, beam_width=3, ignore_end=True, n=2)
        assert [one.tokens for one in (two, *two.others)] == [beam.tokens for beam in expected[:2]]
        (drawn,) = llm.generate([IDS], max_tokens=6, n=3, temperature=1.5, seed=4, ignore_end=True)
        (alone,) = llm.generate([IDS], max_tokens=6, temperature=1.5, seed=4, ignore_end=True)
        assert drawn.tokens == alone.tokens
        assert len({tuple(one.tokens) for one in (drawn, *drawn.others)}) == 3
        with pytest.raises(ValueError, match="larger than configured max beam width 4"):
            llm.generate([IDS], max_tokens=6, beam_width=5)


def test_concurrent_beams_and_samples_equal_those_of_single_requests(server):
    from concurrent.futures import ThreadPoolExecutor

    kinds = [
        {"beam_width": 3},
        {"num_return_sequences": 3, "temperature": 1.3, "top_p": 1.0, "random_seed": 5},
        {},
        {"beam_width": 2, "length_penalty": 1.0},
    ]
    alone = [server.ask("chat", **kind)["text_output"] for kind in kinds]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda kind: server.ask("chat", **kind)["text_output"], kinds * 4))
    assert found == alone * 4

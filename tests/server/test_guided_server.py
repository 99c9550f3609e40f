"""Guided answers and bad words through every model of a repository and an engine process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grpc_stack import SETTINGS, ask, request, running, tensor, text_inputs, token_inputs
from http_support import RunningServer, post
from optional_tensors import write_declared
from submit import submit
from tiny_hf_folder import save_model

from slipstream.engine_worker.process import start_real_engine
from slipstream.repository.models import read_repository
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.kserve.health import ServerState
from slipstream.server.models.build import build_registry
from slipstream.server.services import create_app
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.build import build_engine

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
)
GUIDE = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": SCHEMA}


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    return build_engine(save_model(folder / "hf"), folder / "engine", dtype="float32")


@pytest.fixture(scope="module")
def port(engine_folder, tmp_path_factory):
    engine = InProcessEngine(start_real_engine(str(engine_folder), SETTINGS))
    repo = write_declared(tmp_path_factory.mktemp("models") / "repo", engine_folder)
    generator: Any = TextGenerator(Tokenizer.load(engine_folder), engine)
    registry = build_registry(read_repository(repo), {"tensorrt_llm": generator})
    with RunningServer(create_app(registry, ServerState([engine]))) as server:
        yield server.port
    engine.close()


def generate(port: int, model: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"text_input": "Say: ", "max_tokens": 120, **fields}).encode()
    answer = post(port, f"/v2/models/{model}/generate", body)
    assert answer.status == status, answer.body
    return json.loads(answer.body)


@pytest.mark.parametrize("model", ["ensemble", "chat"])
def test_generate_follows_a_guide(port, model):
    answer = generate(port, model, **GUIDE, return_finish_reason=True)
    assert json.loads(answer["text_output"]) in ({"n": 1}, {"n": 2})
    assert answer["finish_reason"] == "stop"
    assert generate(
        port, model, guided_decoding_guide_type="regex", guided_decoding_guide="[0-9]{4}"
    )["text_output"].isdigit()


@pytest.mark.parametrize("model", ["ensemble", "chat"])
def test_streamed_pieces_equal_the_guided_answer(port, model):
    body = json.dumps({"text_input": "Say: ", "max_tokens": 120, "stream": True, **GUIDE}).encode()
    answer = post(port, f"/v2/models/{model}/generate_stream", body)
    pieces = [json.loads(chunk.removeprefix(b"data: "))["text_output"] for chunk in answer.chunks]
    assert json.loads("".join(pieces)) in ({"n": 1}, {"n": 2})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"guided_decoding_guide_type": "xml", "guided_decoding_guide": "a"},
            "guided_decoding_guide_type must be one of",
        ),
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide_type must be one of"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide is required"),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(a"},
            "guided_decoding_guide: cannot be enf",
        ),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": r"[^\s\S]"},
            "guided_decoding_guide: cannot be followed further: no token can come next",
        ),
    ],
)
def test_wrong_guides_are_an_error_with_the_name_of_the_field(port, fields, message):
    for model in ("ensemble", "chat"):
        assert message in generate(port, model, status=400, **fields)["error"]


async def test_guide_for_an_engine_without_a_tokenizer_is_refused_over_grpc(
    engine_folder, tmp_path
):
    repo = write_declared(tmp_path / "repo", engine_folder)
    guide = [tensor(name, [text.encode()], "BYTES") for name, text in GUIDE.items()]
    ids = Tokenizer.load(engine_folder).encode("Say: ")
    async with running(engine_folder, repo.parent, keep=True) as stack:
        for model, inputs in (
            ("ensemble", text_inputs("Say: ", 99, False)),
            ("tensorrt_llm", token_inputs(ids, 99, False)),
        ):
            ((_, error),) = await ask(stack.client, request(model, [*inputs, *guide]))
            assert "cannot be guided" in str(error)


async def test_the_engine_model_follows_a_guide(engine_folder, tmp_path):
    from slipstream.server.kserve.inference import InferRequest
    from slipstream.server.kserve.tensors import Tensor

    engine = InProcessEngine(start_real_engine(str(engine_folder), SETTINGS))
    repo = write_declared(tmp_path / "repo", engine_folder)
    tokenizer = Tokenizer.load(engine_folder)
    generator: Any = TextGenerator(tokenizer, engine)
    model = (
        build_registry(read_repository(repo), {"tensorrt_llm": generator})
        .find("tensorrt_llm")
        .model
    )
    ids = tokenizer.encode("Say: ")
    inputs = [
        Tensor.from_values("input_ids", "INT32", (1, len(ids)), ids),
        Tensor.from_values("input_lengths", "INT32", (1, 1), [len(ids)]),
        Tensor.from_values("request_output_len", "INT32", (1, 1), [99]),
        *(
            Tensor.from_values(name, "BYTES", (1, 1), [text.encode()])
            for name, text in GUIDE.items()
        ),
    ]
    given = InferRequest("tensorrt_llm", "1", {tensor.name: tensor for tensor in inputs})
    (answer,) = [response async for response in model.infer(given)]
    engine.close()
    assert answer.error is None
    assert json.loads(tokenizer.decode(answer.outputs[0].values())) in ({"n": 1}, {"n": 2})


def test_bad_words_are_never_generated_in_any_tokenization(port):
    """Every token of this model is one letter."""
    plain = generate(port, "ensemble", end_id=-1)["text_output"]
    word = plain[10:14]
    without = generate(port, "ensemble", end_id=-1, bad_words=[word])["text_output"]
    assert plain[:13] == without[:13]
    assert word not in without


async def test_guides_and_bad_words_reach_an_engine_process(engine_folder):
    """An engine process gives the same answers as an engine in this process."""
    import asyncio
    import math

    import numpy as np

    from slipstream.engine.messages import Scores
    from slipstream.engine.request import PromptTable
    from slipstream.engine.sampling_params import Guide, SamplingParams
    from slipstream.server.engine_link.client import EngineClient

    width = json.loads((engine_folder / "config.json").read_text())["pretrained_config"][
        "hidden_size"
    ]
    asked = {
        "context_logits": True,
        "generation_logits": True,
        "prompt_log_probs": True,
        "timing": True,
    }

    async def collect(generation) -> tuple[list[int], Scores, Any, str]:
        tokens = []
        scores = Scores()
        timing = None
        async for delta in generation:
            tokens += delta.tokens
            scores.merge(delta.scores or Scores())
            timing = delta.timing
        return tokens, scores, timing, delta.finish_reason

    async def all_of_it(engine) -> list[Any]:
        vocabulary = engine.info.vocab_size
        table = PromptTable(vocabulary, 2, np.full((2, width), 0.25, np.float32).tobytes())
        ends = (vocabulary - 1,)
        return await asyncio.gather(
            collect(
                submit(
                    engine,
                    [5, 6],
                    SamplingParams(max_tokens=90, guide=Guide("json_schema", SCHEMA), end_ids=ends),
                )
            ),
            collect(submit(engine, [5, 6, 7], SamplingParams(max_tokens=9, **asked))),
            collect(submit(engine, [5, 6, 7], SamplingParams(max_tokens=30, bad_texts=("a", "e")))),
            collect(
                submit(
                    engine, [5, vocabulary + 1], SamplingParams(max_tokens=9), prompt_table=table
                )
            ),
        )

    inside = InProcessEngine(start_real_engine(str(engine_folder), SETTINGS))
    outside = EngineClient(engine_folder, SETTINGS)
    try:
        async with asyncio.timeout(90):
            await outside.start()
            expected = await all_of_it(inside)
            found = await all_of_it(outside)
    finally:
        inside.close()
        await outside.stop()
    assert [answer[0] for answer in found] == [answer[0] for answer in expected]
    assert [answer[3] for answer in found] == ["stop", "length", "length", "length"]
    scores = found[1][1]
    timing = found[1][2]
    for name, count in (("context_logits", 3), ("generation_logits", 9)):
        ours, theirs = (
            np.frombuffer(getattr(s, name), np.float32) for s in (scores, expected[1][1])
        )
        assert len(ours) % count == 0
        assert np.allclose(ours, theirs, atol=1e-3)
    assert len(scores.prompt_log_probs) == 2
    assert all(value < 0 and math.isfinite(value) for value in scores.prompt_log_probs)
    assert 0 < timing.arrived_ns < timing.last_token_ns

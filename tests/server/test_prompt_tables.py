"""Prompt tuning: ids beyond the vocabulary select rows of the request's embedding table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from grpc_stack import ask, request, running, tensor, text_inputs, token_inputs
from optional_tensors import write_declared
from run_engine import engine, run_all
from tiny_engine import HIDDEN, VOCABULARY, build_tiny_engine
from tritonclient.grpc import InferInput

from slipstream.engine.request import GenerateRequest, PromptTable
from slipstream.engine.sampling_params import SamplingParams

ROWS = 5
PROMPT = [
    7,
    VOCABULARY + 2,
    VOCABULARY,
    33,
    VOCABULARY + 4,
    8,
    8,
    41,
    60,
    61,
    62,
    63,
    VOCABULARY + 1,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def model(folder):
    return hf.AutoModelForCausalLM.from_pretrained(folder.parent / "model", dtype=torch.float32)


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, HIDDEN)).astype(np.float16)


def sent(values: np.ndarray) -> PromptTable:
    return PromptTable(VOCABULARY, len(values), values.astype(np.float32).tobytes())


def expected(model: Any, values: np.ndarray, prompt: list[int], count: int) -> list[int]:
    """Return the greedy answer of transformers to the same embeddings."""
    known = torch.tensor([token if token < VOCABULARY else 0 for token in prompt])
    with torch.inference_mode():
        embeddings = model.get_input_embeddings()(known).clone()
        for position, token in enumerate(prompt):
            if token >= VOCABULARY:
                embeddings[position] = torch.from_numpy(
                    values[token - VOCABULARY].astype(np.float32)
                )
        answer = model.generate(
            inputs_embeds=embeddings[None],
            max_new_tokens=count,
            do_sample=False,
            attention_mask=torch.ones(1, len(prompt)),
            eos_token_id=None,
            pad_token_id=0,
        )
    return answer[0].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"step_tokens": 3},
        {"block_tokens": 4},
        {"policy": "max_utilization", "cache_tokens": 64, "block_tokens": 4, "max_rows": 8},
    ],
    ids=["whole", "in steps", "small blocks", "preempted"],
)
def test_prompt_table_rows_replace_ids_beyond_the_vocabulary(folder, model, settings):
    loop = engine(folder, **settings)
    tables = [table(seed) for seed in range(4)]
    sampling = SamplingParams(max_tokens=20)
    requests = [
        GenerateRequest(index, PROMPT, sampling, prompt_table=sent(values), cache_salt=f"{index}")
        for index, values in enumerate(tables)
    ]
    plain = GenerateRequest(9, [token % VOCABULARY for token in PROMPT], sampling)
    answers = run_all(loop, [*requests[:2], plain, *requests[2:]])
    for index, values in enumerate(tables):
        assert answers[index] == expected(model, values, PROMPT, 20)
    assert answers[9] == run_all(engine(folder), [plain])[9]
    assert len({tuple(answers[index]) for index in range(4)}) > 1
    if "policy" in settings:
        assert loop.stats().preemptions > 0


def test_ids_beyond_the_prompt_table_are_rejected(folder):
    request = GenerateRequest(1, [VOCABULARY + ROWS], SamplingParams(), prompt_table=sent(table(0)))
    answers = run_all(engine(folder), [request, GenerateRequest(2, [VOCABULARY], SamplingParams())])
    assert f"token id {VOCABULARY + ROWS} is outside" in answers.errors[1]
    assert f"token id {VOCABULARY} is outside" in answers.errors[2]


def table_inputs(values: np.ndarray, size: int | None = ROWS) -> list[InferInput]:
    given = InferInput("prompt_embedding_table", [1, *values.shape], "FP16")
    given.set_data_from_numpy(values[None])
    return [given, *([] if size is None else [tensor("prompt_vocab_size", [size], "INT32")])]


async def test_different_prompt_tables_share_no_cached_blocks(folder, model, tmp_path):
    repo = write_declared(tmp_path / "repo", folder)
    prompt = PROMPT * 6  # several blocks
    asks = [tensor("return_num_cached_tokens", [True], "BOOL")]
    async with running(folder, repo.parent, keep=True) as stack:

        async def answer(values: np.ndarray) -> tuple[list[int], int]:
            inputs = [*token_inputs(prompt, 8, stream=False), *table_inputs(values), *asks]
            ((result, error),) = await ask(stack.client, request("tensorrt_llm", inputs))
            assert error is None
            return result.as_numpy("output_ids").flatten().tolist(), int(
                result.as_numpy("num_cached_tokens")[0, 0]
            )

        for seed in (1, 2, 1):
            ids, cached = await answer(table(seed))
            assert ids == expected(model, table(seed), prompt, 8)
        assert cached == 64  # the first table is used for the second time


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            table_inputs(np.zeros((ROWS, HIDDEN + 1), np.float16)),
            "has rows of 33 numbers, the model's hidden size is 32",
        ),
        (
            table_inputs(np.zeros((ROWS, HIDDEN), np.float16), ROWS + 1),
            "has 5 rows, fewer than the prompt_vocab_size",
        ),
        (
            table_inputs(np.zeros((2, HIDDEN), np.float16), None),
            "input_ids holds the id 100, the last of",
        ),
        (
            table_inputs(np.full((ROWS, HIDDEN), np.inf, np.float16)),
            "must hold finite numbers between -65504 and 65504",
        ),
        (
            table_inputs(np.full((ROWS, HIDDEN), np.nan, np.float16)),
            "must hold finite numbers between -65504 and 65504",
        ),
        (
            [tensor("prompt_vocab_size", [3], "INT32")],
            "prompt_vocab_size is 3, but there is no prompt_embedding_table",
        ),
    ],
)
async def test_prompt_tables_of_wrong_size_are_rejected_by_name(folder, tmp_path, inputs, message):
    async with running(
        folder, write_declared(tmp_path / "repo", folder).parent, keep=True
    ) as stack:
        ((_, error),) = await ask(
            stack.client, request("tensorrt_llm", [*token_inputs(PROMPT, 4, False), *inputs])
        )
        assert message in str(error)


async def test_text_models_reject_prompt_tables(folder, tmp_path):
    async with running(
        folder, write_declared(tmp_path / "repo", folder).parent, keep=True
    ) as stack:
        inputs = [*text_inputs("1 2 3", 4, False), *table_inputs(table(0))]
        ((_, error),) = await ask(stack.client, request("ensemble", inputs))
        assert "prompt_embedding_table works with token ids beyond the vocabulary" in str(error)

"""Scores, masks and prompt tables on a GPU, with graphs and two plans in flight."""

import itertools

import numpy as np
import pytest
import torch
from run_outputs import ALL, matrix, run
from test_gpu_engine import gpu_engine, prompts, tiny
from tiny_models import SIZES, VOCABULARY

from slipstream.engine.request import GenerateRequest, PromptTable
from slipstream.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu


def reference(model, sequence):
    with torch.inference_mode():
        return model(torch.tensor([sequence])).logits[0].float()


@pytest.mark.parametrize(
    "way",
    [{}, {"step_tokens": 48}, {"policy": "max_utilization", "cache_tokens": 640}],
    ids=["whole", "in steps", "preempted"],
)
def test_gpu_scores_equal_transformers(way):
    model = tiny("llama")
    asked = SamplingParams(max_tokens=40, temperature=0.9, seed=5, **ALL)
    given = prompts(8)
    requests = [
        GenerateRequest(i, p, SamplingParams(max_tokens=40) if i % 3 == 2 else asked)
        for i, p in enumerate(given)
    ]
    outputs = run(gpu_engine(model, **way), requests)
    for index, scores in outputs.scores.items():
        prompt, answer = given[index], outputs.tokens[index]
        expected = reference(model, prompt + answer)
        torch.testing.assert_close(
            matrix(scores.context_logits), expected[: len(prompt)], atol=2e-2, rtol=2e-2
        )
        torch.testing.assert_close(
            matrix(scores.generation_logits), expected[len(prompt) - 1 : -1], atol=2e-2, rtol=2e-2
        )
        log_probs = expected.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        assert np.allclose(scores.prompt_log_probs, log_probs, atol=2e-2)
        best = expected[: len(prompt) - 1].log_softmax(-1).topk(3).values
        found = [[value for _, value in top] for top in scores.top_prompt_log_probs]
        assert np.allclose(np.reshape(found, (-1, 3)), best, atol=2e-2)
        assert len(scores.prompt_ranks) == len(prompt) - 1
    alone = run(gpu_engine(model), [GenerateRequest(2, given[2], SamplingParams(max_tokens=40))])
    assert outputs.tokens[2] == alone.tokens[2]


def test_gpu_requests_keep_to_allowed_tokens_and_keep_end_tokens():
    model = tiny("llama")
    given = prompts(4)
    plain = SamplingParams(max_tokens=20)
    alone = [run(gpu_engine(model), [GenerateRequest(0, p, plain)]).tokens[0] for p in given]
    allowed = SamplingParams(max_tokens=20, allowed_tokens=(3, 11, 40), temperature=2.0, seed=1)
    ended = SamplingParams(max_tokens=20, end_ids=(alone[2][5],), include_end=True)
    samplings = [plain, allowed, ended, plain]
    outputs = run(
        gpu_engine(model), [GenerateRequest(i, p, samplings[i]) for i, p in enumerate(given)]
    )
    assert set(outputs.tokens[1]) <= {3, 11, 40}
    assert outputs.tokens[2] == alone[2][: alone[2].index(alone[2][5]) + 1]
    assert outputs.reasons[2] == "stop"
    assert [outputs.tokens[0], outputs.tokens[3]] == [alone[0], alone[3]]


class Alternating:
    """Allows even tokens after odd ones and odd tokens after even ones; ends after ten."""

    error = ""

    def mask(self, tokens):
        word = 0x55555555 if tokens and tokens[-1] % 2 else 0xAAAAAAAA
        return word.to_bytes(4, "little") * (-(-VOCABULARY // 32))

    def complete(self, tokens):
        return len(tokens) == 10


def test_masks_wait_for_the_previous_token_and_change_no_other_request():
    model = tiny("llama")
    given = prompts(6)
    free = SamplingParams(max_tokens=30, temperature=0.7, seed=2)
    alone = [run(gpu_engine(model), [GenerateRequest(0, p, free)]).tokens[0] for p in given[::2]]
    loop = gpu_engine(model)
    for index, prompt in enumerate(given):
        loop.scheduler.add(
            GenerateRequest(index, prompt, free), Alternating() if index % 2 else None
        )
    outputs = run(loop, [])
    for index in range(6):
        if index % 2:
            tokens = outputs.tokens[index]
            assert [token % 2 for token in tokens] == [1, 0] * 5
            assert outputs.reasons[index] == "stop"
        else:
            assert outputs.tokens[index] == alone[index // 2]


def test_prompt_tables_and_no_repeat_ngrams_on_the_gpu():
    model = tiny("llama")
    values = np.random.default_rng(1).normal(size=(3, SIZES["hidden_size"])).astype(np.float32)
    prompt = [5, VOCABULARY + 2, 7, VOCABULARY, 9, VOCABULARY + 1]
    table = PromptTable(VOCABULARY, 3, values.tobytes())
    sampling = SamplingParams(max_tokens=24, no_repeat_ngram=2)
    outputs = run(
        gpu_engine(model),
        [
            GenerateRequest(0, prompt, SamplingParams(max_tokens=24), prompt_table=table),
            GenerateRequest(1, [5, 7, 9], sampling),
        ],
    )
    with torch.inference_mode():
        embeddings = model.get_input_embeddings()(
            torch.tensor([token % VOCABULARY for token in prompt])
        ).clone()
        for position in (1, 3, 5):
            embeddings[position] = torch.from_numpy(values[prompt[position] - VOCABULARY])
        expected = model.generate(
            inputs_embeds=embeddings[None],
            max_new_tokens=24,
            do_sample=False,
            attention_mask=torch.ones(1, 6),
            eos_token_id=None,
            pad_token_id=0,
        )
    assert outputs.tokens[0] == expected[0].tolist()
    tokens = [5, 7, 9, *outputs.tokens[1]]
    assert len(set(itertools.pairwise(tokens))) == len(tokens) - 1

"""The default model with its real weights: the same tokens as transformers from the same file."""

import functools
import random

import pytest
import torch
from compiled_engines import context_logits
from run_engine import all_logits, engine, generate, greedy_choices

from slipstream.engine.cpu.runner import CpuRunner
from slipstream.server.text.stream import TextStream
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.build import build_engine
from slipstream.weights.sources.known_models import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    fetch_packaged_model,
)

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is machine learning?\nA:",
    "The three laws of thermodynamics are",
    "1, 2, 3, 4, 5,",
    "Water boils at",
    "In 1969, Neil Armstrong",
    "Dear Sir or Madam,\n\nI am writing to",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "El perro corre por",
]
"""More than ten: prose, code, numbers, dialogue, another language."""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(tmp_path_factory.mktemp("home")))
        yield fetch_packaged_model(DEFAULT_MODEL, KNOWN_MODELS[DEFAULT_MODEL])


@pytest.fixture(scope="module")
def oracle(gguf):
    import gguf as reader
    from transformers import AutoModelForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file twice, and rebuilds a table of names for each module
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(reader, name, functools.cache(getattr(reader, name)))
        return AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        ).eval()


@pytest.fixture(scope="module")
def folder(gguf, tmp_path_factory):
    return build_engine(gguf, tmp_path_factory.mktemp("smollm2") / "engine", dtype="float32")


@pytest.fixture(scope="module")
def sequences(folder):
    """Return prompts, each followed by 80 greedy tokens of the engine."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]
    answers = generate(engine(folder, max_rows=16), prompts, max_tokens=80)
    return [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module")
def chosen(oracle, sequences):
    return greedy_choices(oracle, [prompt + answer for prompt, answer in sequences])


def test_greedy_tokens_are_those_of_transformers(sequences, chosen):
    for (prompt, answer), theirs in zip(sequences, chosen, strict=True):
        assert answer == theirs[len(prompt) - 1 : -1]


def test_bfloat16_agrees_on_99_percent_of_tokens(gguf, sequences, chosen, tmp_path):
    halved = build_engine(gguf, tmp_path / "engine", dtype="bfloat16")
    logits = all_logits(halved, torch.bfloat16, [prompt + answer for prompt, answer in sequences])
    same = total = 0
    for (prompt, answer), ours, theirs in zip(sequences, logits, chosen, strict=True):
        window = slice(len(prompt) - 1, -1)  # teacher-forced along the greedy answer
        same += sum(
            a == b for a, b in zip(ours.argmax(-1).tolist()[window], theirs[window], strict=True)
        )
        total += len(answer)
    assert same / total >= 0.99, f"{same} of {total}"


@pytest.mark.slow
def test_compiled_bfloat16_agrees_with_float32(gguf, folder, tmp_path):
    """On 1,920 tokens of Python's reference: the likeliest token of each position."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    text = "".join(topics[name] for name in sorted(topics))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    windows = [tokens[begin : begin + 480] for begin in range(0, 4 * 4800, 4800)]
    halved = build_engine(gguf, tmp_path / "engine", dtype="bfloat16")
    loop = engine(halved, dtype="bfloat16")
    assert isinstance(loop.runner, CpuRunner)
    same = 0
    for window, exact in zip(windows, all_logits(folder, torch.float32, windows), strict=True):
        found = context_logits(loop, window, exact.shape[1])
        same += int((found.argmax(-1) == exact.argmax(-1).numpy()).sum())
    assert same / (4 * 480) >= 0.992, f"{same} of {4 * 480}"


@pytest.mark.slow
def test_fp8_costs_less_than_one_percent_of_perplexity(gguf, tmp_path):
    """On 8,176 tokens of Python's reference that were not used to choose the fp8 layers."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    text = "".join(topics[name] for name in sorted(topics))

    def loss(weight_only):
        folder = build_engine(gguf, tmp_path / str(weight_only), weight_only=weight_only)
        tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
        windows = [tokens[begin : begin + 512] for begin in range(48 * 512, 64 * 512, 512)]
        parts = zip(all_logits(folder, torch.bfloat16, windows), windows, strict=True)
        losses = [
            torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]))
            for logits, window in parts
        ]
        return torch.stack(losses).mean()

    assert (loss("fp8") - loss(None)).exp() < 1.01


def test_streamed_pieces_of_its_tokenizer_equal_the_whole_text(folder):
    tokenizer = Tokenizer.load(folder)
    chance = random.Random(1)
    sequences = [tokenizer.encode(prompt) for prompt in PROMPTS]
    # random tokens split characters in every way
    sequences += [[chance.randrange(49152) for _ in range(40)] for _ in range(200)]
    for ids in sequences:
        stream = TextStream(tokenizer)
        pieces = [stream.push([token]) for token in ids]
        assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids)

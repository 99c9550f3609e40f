"""slipstream.LLM gives transformers' greedy answers on tiny random checkpoints."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import slipstream
from slipstream.llm import LLM, Completion, GenerationFailed, SamplingOptions
from slipstream.server.text.chat import ChatError
from slipstream.server.text.pipeline import PromptError

PROMPTS = [
    "The quick brown fox",
    "日本 🎉",
    "a",
    "the lazy dog sleeps. the fox jumps over the lazy dog. the",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant"


def write_tokenizer(folder: Path) -> int:
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["The quick brown fox jumps over the lazy dog. 日本"] * 9, trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True, scope="module")
def own_home(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(home))
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=write_tokenizer(folder),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint):
    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(checkpoint, own_home):
    with LLM(checkpoint, dtype="float32", cache_tokens=4096) as llm:
        yield llm


def greedy(model, llm: LLM, ids: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    tokens = output[0, len(ids) :].tolist()
    return tokens[: tokens.index(0)] if 0 in tokens else tokens


def test_greedy_answers_equal_transformers(llm, reference):
    completions = llm.generate(PROMPTS, max_tokens=48)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = llm.tokenizer.encode(prompt)
        assert completion.tokens == greedy(reference, llm, ids, 48)
        assert completion.text == llm.tokenizer.decode(completion.tokens)
        assert completion.prompt_tokens == len(ids)
        assert completion.finish_reason == ("length" if len(completion.tokens) == 48 else "stop")


def test_log_probs_equal_transformers(llm, reference):
    (completion,) = llm.generate(PROMPTS[0], max_tokens=8, log_probs=True, top_log_probs=3)
    ids = llm.tokenizer.encode(PROMPTS[0])
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + completion.tokens])).logits[0].log_softmax(-1)
    rows = logits[len(ids) - 1 : -1]
    expected = [row[token].item() for row, token in zip(rows, completion.tokens, strict=True)]
    assert completion.log_probs == pytest.approx(expected, abs=1e-3)
    for row, top in zip(rows, completion.top_log_probs, strict=True):
        assert [token for token, _ in top] == row.topk(3).indices.tolist()


def test_embeddings_equal_those_of_transformers(llm, reference):
    found = llm.embed([*PROMPTS, [5, 6, 7]], pooling="mean")
    for vector, prompt in zip(found, [*PROMPTS, [5, 6, 7]], strict=True):
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        with torch.inference_mode():
            state = reference.model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
        assert torch.allclose(torch.tensor(vector), state / state.norm(), atol=1e-5)
    assert llm.embed("a", pooling="last").shape == (1, 64)
    with pytest.raises(ValueError, match="pooling must be one of last, mean"):
        llm.embed("a")


def test_prompts_may_be_texts_or_tokens_single_or_in_lists(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    (one,) = llm.generate(PROMPTS[0], max_tokens=4)
    assert [c.tokens for c in llm.generate(ids, max_tokens=4)] == [one.tokens]
    assert [c.tokens for c in llm.generate([ids, ids], max_tokens=4)] == [one.tokens] * 2
    assert llm.generate([]) == []


def test_a_stop_word_ends_the_text(llm):
    (whole,) = llm.generate(PROMPTS[0], max_tokens=32)
    stop = whole.text[6:9]
    (cut,) = llm.generate(PROMPTS[0], max_tokens=32, stop=stop)
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert cut.finish_reason == "stop"
    assert cut.tokens == whole.tokens[: len(cut.tokens)]


def test_end_ids_end_the_text_and_ignore_end_does_not(llm):
    (whole,) = llm.generate(PROMPTS[0], max_tokens=12, ignore_end=True)
    end = whole.tokens[5]
    (cut,) = llm.generate(PROMPTS[0], max_tokens=12, end_ids=[end])
    assert cut.tokens == whole.tokens[: whole.tokens.index(end)]
    assert cut.finish_reason == "stop"
    assert len(whole.tokens) == 12


def test_bad_words_are_never_generated(llm):
    (whole,) = llm.generate(PROMPTS[0], max_tokens=12)
    token = next(token for token in whole.tokens if llm.tokenizer.decode([token]).strip().isalpha())
    word = llm.tokenizer.decode([token]).strip()
    (without,) = llm.generate(PROMPTS[0], max_tokens=12, bad_words=word)
    assert token not in without.tokens


def test_sampling_follows_its_seed(llm):
    def sample(seed: int | None) -> list[int]:
        return llm.generate(PROMPTS[0], max_tokens=24, temperature=1.5, seed=seed)[0].tokens

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)
    assert len({tuple(sample(None)) for _ in range(4)}) == 4


def test_a_repeated_prompt_is_found_in_the_cache(llm):
    prompt = "over the lazy dog " * 10
    (first,) = llm.generate(prompt, max_tokens=4)
    (second,) = llm.generate(prompt, max_tokens=4)
    assert second.cached_tokens > 0
    assert second.tokens == first.tokens


def test_chat_equals_the_completion_of_the_rendered_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant"
    answer = llm.chat(messages, max_tokens=8)
    assert isinstance(answer, Completion)
    assert answer == llm.generate(llm.tokenizer.encode(rendered, False), max_tokens=8)[0]
    with pytest.raises(ChatError, match="at least one message"):
        llm.chat([])


async def test_streamed_pieces_equal_the_completion(llm):
    (whole,) = await asyncio.to_thread(llm.generate, PROMPTS[1], max_tokens=32)
    pieces = [piece async for piece in llm.stream(PROMPTS[1], max_tokens=32)]
    assert "".join(pieces) == whole.text
    chat = [piece async for piece in llm.stream([{"role": "user", "content": "hi"}], max_tokens=8)]
    assert (
        "".join(chat)
        == (
            await asyncio.to_thread(llm.chat, [{"role": "user", "content": "hi"}], max_tokens=8)
        ).text
    )


async def test_generate_from_inside_a_running_event_loop(llm):
    assert len(llm.generate("a", max_tokens=2)[0].tokens) <= 2


async def test_leaving_a_stream_early_frees_its_blocks(llm):
    async with asyncio.timeout(30):
        stream = llm.stream("the", max_tokens=200, ignore_end=True)
        await anext(stream)
        assert llm._engine.outstanding == 1
        await stream.aclose()
        while llm._engine.outstanding:
            await asyncio.sleep(0.01)


def test_a_prompt_over_the_input_limit_is_refused_and_output_is_clipped(llm):
    with pytest.raises(
        PromptError, match=r"Prompt length \(300\) exceeds maximum input length \(255\)\."
    ):
        llm.generate([[5] * 3, [5] * 300], max_tokens=4)
    assert len(llm.generate([[5] * 250], max_tokens=100, ignore_end=True)[0].tokens) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be > 0, got 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"top_p": 1.5}, "top_p must be at least 0 and at most 1"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
    ],
)
def test_options_out_of_bounds_are_refused_by_name(llm, options, message):
    with pytest.raises(ValueError, match=message):
        llm.generate("a", **options)


def test_unknown_options_and_options_given_twice_are_rejected(llm):
    with pytest.raises(TypeError, match="temprature"):
        llm.generate("a", temprature=1.0)
    with pytest.raises(TypeError, match="not both: max_tokens"):
        llm.generate("a", SamplingOptions(), max_tokens=4)
    assert llm.generate("a", SamplingOptions(max_tokens=3)) == llm.generate("a", max_tokens=3)


def test_the_engine_is_built_once_and_reused(checkpoint, llm, home):
    built = list((home / "engines").glob("*/config.json"))
    assert [file.parent for file in built] == [llm.folder]
    written = built[0].stat().st_mtime_ns
    with (
        LLM(checkpoint, "float32") as again,
        LLM(llm.folder, "float32", cache_tokens=4096) as from_engine,
    ):
        assert again.folder == from_engine.folder == llm.folder
        expected = llm.generate("a", max_tokens=4)
        assert (
            again.generate("a", max_tokens=4) == from_engine.generate("a", max_tokens=4) == expected
        )
    assert built[0].stat().st_mtime_ns == written


def test_a_gpt2_folder_without_tokenizer_json_is_loaded(tmp_path):
    size = write_tokenizer(tmp_path)
    LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json")).model.save(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer"})
    )
    torch.manual_seed(2)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=128, **ends)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32", cache_tokens=4096) as llm:
        (completion,) = llm.generate(PROMPTS[0], max_tokens=32)
        assert completion.tokens == greedy(model, llm, llm.tokenizer.encode(PROMPTS[0]), 32)


def test_a_closed_llm_rejects_requests(checkpoint):
    llm = LLM(checkpoint, dtype="float32", cache_tokens=4096)
    assert llm.generate("a", max_tokens=2)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", max_tokens=2)


def test_a_folder_without_a_model_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="no such folder or file"):
        LLM(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_config": {}}))
    with pytest.raises(ValueError, match="weight_only"):
        LLM(tmp_path, weight_only="int8")


def test_a_failed_request_raises_generation_failed(llm, monkeypatch):
    async def broken(self, request):
        from slipstream.server.engine_link.engine import TextOutput

        yield TextOutput(finish_reason="error", error="out of memory")

    monkeypatch.setattr(type(llm._generator), "generate", broken)
    with pytest.raises(GenerationFailed, match="out of memory"):
        llm.generate("a")


def test_the_package_exports_llm():
    assert slipstream.LLM is LLM


def test_settings_have_the_names_of_the_flags(checkpoint):
    with LLM(checkpoint, dtype="float32", max_num_seqs=3, max_seq_len=64, max_num_tokens=16) as llm:
        info = llm._engine.info
    assert (info.max_rows, info.max_sequence_tokens, info.step_tokens) == (3, 64, 16)
    assert info.rows_bound == "setting"
    with pytest.raises(ValueError, match="weight_only and quantization are the same setting"):
        LLM(checkpoint, weight_only="int8", quantization="int8")


@pytest.mark.parametrize("settings", [{"replicas": 2}, {"devices": [0]}])
def test_replicas_are_a_setting_of_servers(settings):
    with pytest.raises(ValueError, match=r"^replicas and devices are settings of servers: an LLM"):
        LLM("nowhere", **settings)

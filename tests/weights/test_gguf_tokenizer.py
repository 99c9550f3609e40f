"""Tokenizers written as GGUF metadata and read back encode every text in the same way."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from slipstream.weights.engine_config import GenerationDefaults
from slipstream.weights.sources.gguf_tokenizer import build_tokenizer, tokenizer_files
from slipstream.weights.sources.source import SourceError

TEXTS = [
    "The quick brown fox jumps over the lazy dog, 12345 times; it's what they'll do, I'LL too.",
    "Żółć, naïve café, Straße, Ελληνικά, русский текст, हिन्दी, العربية, 日本語テキスト, 한국어, 🤖👩‍👩‍👧.",
    "def f(x):\n    return x ** 2 + 10_000\n\n\n\t# comment   with   spaces   \r\n",
    "  leading and trailing  ",
    "①②③ ٣٤٥ ４５６ 2024-01-31 3.14159",
    "é versus é",
    "",
    " ",
    "\n",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
any_text = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from(list(" '\n\t1234abcSLé日"))),
    max_size=60,
)


def byte_level(
    *, pre_tokenizer: Any, normalizer: Any = None, ignore_merges: bool = False
) -> Tokenizer:
    """Return a tokenizer like the fast ones of these models at the hub, trained on the texts above."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
HUB_TOKENIZERS = {
    "gpt-2": byte_level(pre_tokenizer=GPT2),
    "smollm": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
    ),
    "llama-bpe": byte_level(pre_tokenizer=split(LLAMA3), ignore_merges=True),
    "qwen2": byte_level(pre_tokenizer=split(QWEN2), normalizer=normalizers.NFC()),
    "falcon": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                GPT2,
                pre_tokenizers.Digits(individual_digits=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        )
    ),
}


def byte_level_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
    types = [3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


READ_BACK = {
    pre: build_tokenizer(byte_level_metadata(tokenizer, pre))
    for pre, tokenizer in HUB_TOKENIZERS.items()
}


@pytest.mark.parametrize("pre", HUB_TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=any_text)
def test_byte_level_encodes_any_text_like_the_hub_tokenizer(pre: str, text: str) -> None:
    expected = HUB_TOKENIZERS[pre].encode(text).ids
    assert READ_BACK[pre].encode(text).ids == expected
    assert READ_BACK[pre].decode(expected) == HUB_TOKENIZERS[pre].decode(expected)


@pytest.mark.parametrize("pre", HUB_TOKENIZERS)
def test_byte_level_encodes_special_tokens_like_the_hub_tokenizer(pre: str) -> None:
    text = "<|im_start|>user\n" + "<|im_end|>\n<tool>".join(TEXTS)
    expected = HUB_TOKENIZERS[pre].encode(text).ids
    # without learnt merges the splits would have no effect
    assert len(expected) < 0.8 * len(text.encode())
    assert READ_BACK[pre].encode(text).ids == expected
    assert READ_BACK[pre].decode(expected) == HUB_TOKENIZERS[pre].decode(expected)
    assert "<tool>" in READ_BACK[pre].decode(expected)
    assert "<|im_end|>" not in READ_BACK[pre].decode(expected)


@pytest.mark.parametrize(
    ("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]
)
def test_a_word_in_the_vocabulary_without_merges(pre: str, whole: bool) -> None:
    metadata = byte_level_metadata(HUB_TOKENIZERS["gpt-2"], pre)
    metadata["tokenizer.ggml.tokens"].append("zqxj")
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], 1)
    assert (build_tokenizer(metadata).encode("zqxj").tokens == ["zqxj"]) is whole


def test_the_splits_differ() -> None:
    """The tests above could not detect a wrong split otherwise."""
    metadata = byte_level_metadata(HUB_TOKENIZERS["llama-bpe"], "llama-bpe")
    cuts = set()
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"):
        tokenizer = build_tokenizer({**metadata, "tokenizer.ggml.pre": pre})
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str("camelCase 123456 I'LL\n\n\n  x ١٢٣")
        cuts.add(tuple(piece for piece, _ in pieces))
    assert len(cuts) == 5


@pytest.fixture(scope="module")
def piece_model() -> sentencepiece.SentencePieceProcessor:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS * 20 if text.strip()]),
        model_writer=trained,
        vocab_size=460,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


def piece_metadata(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    def kind(number: int) -> int:
        return (
            2
            if model.is_unknown(number)
            else 3
            if model.is_control(number)
            else 6
            if model.is_byte(number)
            else 1
        )

    numbers = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(number) for number in numbers],
        "tokenizer.ggml.scores": np.array(
            [model.get_score(number) for number in numbers], np.float32
        ),
        "tokenizer.ggml.token_type": np.array([kind(number) for number in numbers], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentence_piece_encodes_like_the_library(
    piece_model: sentencepiece.SentencePieceProcessor,
) -> None:
    tokenizer = build_tokenizer(
        {**piece_metadata(piece_model), "tokenizer.ggml.add_bos_token": False}
    )
    words = 0
    for text in [*filter(None, TEXTS), *" ".join(TEXTS).split(), "𝔘𝔫𝔦 𓀀 \x00\x01 never seen"]:
        expected = piece_model.encode(text)
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected) == text
        words += len(expected) < len(text.encode())
    assert words > 20  # pieces longer than a byte were used


def test_sentence_piece_adds_bos_by_default(
    piece_model: sentencepiece.SentencePieceProcessor,
) -> None:
    metadata = piece_metadata(piece_model)
    plain = piece_model.encode("fox")
    assert build_tokenizer(metadata).encode("fox").ids == [1, *plain]
    assert build_tokenizer({**metadata, "tokenizer.ggml.add_eos_token": True}).encode(
        "fox"
    ).ids == [1, *plain, 2]
    assert build_tokenizer(metadata).encode("fox", add_special_tokens=False).ids == plain
    unprefixed = build_tokenizer({**metadata, "tokenizer.ggml.add_space_prefix": False})
    assert unprefixed.encode(" fox").ids == [1, *plain]
    assert unprefixed.decode(plain) == " fox"


def test_byte_level_adds_bos_if_the_metadata_says_so() -> None:
    metadata = byte_level_metadata(HUB_TOKENIZERS["gpt-2"], "gpt-2")
    plain = build_tokenizer(metadata).encode("fox").ids
    assert build_tokenizer({**metadata, "tokenizer.ggml.add_bos_token": True}).encode(
        "fox"
    ).ids == [0, *plain]


def test_unused_tokens_are_left_out() -> None:
    metadata = byte_level_metadata(HUB_TOKENIZERS["gpt-2"], "gpt-2")
    metadata["tokenizer.ggml.tokens"].append("[PAD420]")
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], 5)
    assert build_tokenizer(metadata).token_to_id("[PAD420]") is None


def test_tokenizer_files_hold_the_metadata() -> None:
    metadata = {
        **byte_level_metadata(HUB_TOKENIZERS["gpt-2"], "gpt-2"),
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.padding_token_id": 2,
    }
    files = tokenizer_files(metadata, GenerationDefaults((2, 1), 0, 2), 512)
    config = json.loads(files["tokenizer_config.json"])
    assert config["bos_token"] == "<|endoftext|>"
    assert config["eos_token"] == config["pad_token"] == "<|im_end|>"
    assert (config["chat_template"], config["model_max_length"]) == ("{{ messages }}", 512)
    assert (config["add_bos_token"], config["add_eos_token"]) == (False, False)
    assert json.loads(files["generation_config.json"]) == {
        "eos_token_id": [2, 1],
        "bos_token_id": 0,
        "pad_token_id": 2,
    }
    loaded = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert loaded.encode(TEXTS[0]).ids == HUB_TOKENIZERS["gpt-2"].encode(TEXTS[0]).ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "chatglm-bpe"}, "'chatglm-bpe'.*Hugging Face folder"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
        ({"tokenizer.ggml.merges": ["nosuch pair"]}, "damaged"),
        ({"tokenizer.ggml.token_type": np.array([1, 1])}, "damaged"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**6}, "damaged"),
    ],
)
def test_unsupported_tokenizers_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        build_tokenizer({**byte_level_metadata(HUB_TOKENIZERS["gpt-2"], "gpt-2"), **change})

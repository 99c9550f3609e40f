"""Tokenizer folders of every kind, trained for the tests, and sample texts."""

from __future__ import annotations

import atexit
import functools
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "hello world, hello again!  Two spaces,   three spaces.\n\tdef f(x):\n\t\treturn x ** 2\n",
    "1234567890 3.14159 2024-11-15 http://example.com/a?b=c&d=e",
    "日本語のテキストと中文文本和한국어 텍스트。東京は日本の首都です。",
    "مرحبا بالعالم، هذا نص عربي. שלום עולם. Привет, мир! Γειά σου Κόσμε.",
    "naïve café résumé coöperate Ångström e\u0301a\u0308",
    "👩‍👩‍👧‍👦 🎉🎉 👍🏽 🇯🇵 ❤️",
] * 8

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

texts = st.one_of(
    st.text(max_size=60),
    st.text(
        alphabet=st.sampled_from(
            "ab <s>▁ Ġé\n日本語中文한👩‍👧🎉🏽❤️e\u0301ن\u200fа0\x00\u2028\ufffd"
        ),
        max_size=60,
    ),
    st.lists(
        st.sampled_from([*CORPUS, "👩‍👩‍👧‍👦", "</s>", "<s>", "<|im_end|>", "<0xE6>"]), max_size=3
    ).map("".join),
)

# Without texts of added tokens, and without the character that SentencePiece uses for a space.
plain_texts = texts.map(lambda text: text.replace("<", "").replace("▁", ""))


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="tokenizers-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def write_folder(name: str, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    """Write a tokenizer folder. Keyword arguments are the contents of further files.

    `config` is tokenizer_config.json. Other names have `_json` in place of `.json`.
    """
    folder = _root() / name
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    for key, content in files.items():
        file = "tokenizer_config.json" if key == "config" else key.replace("_json", ".json")
        (folder / file).write_text(json.dumps(content))
    return folder


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<外>", special=False)])
    return tokenizer


@functools.cache
def byte_level() -> Path:
    """Return a byte-level tokenizer like those of GPT-2, Llama 3 and Qwen."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
    }
    return write_folder("byte_level", byte_level_tokenizer(), config=config)


@functools.cache
def gpt2_files() -> Path:
    folder = write_folder("gpt2_files", config={"tokenizer_class": "GPT2Tokenizer"})
    byte_level_tokenizer().model.save(str(folder))
    return folder


def _merged_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS[:2] * 8, trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].get)
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *learned]
    return {token: i for i, token in enumerate(tokens)}, [tuple(merge) for merge in model["merges"]]


@functools.cache
def llama2_json() -> Path:
    """Return a tokenizer.json like that of Llama 2, with byte tokens for unknown characters."""
    vocabulary, merges = _merged_vocabulary()
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = llama_decoder()
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return write_folder(
        "llama2", tokenizer, config={"tokenizer_class": "PreTrainedTokenizerFast", **names}
    )


def llama_decoder() -> decoders.Decoder:
    strip = decoders.Strip(content=" ", left=1)
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )


def sentencepiece_model(kind: str, **options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS[:7] for line in text.splitlines()] * 4),
        model_writer=model,
        model_type=kind,
        vocab_size=420,
        hard_vocab_limit=False,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def sentencepiece_folder(kind: str, name: str = "", **config: Any) -> Path:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **names, **config}
    folder = write_folder(f"sentencepiece_{kind}{name}", config=settings)
    (folder / "tokenizer.model").write_bytes(_cached_model(kind))
    return folder


@functools.cache
def _cached_model(kind: str) -> bytes:
    return sentencepiece_model(kind)


@functools.cache
def sentencepiece_bpe() -> Path:
    first = sentencepiece.SentencePieceProcessor(model_proto=_cached_model("bpe")).get_piece_size()
    tool = {"content": "<tool>", "special": False}
    end = {"content": "<|im_end|>", "special": True}
    return sentencepiece_folder("bpe", added_tokens_decoder={str(first): tool, str(first + 1): end})


@functools.cache
def sentencepiece_unigram() -> Path:
    return sentencepiece_folder("unigram")


@functools.cache
def metaspace_unigram() -> Path:
    """Return a Unigram tokenizer like that of T5, with the plain Metaspace decoder and no bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    return write_folder("metaspace", tokenizer, config=config)


@functools.cache
def word_piece() -> Path:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False),
    )
    return write_folder("word_piece", tokenizer, config={"unk_token": "[UNK]"})


@functools.cache
def words() -> Path:
    """Return a tokenizer without a decoder, whose tokens are joined by spaces."""
    vocabulary = {
        word: i for i, word in enumerate(["[UNK]", *sorted({w for t in CORPUS for w in t.split()})])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return write_folder("words", tokenizer, config={})


# Tokenizers of the model families that Slipstream serves, then other kinds of decoders.
SERVED: dict[str, Callable[[], Path]] = {
    "byte_level": byte_level,
    "gpt2_files": gpt2_files,
    "llama2_json": llama2_json,
    "sentencepiece_bpe": sentencepiece_bpe,
    "sentencepiece_unigram": sentencepiece_unigram,
}
ALL: dict[str, Callable[[], Path]] = SERVED | {
    "metaspace_unigram": metaspace_unigram,
    "word_piece": word_piece,
    "words": words,
}

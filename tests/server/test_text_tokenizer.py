"""The tokenizer equals transformers and SentencePiece on the same folders."""

import functools
import json

import pytest
import text_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.threads import THREAD_ABOVE_SIZE
from slipstream.server.text.tokenizer import Tokenizer


@functools.cache
def ours(kind: str) -> Tokenizer:
    return Tokenizer.load(samples.ALL[kind]())


@functools.cache
def theirs(kind: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(samples.ALL[kind]())


def their_decode(kind: str, ids: list[int], skip: bool) -> str:
    return theirs(kind).decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


COMPARED = ("byte_level", "gpt2_files", "llama2_json", "sentencepiece_bpe", "metaspace_unigram")


@pytest.mark.parametrize("kind", COMPARED)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decode_equals_transformers(kind, data, skip):
    last = min(ours(kind).vocab_size, len(theirs(kind))) - 1
    ids = data.draw(st.lists(st.integers(0, last), max_size=40))
    assert ours(kind).decode(ids, skip) == their_decode(kind, ids, skip)


@pytest.mark.parametrize("kind", ["byte_level", "gpt2_files", "llama2_json", "metaspace_unigram"])
@settings(max_examples=60, deadline=None)
@given(text=samples.texts)
def test_encode_equals_transformers(kind, text):
    for special in (True, False):
        expected = theirs(kind).encode(text, add_special_tokens=special)
        if special and expected[:2] == [ours(kind).bos_id] * 2:
            expected = expected[1:]  # transformers adds a second BOS, which is wrong
        assert ours(kind).encode(text, special) == expected


@pytest.mark.parametrize("kind", ["byte_level", "gpt2_files", "llama2_json", "metaspace_unigram"])
def test_long_texts_equal_transformers(kind):
    text = "Hello world, 日本 🎉</s> naïve\n" * (THREAD_ABOVE_SIZE // 20)
    expected = theirs(kind).encode(text, add_special_tokens=False)
    assert ours(kind).encode(text, add_special_tokens=False) == expected


@pytest.mark.parametrize("kind", ["sentencepiece_bpe", "sentencepiece_unigram"])
@settings(max_examples=80, deadline=None)
@given(text=samples.plain_texts)
def test_sentencepiece_tokens_equal_those_of_the_library(kind, text):
    processor = SentencePieceProcessor(model_file=str(samples.ALL[kind]() / "tokenizer.model"))
    assert ours(kind).encode(text, add_special_tokens=False) == processor.encode(text)


@pytest.mark.parametrize(
    "text", ["hello", "hello world ", "<s>hello", "a</s> world", "日本 🎉</s>日本", "a<tool>b"]
)
def test_sentencepiece_with_added_tokens_equals_transformers(text):
    """transformers joins a leading space with the prefix; the texts here begin without one."""
    expected = theirs("sentencepiece_bpe").encode(text, add_special_tokens=False)
    assert ours("sentencepiece_bpe").encode(text, add_special_tokens=False) == expected


@pytest.mark.parametrize("kind", samples.SERVED)
@settings(max_examples=60, deadline=None)
@given(text=samples.plain_texts)
def test_decoding_reverses_encoding(kind, text):
    assert ours(kind).decode(ours(kind).encode(text)) == text


def test_word_mark_prefix_is_added_only_at_the_beginning():
    tokenizer = ours("sentencepiece_bpe")
    (end,) = tokenizer.encode("</s>", add_special_tokens=False)
    alone = tokenizer.encode("the", False)
    after = tokenizer.encode("</s>the", False)
    assert after[0] == end
    assert tokenizer.decode([end, *after[1:]], skip_special_tokens=False) == "</s>the"
    assert alone != after[1:]  # "▁the" at the beginning, "the" after a token


def test_legacy_adds_the_prefix_after_every_added_token():
    tokenizer = Tokenizer.load(samples.sentencepiece_folder("bpe", "_legacy", legacy=True))
    (end,) = tokenizer.encode("</s>", add_special_tokens=False)
    assert tokenizer.encode("</s>the", False) == [end, *tokenizer.encode("the", False)]


def test_added_tokens_may_strip_adjacent_spaces():
    added = {"500": {"content": "<tool>", "lstrip": True, "rstrip": True, "special": False}}
    folder = samples.sentencepiece_folder("bpe", "_strip", added_tokens_decoder=added)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("the  <tool>  dog", False) == tokenizer.encode("the<tool>dog", False)
    assert 500 in tokenizer.encode("the<tool>dog", False)


def test_added_tokens_file_is_read_without_a_configuration():
    folder = samples.write_folder("added_tokens_file", added_tokens_json={"<tool>": 500})
    (folder / "tokenizer.model").write_bytes(samples.sentencepiece_model("bpe"))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [500]
    # of SentencePiece
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, None)
    assert tokenizer.encode("", add_special_tokens=True) == [1]


# --- one beginning-of-text token if the files ask for it ---


@pytest.mark.parametrize("kind", ["llama2_json", "sentencepiece_bpe", "sentencepiece_unigram"])
def test_beginning_of_text_token_is_added_only_once(kind):
    tokenizer = ours(kind)
    for text in ("hello", "<s>hello", "", "<s>"):
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids[0] == tokenizer.bos_id
        assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.bos_id not in tokenizer.encode("hello", add_special_tokens=False)


@pytest.mark.parametrize(
    ("setting", "count"), [({}, 0), ({"add_bos_token": False}, 0), ({"add_bos_token": True}, 1)]
)
def test_without_a_template_the_configuration_adds_the_beginning_token(setting, count):
    config = {"bos_token": "<|endoftext|>", **setting}
    folder = samples.write_folder(
        f"bos_{count}_{len(setting)}", samples.byte_level_tokenizer(), config=config
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("hello", add_special_tokens=True).count(tokenizer.bos_id) == count


def test_template_adds_tokens_on_both_sides():
    tokenizer = LibraryTokenizer.from_str(samples.byte_level_tokenizer().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    loaded = Tokenizer.load(
        samples.write_folder("both_sides", tokenizer, config={"bos_token": "<|im_start|>"})
    )
    plain = loaded.encode("hello", add_special_tokens=False)
    assert loaded.encode("hello") == [1, *plain, 2]
    assert loaded.encode("<|im_start|>hello") == [1, *plain, 2]


# --- ids and names ---


@pytest.mark.parametrize("kind", samples.SERVED)
def test_ids_out_of_range_are_refused_by_number(kind):
    limit = ours(kind).vocab_size
    for bad in (-1, limit, 10**12):
        with pytest.raises(TokenizerError, match=f"token id {bad} "):
            ours(kind).decode([1, bad])
    assert isinstance(ours(kind).decode([limit - 1]), str)


def test_ids_beyond_the_tokenizer_decode_to_no_text():
    folder = samples.write_folder(
        "padded", samples.byte_level_tokenizer(), config_json={"vocab_size": 4096}
    )
    tokenizer = Tokenizer.load(folder)
    plain = tokenizer.encode("hello", False)
    assert tokenizer.decode([*plain, 4095, *plain]) == "hellohello"
    with pytest.raises(TokenizerError, match="token id 4096 "):
        tokenizer.decode([4096])


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [2, 0, 7]}, {}, [2, 0, 7]),
        ({"eos_token_id": 0}, {"eos_token_id": 5}, [2, 0]),
        ({}, {"eos_token_id": [5]}, [2, 5]),
        ({}, {"generation": {"end_ids": [6, 2]}, "pretrained_config": {"vocab_size": 9}}, [2, 6]),
        ({}, {}, [2]),
    ],
)
def test_end_ids_come_from_the_tokenizer_and_the_generation_config(
    tmp_path, generation, model, expected
):
    samples.byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(model))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.end_ids == expected
    assert tokenizer.eos_id == 2


def test_special_tokens_of_the_map_file_are_not_decoded(tmp_path):
    samples.byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    names = {"additional_special_tokens": ["<tool>"], "pad_token": "<|endoftext|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a<tool>b", add_special_tokens=False)
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool>b"
    assert tokenizer.pad_id == 0


def test_gpt2_files_have_an_end_token():
    tokenizer = ours("gpt2_files")
    assert tokenizer.end_ids == [tokenizer.encode("<|endoftext|>", False)[0]]
    assert tokenizer.bos_id == tokenizer.eos_id
    assert tokenizer.encode("hello", add_special_tokens=True) == tokenizer.encode(
        "hello", add_special_tokens=False
    )


def test_truncation_settings_of_training_are_ignored():
    tokenizer = LibraryTokenizer.from_str(samples.byte_level_tokenizer().to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    loaded = Tokenizer.load(samples.write_folder("truncating", tokenizer, config={}))
    assert loaded.encode("hello world " * 9) == ours("byte_level").encode("hello world " * 9)


# --- errors in one line ---


def test_unpaired_surrogate_is_refused():
    for kind in samples.SERVED:
        with pytest.raises(TokenizerError, match="character 1"):
            ours(kind).encode("a\ud800b")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer: expected tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json is not a tokenizer file"),
        ({"tokenizer.json": f'"{"a" * 100_000}"'}, "tokenizer.json is not a tokenizer file"),
        ({"tokenizer.model": "nonsense"}, "not a SentencePiece model"),
        ({"vocab.json": "{", "merges.txt": ""}, "vocab.json or merges.txt is damaged"),
        ({"tokenizer_config.json": "[1]", "tokenizer.json": "{}"}, "must hold a JSON object"),
        ({"tokenizer_config.json": "{,}"}, "is not valid JSON"),
        (
            {
                "vocab.json": "{}",
                "merges.txt": "",
                "tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}',
            },
            "a Qwen2Tokenizer needs tokenizer.json",
        ),
    ],
)
def test_unusable_folder_is_refused_with_the_reason(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="is not a folder"):
        Tokenizer.load(tmp_path / "nowhere")


def test_lists_and_tuples_of_ids_decode_alike():
    tokenizer = LibraryTokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    loaded = Tokenizer.load(samples.write_folder("two", tokenizer, config={}))
    assert loaded.decode((0, 1)) == loaded.decode([0, 1]) == "ab"

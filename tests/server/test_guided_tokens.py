"""The tokens of guided answers are those of the model's own tokenizer, however it works."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
from dataclasses import replace

import pytest
import text_samples
import torch
from called_functions import GuidedText
from hypothesis import example, given, settings
from random_schemas import random_schema
from run_engine import all_logits, record_plans, run_all
from test_guided import build

from slipstream.engine.constraints.guided import Guided, Guides
from slipstream.engine.constraints.vocabulary import LongestMatch, Vocabulary
from slipstream.engine.messages import EngineStats
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import Guide, SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.process import start_real_engine
from slipstream.llm import LLM, SamplingOptions
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.server.text.vocabulary import tokenizer_vocabulary

KINDS = list(text_samples.SERVED)


@functools.cache
def load(kind: str) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = Tokenizer.load(text_samples.ALL[kind]())
    vocabulary = tokenizer_vocabulary(tokenizer, tokenizer.vocab_size)
    assert vocabulary is not None
    return tokenizer, vocabulary


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text_samples.texts)
@example("<|im_end|>")
@example("a <s></s> b<|endoftext|>")
@example(" two  spaces ")
def test_tokens_of_a_text_spell_exactly_this_text(kind, text):
    _, vocabulary = load(kind)
    tokens = vocabulary.encode(text)
    if tokens is None:  # the text has the tokenizer's own sign for a space, or the like
        tokens = LongestMatch(vocabulary).encode(text.encode())
    assert tokens is not None
    assert vocabulary.spell(tokens) == text.encode()
    assert not vocabulary.special.intersection(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_text_are_those_of_the_tokenizer(kind):
    tokenizer, vocabulary = load(kind)
    for text in ["The quick brown fox", '{"name": "größer", "k": [1, 2]}', "日本語 and 中文"]:
        before = tokenizer.encode("x\n", False)
        assert (
            list(vocabulary.encode("\n" + text))
            == tokenizer.encode("x\n" + text, False)[len(before) - 1 :]
        )
    if kind in ("byte_level", "sentencepiece_bpe"):  # an added token that is text
        tool = vocabulary.encode("a <tool>{}")
        assert b"<tool>" in [vocabulary.texts[token] for token in tool]


def test_longest_match_spells_a_text_or_says_that_it_cannot():
    vocabulary = Vocabulary([b"a", b"ab", b"abc", b"c", b"", b"<s>"], frozenset({4, 5}))
    match = LongestMatch(vocabulary)
    assert match.encode(b"abcab") == [2, 1]
    assert match.encode(b"") == []
    assert match.encode(b"ab<s>") is None


def test_text_that_no_token_spells_is_an_error_and_never_another_text():
    vocabulary = Vocabulary([b"a", b"b"], frozenset())
    guided = Guides(vocabulary).open(Guide("regex", "(ac|bb)"), [])
    assert guided.revise([1], 0).tokens == [1, 1]
    guided = Guides(vocabulary).open(Guide("regex", "(ac|bb)"), [])
    assert guided.revise([0], 0).tokens == [0]
    assert guided.mask([0]) == bytes(4)
    assert "no token can come next" in guided.error


def test_forced_tokens_leave_out_what_a_longer_token_could_join():
    """After `"na` the name is forced; its quote may be part of a longer token."""
    texts = [b'"', b'":', b"na", b"me", b"name", b'name"', b":", b" ", b"{", b"1", b"}", b"e", b"m"]
    texts += [b"n", b"a"]
    ids = {text: token for token, text in enumerate(texts)}

    def encode(text: str) -> list[int] | None:
        words = re.findall("name|na|me|.", text)
        return [ids[w.encode()] for w in words] if all(w.encode() in ids for w in words) else None

    vocabulary = Vocabulary(texts, frozenset(), encode=encode)
    schema = {
        "type": "object",
        "properties": {"name": {"const": 1}},
        "required": ["name"],
        "additionalProperties": False,
    }
    guided = Guides(vocabulary).open(Guide("json_schema", json.dumps(schema)), [])
    start = [ids[b"{"], ids[b'"'], ids[b"na"]]
    revision = guided.revise(start, 0)
    # `na` + `me` become `name`; the quote waits, because `":` might follow
    assert revision.tokens == [ids[b"{"], ids[b'"'], ids[b"name"]]
    assert allowed(guided, revision.tokens) == {b'"', b'":'}


def allowed(guided: Guided, tokens: list[int]) -> set[bytes]:
    mask = int.from_bytes(guided.mask(tokens), "little")
    return {text for token, text in enumerate(guided._vocabulary.texts) if mask >> token & 1}


def test_white_space_that_the_tokenizer_joins_follows_only_where_nothing_else_can():
    texts = [b"\n", b"\n\n", b" ", b"x", b'"']

    def encode(text: str) -> list[int] | None:
        parts = [part.encode() for part in re.findall("\n\n|.", text, re.DOTALL)]
        return [texts.index(part) for part in parts] if set(parts) <= set(texts) else None

    guides = Guides(Vocabulary(texts, frozenset(), encode=encode))
    free = guides.open(Guide("regex", "[\n x]{9}"), [])
    assert allowed(free, [0]) == {b" ", b"x"}  # two line ends are one token
    assert allowed(free, [3]) == {b"\n", b"\n\n", b" ", b"x"}
    lines = guides.open(Guide("regex", "\n{2,3}x"), [])
    assert allowed(lines, [0]) == {b"\n", b"\n\n"}


def test_json_has_a_space_or_a_line_end_with_indentation_between_its_parts():
    guide = Guide("json_schema", json.dumps({"type": "array", "items": {"const": 1}}))
    text = GuidedText(guide)
    for written in ("[1,1]", "[ 1, 1 ]", "[\n  1,\n\t1\n]", "[\n" + 16 * " " + "1]"):
        assert text.allows_each_letter(written), written
        assert text.complete(written)
    for cut in ("[\n\n", "[  ", "[\n" + 17 * " "):
        assert not text.allows(cut), cut


def guided_requests(chance: random.Random, count: int) -> list[SamplingOptions]:
    return [
        SamplingOptions(
            max_tokens=900,
            temperature=chance.choice([0.0, 0.8, 2.0]),
            seed=chance.getrandbits(32),
            guide_type="json_schema",
            guide=random_schema(chance),
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def byte_level_engine(tmp_path_factory):
    return build(tmp_path_factory.mktemp("byte_level"), text_samples.byte_level())


WAYS = {
    "in steps of 9 tokens": {"step_tokens": 9},
    "preempted": {"policy": "max_utilization", "cache_tokens": 128, "block_tokens": 4},
    "with a host cache": {"cache_tokens": 256, "block_tokens": 4, "host_cache_bytes": 1 << 22},
}


def test_answers_are_the_same_however_requests_are_run(byte_level_engine):
    """Revised tokens are computed again, so all later tokens follow from them."""
    chance = random.Random(3)
    prompt = load("byte_level")[0].encode("The quick brown fox")
    requests = []
    for index in range(8):
        guide = Guide("json_schema", json.dumps(random_schema(chance)))
        sampling = SamplingParams(max_tokens=90, temperature=1.0, seed=index, guide=guide)
        requests.append(GenerateRequest(index, [*prompt, 5 + index], sampling))

    def answer(some: list[GenerateRequest], **more) -> tuple[dict[int, list[int]], EngineStats]:
        settings = EngineSettings(**{"dtype": "float32", "cache_tokens": 4096, **more})
        loop = start_real_engine(str(byte_level_engine), settings)
        return run_all(loop, some), loop.stats()

    expected = {}
    for request in requests:
        expected |= answer([request])[0]
    assert answer(requests)[0] == expected
    for way, more in WAYS.items():
        # a busy machine may compile the grammars so late that no two requests run together
        for _ in range(5):
            found, stats = answer(requests, max_rows=8, **more)
            assert found == expected, way
            if (stats.preemptions > 0) == (way == "preempted"):
                break
        else:
            pytest.fail(f"{way}: {stats.preemptions} preemptions")


def test_scores_are_those_of_the_final_tokens(byte_level_engine):
    """Replaced and appended tokens have scores too, and scores do not change the answer."""
    chance = random.Random(8)
    prompt = load("byte_level")[0].encode("The quick brown fox")
    plain = []
    for index in range(6):
        guide = Guide("json_schema", json.dumps(random_schema(chance)))
        sampling = SamplingParams(max_tokens=120, temperature=1.0, seed=index, guide=guide)
        plain.append(GenerateRequest(index, prompt, sampling))
    more = {"log_probs": True, "top_log_probs": 2, "prompt_log_probs": True}
    scored = [replace(r, sampling=replace(r.sampling, **more)) for r in plain]
    settings = EngineSettings(dtype="float32", cache_tokens=4096)
    expected = run_all(start_real_engine(str(byte_level_engine), settings), plain)
    found = run_all(start_real_engine(str(byte_level_engine), settings), scored)
    assert found == expected
    assert found.reasons == expected.reasons
    sequences = [prompt + found[index] for index in range(6)]
    for index, logits in enumerate(all_logits(byte_level_engine, torch.float32, sequences)):
        own = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        tokens = torch.tensor(found[index])
        scores = own.gather(-1, tokens[:, None]).flatten().tolist()
        assert found.log_probs[index] == pytest.approx(scores, abs=1e-3)
        tops = [[token for token, _ in top] for top in found.top_log_probs[index]]
        assert tops == own.topk(2).indices.tolist()


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("included", [False, True])
def test_the_end_token_is_part_of_the_output_where_it_is_asked_for(
    byte_level_engine, included, scored
):
    """The grammar allows the end after each letter, and a model of one choice takes it."""
    tokenizer, _ = load("byte_level")
    end = tokenizer.eos_id
    sampling = SamplingParams(
        max_tokens=30,
        temperature=5.0,
        seed=4,
        guide=Guide("regex", "z+"),
        end_ids=(end,),
        include_end=included,
        log_probs=scored,
    )
    loop = start_real_engine(
        str(byte_level_engine), EngineSettings(dtype="float32", cache_tokens=4096)
    )
    found = run_all(loop, [GenerateRequest(1, tokenizer.encode("Say"), sampling)])
    assert found.reasons[1] == "stop"
    letters = found[1][:-1] if included else found[1]
    assert set(tokenizer.decode(letters)) == {"z"}
    assert (end in found[1]) == included
    assert len(found.log_probs[1]) == len(found[1])
    assert loop.stats().output_tokens == len(letters) + 1


def test_samples_of_one_prompt_follow_the_guide(byte_level_engine):
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 3}
    with LLM(byte_level_engine, "float32", threads=2, cache_tokens=4096) as llm:
        best = llm.generate(
            "Colours:", n=3, temperature=1.5, seed=2, guide_type="json_schema", guide=schema
        )[0]
        for completion in (best, *best.others):
            assert 2 <= len(json.loads(completion.text)) <= 3
            assert completion.tokens == llm.tokenizer.encode(completion.text, False)
        (ended,) = llm.generate(
            "Colours:", guide_type="choice", guide=["the lazy dog"], stop="zy d"
        )
        assert (ended.text, ended.finish_reason) == ("the la", "stop")


@pytest.mark.parametrize("kind", ["byte_level", "llama2_json", "sentencepiece_bpe"])
def test_tokens_of_answers_are_canonical_and_streams_equal_them(kind, tmp_path):
    """A random model prefers tokens that split words in unusual ways."""
    folder = build(tmp_path, text_samples.ALL[kind]())
    chance = random.Random(kind)
    vocabulary = load(kind)[1]
    with LLM(folder, "float32", max_rows=16, threads=2, cache_tokens=16384) as llm:
        options = guided_requests(chance, 12)
        requests = [each.request("A document:") for each in options]
        completions = llm._caller.run(llm._complete_all(requests))
        for completion in completions:
            written = vocabulary.spell(completion.tokens).decode()
            assert completion.tokens == list(vocabulary.encode(written))
            shown = written.removeprefix(" ") if vocabulary.strips_space else written
            assert completion.text == shown

        async def pieces(each: SamplingOptions) -> str:
            return "".join([piece async for piece in llm.stream("A document:", each)])

        for each, completion in zip(options[:2], completions, strict=False):
            assert asyncio.run(pieces(each)) == completion.text


def test_a_model_may_begin_an_answer_with_the_space_that_is_removed(tmp_path):
    folder = build(tmp_path, text_samples.llama2_json())
    vocabulary = load("llama2_json")[1]
    with LLM(folder, "float32", threads=2, cache_tokens=4096) as llm:
        spaced = [token for token, text in enumerate(vocabulary.texts) if text.startswith(b" t")]
        for bias in (50.0, -50.0):
            completion = llm.generate(
                "Say",
                guide_type="choice",
                guide=["the dog", "the fox"],
                logit_bias=dict.fromkeys(spaced, bias),
            )[0]
            assert completion.text in ("the dog", "the fox")
            assert (completion.tokens[0] in spaced) == (bias > 0)


def test_forced_text_takes_no_steps(byte_level_engine):
    tokenizer, _ = load("byte_level")
    prompt = tokenizer.encode("Say")
    text = "The quick brown fox jumps over the lazy dog"
    settings = EngineSettings(dtype="float32", cache_tokens=4096)
    loop = start_real_engine(str(byte_level_engine), settings)
    plans = record_plans(loop)
    sampling = SamplingParams(max_tokens=99, guide=Guide("regex", text + r"(!|\.)"))
    found = run_all(loop, [GenerateRequest(1, prompt, sampling)])
    answer = tokenizer.decode(found[1])
    assert answer in (text + "!", text + ".")
    assert found[1] == tokenizer.encode(answer, False)
    assert found.reasons == {1: "stop"}
    assert len(found[1]) == 10
    assert len(plans) == 2  # the prompt with the first token, all others with the choice
    cut = run_all(loop, [GenerateRequest(2, prompt, replace(sampling, max_tokens=9))])
    assert (cut[2], cut.reasons[2]) == (found[1][:9], "length")
    assert len(plans) == 3
    end = replace(sampling, end_ids=(found[1][5],))
    ended = run_all(loop, [GenerateRequest(3, prompt, end)])
    assert (ended[3], ended.reasons[3]) == (found[1][:5], "stop")
    assert loop.stats().output_tokens == len(found[1]) + 9 + 5

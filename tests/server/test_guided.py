"""Answers follow every kind of guide, on a random model that prefers other tokens."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import jsonschema
import pytest
import text_samples
import torch
from random_schemas import random_schema
from tiny_models import config_of, random_model

from slipstream.engine.constraints.guide_memory import estimate_bytes
from slipstream.engine.constraints.guided import GuideError, Guides, check_guide
from slipstream.engine.constraints.vocabulary import Vocabulary
from slipstream.engine.sampling_params import Guide
from slipstream.llm import LLM, SamplingOptions
from slipstream.server.text.pipeline import PromptError
from slipstream.weights.build import build_engine

MODEL_VOCABULARY = 700  # more outputs than the tokenizer has tokens


def build(folder: Path, tokenizer: Path, vocabulary: int = MODEL_VOCABULARY) -> Path:
    """Build a tiny random model with a real tokenizer."""
    config = config_of("llama", vocab_size=vocabulary, max_position_embeddings=1024)
    random_model(config).save_pretrained(folder / "hf")
    for file in tokenizer.iterdir():
        (folder / "hf" / file.name).write_bytes(file.read_bytes())
    return build_engine(folder / "hf", folder / "engine", dtype="float32")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    torch.set_num_threads(2)
    with LLM(
        build(tmp_path_factory.mktemp("guided"), text_samples.byte_level()),
        "float32",
        max_rows=16,
        threads=2,
        cache_tokens=16384,
    ) as model:
        yield model


def answers(llm: LLM, prompts, **options) -> list[str]:
    completions = llm.generate(prompts, **{"max_tokens": 600, **options})
    assert {completion.finish_reason for completion in completions} == {"stop"}
    return [completion.text for completion in completions]


def check_schemas(llm: LLM, count: int, seed: int) -> None:
    chance = random.Random(seed)
    schemas = [random_schema(chance) for _ in range(count)]
    for start in range(0, count, 10):
        requests = []
        for schema in schemas[start : start + 10]:
            options = SamplingOptions(
                max_tokens=900,
                temperature=chance.choice([0.0, 0.8, 2.0]),
                seed=chance.getrandbits(32),
                guide_type="json_schema",
                guide=schema,
            )
            requests.append(options.request(f"A document, number {chance.randrange(1000)}:"))
        completions = llm._caller.run(llm._complete_all(requests))
        for schema, completion in zip(schemas[start : start + 10], completions, strict=True):
            assert completion.finish_reason == "stop", (schema, completion.text)
            jsonschema.validate(json.loads(completion.text), schema)


def test_answers_to_random_schemas_validate(llm):
    check_schemas(llm, 50, seed=1)


@pytest.mark.slow
def test_answers_to_a_thousand_random_schemas_validate(llm):
    check_schemas(llm, 1000, seed=2)


EXPRESSIONS = [r"[a-c]{3}-\d{2}", r"(yes|no)!", r"日本[語人]?です。", r" ?x[^\n]{5}z"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_regular_expressions_match_whole_answers(llm, expression):
    for temperature in (0.0, 1.5):
        (text,) = answers(
            llm, "Say:", guide_type="regex", guide=expression, temperature=temperature, seed=4
        )
        assert re.fullmatch(expression, text), text


def test_answers_follow_grammars_choices_and_plain_json(llm):
    grammar = 'root ::= greeting " " name\ngreeting ::= "hello" | "bye"\nname ::= [A-Z] [a-z]{2}'
    (text,) = answers(llm, "Say:", guide_type="ebnf_grammar", guide=grammar)
    assert re.fullmatch("(hello|bye) [A-Z][a-z]{2}", text)
    choices = ["alpha", "alphabet", "größer 😀", 'a "quoted" \\ one']
    for seed in range(6):
        (text,) = answers(
            llm, "Say:", guide_type="choice", guide=choices, temperature=3.0, seed=seed
        )
        assert text in choices
    (text,) = answers(
        llm, "Say:", guide_type="choice", guide=json.dumps(["one"]), end_ids=[], ignore_end=True
    )
    assert text == "one"  # ends although no end token is allowed
    completion = llm.generate("Say:", guide_type="json", max_tokens=30)[0]
    assert completion.text.startswith("{")


def test_a_structural_tag_constrains_the_text_inside_it(llm):
    tag = {
        "type": "structural_tag",
        "triggers": ["<f="],
        "structures": [{"begin": "<f=pick>", "schema": {"enum": [1, 2]}, "end": "</f>"}],
    }
    bias = dict.fromkeys(llm.tokenizer.encode("<f=", False), 1000.0)
    complete = 0
    for seed in range(5):
        completion = llm.generate(
            "Go:",
            guide_type="structural_tag",
            guide=tag,
            max_tokens=80,
            logit_bias=bias,
            temperature=20.0,
            seed=seed,
        )[0]
        whole = len(re.findall("<f=pick>[12]</f>", completion.text))
        assert completion.text.count("<f=") - whole <= 1  # the length limit may cut the last one
        complete += whole
    assert complete > 0


def test_unguided_answers_in_the_same_batch_are_unchanged(llm):
    prompts = [f"The story of number {index}" for index in range(6)]
    options = {"max_tokens": 40, "temperature": 0.9, "seed": 7}
    alone = [llm.generate(prompt, **options)[0].tokens for prompt in prompts]
    schema = {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 5, "maxItems": 5}
    guided = SamplingOptions(
        **options | {"max_tokens": 300}, guide_type="json_schema", guide=schema
    )
    free = SamplingOptions(**options)
    requests = [
        (guided if index % 2 else free).request(prompt) for index, prompt in enumerate(prompts)
    ]
    together = llm._caller.run(llm._complete_all(requests))
    for index, completion in enumerate(together):
        if index % 2:
            jsonschema.validate(json.loads(completion.text), schema)
        else:
            assert completion.tokens == alone[index]


@pytest.mark.parametrize(
    ("kind", "guide", "reason"),
    [
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        (
            "json_schema",
            {"type": "object", "minProperties": 2, "required": ["a"]},
            "minProperties 2",
        ),
        ("json_schema", "[" * 100_000, "cannot be read"),
        ("json_schema", "{nope", "cannot be read"),
        ("json_schema", "[1]", "a JSON schema is an object"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "[a", "unclosed"),
        ("ebnf_grammar", "root ::= undefined_rule", "undefined_rule"),
        ("choice", "[3]", "a JSON list of texts"),
        ("choice", "[]", "must hold at least one text, and no empty one"),
        ("choice", ["a", ""], "must hold at least one text, and no empty one"),
        (
            "structural_tag",
            {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]},
            "no trigger",
        ),
    ],
)
def test_unenforceable_guides_are_rejected_before_they_run(llm, kind, guide, reason):
    with pytest.raises(PromptError, match="guided_decoding_guide: ") as refusal:
        llm.generate("Say:", guide_type=kind, guide=guide)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_grammar_that_grows_without_bound_fails_only_its_request(llm):
    from slipstream.llm import GenerationFailed

    with pytest.raises(
        GenerationFailed, match="guided_decoding_guide: cannot be followed further"
    ) as refusal:
        llm.generate("Say:", guide_type="regex", guide="(a{1000}){1000}")
    assert "<state>" not in str(refusal.value)
    assert answers(llm, "Say:", guide_type="regex", guide="ab") == ["ab"]


def test_without_llguidance_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(GuideError, match=r"pip install 'slipstream\[guided\]'"):
        check_guide(Guide("json", ""))


def test_unknown_guide_type_lists_valid_ones():
    with pytest.raises(ValueError, match="guide_type must be one of json"):
        SamplingOptions(guide_type="xml")
    with pytest.raises(ValueError, match="guide_type"):
        SamplingOptions(guide="a")


@pytest.mark.parametrize("kind", ["llama2_json", "sentencepiece_bpe"])
def test_guides_work_with_tokenizers_that_drop_the_first_space(tmp_path, kind):
    tokenizer = text_samples.ALL[kind]()
    with LLM(build(tmp_path, tokenizer), "float32", threads=2, cache_tokens=4096) as llm:
        schema = {
            "type": "object",
            "properties": {"k": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["k"],
            "additionalProperties": False,
        }
        for text in answers(llm, ["One", "Two"], guide_type="json_schema", guide=schema):
            jsonschema.validate(json.loads(text), schema)
        (text,) = answers(
            llm, "Say", guide_type="regex", guide="[ab]{2} [ab]{2}", temperature=2.0, seed=3
        )
        assert re.fullmatch("[ab]{2} [ab]{2}", text)


def test_guides_reject_tokenizers_without_token_texts(tmp_path):
    from slipstream.llm import GenerationFailed

    with LLM(build(tmp_path, text_samples.words()), "float32", threads=2, cache_tokens=4096) as llm:
        with pytest.raises(GenerationFailed, match="cannot be guided"):
            llm.generate("hello", guide_type="regex", guide="a")
        assert llm.generate("hello", max_tokens=3)[0].finish_reason == "length"


def test_a_request_is_cancelled_while_its_grammar_is_compiled():
    import threading

    from slipstream.engine.constraints.constraints import Constraints
    from slipstream.engine.request import GenerateRequest
    from slipstream.engine.sampling_params import SamplingParams

    gate = threading.Event()
    constraints = Constraints(lambda: gate.wait(20) and None)
    constraints.start(GenerateRequest(4, [1], SamplingParams(guide=Guide("json", ""))))
    assert constraints.take_ready() == []
    assert constraints.drop(4)
    assert not constraints.drop(4)
    gate.set()
    assert constraints.take_ready() == []


def test_a_grammar_that_is_too_large_is_refused_without_the_librarys_backtrace():
    def tree(depth: int) -> dict:
        if not depth:
            return {"type": "integer"}
        both = {"l": tree(depth - 1), "r": tree(depth - 1)}
        return {"type": "object", "properties": both, "required": ["l", "r"]}

    guides = Guides(Vocabulary([bytes([byte]) for byte in range(256)], frozenset()))
    with pytest.raises(GuideError) as caught:
        guides.open(Guide("json_schema", json.dumps(tree(13))), [])
    assert str(caught.value) == (
        "guided_decoding_guide: cannot be enforced: it is too large for the grammar library"
    )


def properties(number: int, count: int) -> Guide:
    fields = {f"field_{number}_{place}": {"type": "string"} for place in range(count)}
    return Guide("json_schema", json.dumps({"type": "object", "properties": fields}))


def test_compiled_grammars_are_forgotten_by_their_estimated_memory():
    guides = Guides(Vocabulary([bytes([byte]) for byte in range(256)], frozenset()))
    large = [properties(number, 3600) for number in range(4)]
    sizes = [estimate_bytes(guide) for guide in large]
    assert all(17 << 20 < size < 21 << 20 for size in sizes)  # three fit
    for guide in large[:3]:
        guides.open(guide, [])
    assert [guides.remembers(guide) for guide in large] == [True, True, True, False]
    guides.open(large[0], [])  # used again: now the second one is the oldest
    guides.open(large[3], [])
    assert [guides.remembers(guide) for guide in large] == [True, False, True, True]
    small = [properties(number, 1) for number in range(80)]
    for guide in small:
        guides.open(guide, [])
    # at most 64 of any size, the newest
    assert [guides.remembers(guide) for guide in small] == [False] * 16 + [True] * 64
    assert not any(guides.remembers(guide) for guide in large)


def test_llm_returns_logits_and_prompt_log_probs(llm):
    import numpy as np
    from run_engine import all_logits

    completion = llm.generate(
        "The dog",
        max_tokens=5,
        context_logits=True,
        generation_logits=True,
        prompt_log_probs=True,
        ignore_end=True,
    )[0]
    prompt = llm.tokenizer.encode("The dog")
    logits = all_logits(llm.folder, torch.float32, [prompt + completion.tokens])[0]
    assert np.allclose(completion.context_logits, logits[: len(prompt)], atol=1e-3)
    assert np.allclose(completion.generation_logits, logits[len(prompt) - 1 : -1], atol=1e-3)
    expected = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
    assert np.allclose(completion.prompt_log_probs, expected, atol=1e-3)
    plain = llm.generate("The dog", max_tokens=5)[0]
    assert (plain.context_logits, plain.generation_logits, plain.prompt_log_probs) == (
        None,
        None,
        None,
    )


def test_bad_words_are_never_generated_by_the_engine(llm):
    plain = llm.generate("The dog", max_tokens=60, temperature=1.5, seed=5, ignore_end=True)[0].text
    letters = set(plain) - {"\ufffd"}  # stands for incomplete characters
    words = sorted(letters, key=plain.count)[-6:]  # the most common letters
    without = llm.generate(
        "The dog", max_tokens=60, temperature=1.5, seed=5, ignore_end=True, bad_words=words
    )[0]
    assert not set(words) & set(without.text)
    guided = llm.generate(
        "The dog", max_tokens=300, guide_type="choice", guide=["abc", "xyz"], bad_words=["a"]
    )[0]
    assert guided.text == "xyz"


def test_unknown_token_ids_are_an_error(llm):
    with pytest.raises(PromptError, match="-3 is not a token id"):
        llm.generate("The dog", max_tokens=2, logit_bias={-3: 1.0})
    beyond = {10**6: 5.0}  # beyond the model's outputs: no effect
    assert llm.generate("The dog", max_tokens=2, logit_bias=beyond, end_ids=[10**6], min_tokens=2)

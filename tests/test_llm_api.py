"""The Python API: names, types, parameters, results, streams, batches and progress."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pydantic
import pytest
from source_tree import ROOT
from tiny_hf_folder import save_model

import slipstream
from slipstream import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from slipstream.engine.options import OPTION_NAMES
from slipstream.engine.settings import EngineSettings
from slipstream.offline.engine_keywords import EngineKeywords
from slipstream.offline.progress import BatchProgress, LoadProgress
from slipstream.offline.sampling_params import SamplingKeywords

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
)
PROMPT = "What is ML?"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("api")
    source = save_model(folder / "tiny")
    (source / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(folder / "home"))
        with LLM(source, dtype="float32", cache_tokens=4096, max_seq_len=256) as llm:
            yield llm


# names and types


def test_the_package_lists_its_names_and_loads_no_torch_before_they_are_used() -> None:
    code = (
        "import sys, slipstream; names = dir(slipstream); "
        "slipstream.SamplingParams(max_tokens=2); "
        "assert 'torch' not in sys.modules; print(' '.join(names))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(slipstream.__all__) <= set(done.stdout.split())


def test_every_exported_name_exists() -> None:
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = slipstream.LLMs  # type: ignore[attr-defined]


def test_the_keywords_of_generate_are_the_fields_of_sampling_params() -> None:
    assert typing.get_type_hints(SamplingKeywords) == typing.get_type_hints(SamplingParams)


def test_the_keywords_of_an_llm_are_the_settings_of_an_engine() -> None:
    keywords = set(typing.get_type_hints(EngineKeywords))
    own = {field.name for field in fields(EngineSettings)}
    flags = {name for names in OPTION_NAMES.values() for name in names}
    assert keywords | {"dtype"} == own | flags


SNIPPET = """
from slipstream import LLM, RequestOutput, SamplingParams

llm = LLM("m", max_model_len=64)
found: list[RequestOutput] = llm.generate("a", max_tokens=4, temperature=0.5)
one: RequestOutput = llm.chat([{"role": "user", "content": "a"}], SamplingParams(n=2))
many: list[RequestOutput] = llm.chat([[{"role": "user", "content": "a"}]])
text: str = found[0].outputs[0].text
for piece in llm.stream("a", seed=1):
    text += piece
"""
MISTAKES = {
    'llm.generate("a", max_token=4)': 'Unexpected keyword argument "max_token"',
    'llm.stream("a", temperature="hot")': 'Argument "temperature" to "stream"',
    "SamplingParams(max_token=4)": 'Unexpected keyword argument "max_token"',
    'LLM("m", max_modellen=4)': 'Unexpected keyword argument "max_modellen"',
}


def check_types(folder: Path, snippet: str) -> str:
    """Return what mypy reports about a file that uses the package."""
    file = folder / "snippet.py"
    file.write_text(snippet)
    modules = [ROOT / "slipstream" / "__init__.py", ROOT / "slipstream" / "llm.py"]
    modules += list((ROOT / "slipstream" / "offline").glob("*.py"))
    others = ["engine/sampling_params.py", "server/text/chat.py"]
    modules += [ROOT / "slipstream" / name for name in others]
    # the rest of the package is checked elsewhere, and takes long
    options = ["--follow-imports=skip", "--ignore-missing-imports", "--config-file=", "--strict"]
    command = [sys.executable, "-m", "mypy", *options, f"--cache-dir={folder / 'cache'}"]
    allowed = ["--allow-subclassing-any", "--no-warn-return-any", "--no-warn-unused-ignores"]
    done = subprocess.run(
        [*command, *allowed, *map(str, [file, *modules])], cwd=ROOT, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    return "\n".join(line for line in lines if "snippet.py" in line)


def test_type_checkers_accept_the_options_and_reject_misspelt_ones(tmp_path: Path) -> None:
    assert check_types(tmp_path, SNIPPET) == ""
    report = check_types(tmp_path, "\n".join([SNIPPET, *MISTAKES]))
    assert [problem for problem in MISTAKES.values() if problem not in report] == []
    assert report.count("error:") == len(MISTAKES)


# parameters


def test_vllm_names_have_the_meaning_of_the_own_names(llm: LLM) -> None:
    ours = llm.generate(PROMPT, max_tokens=8, ignore_end=True, log_probs=True, top_log_probs=3)
    theirs = llm.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3))
    assert theirs == ours
    assert theirs[0].logprobs is not None
    for token, entry, top in zip(
        theirs[0].token_ids, theirs[0].logprobs, ours[0].top_log_probs or [], strict=True
    ):
        assert list(entry) == [other for other, _ in top]  # greedy: the token is the likeliest
        assert entry[token].rank == 1
        assert [value.logprob for value in entry.values()] == [value for _, value in top]
    total = sum(ours[0].log_probs or [])
    assert theirs[0].cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_have_the_tokens_of_the_prompt(llm: LLM) -> None:
    (found,) = llm.generate(PROMPT, max_tokens=1, prompt_logprobs=2)
    assert found.prompt == PROMPT
    assert found.prompt_token_ids == llm.tokenizer.encode(PROMPT)
    assert found.prompt_logprobs is not None
    assert found.prompt_logprobs[0] is None
    (flag,) = llm.generate(PROMPT, max_tokens=1, prompt_log_probs=True)
    for token, entry, value in zip(
        found.prompt_token_ids[1:],
        found.prompt_logprobs[1:],
        flag.prompt_log_probs or [],
        strict=True,
    ):
        assert entry is not None
        assert 2 <= len(entry) <= 3
        assert entry[token].logprob == pytest.approx(value, abs=1e-4)
        better = sum(other.logprob > entry[token].logprob for other in entry.values())
        assert (entry[token].rank or 0) > better


def test_stop_token_ids_end_a_completion_besides_the_end_tokens(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, max_tokens=12, ignore_eos=True)
    token = whole.tokens[4]
    (cut,) = llm.generate(PROMPT, max_tokens=12, ignore_eos=True, stop_token_ids=[token])
    assert cut.tokens == whole.tokens[: whole.tokens.index(token)]
    assert cut.finish_reason == "stop"


def test_a_stop_text_is_kept_if_it_is_asked_for(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, max_tokens=24, ignore_eos=True)
    stop = whole.text[5:8]
    (cut,) = llm.generate(
        PROMPT, max_tokens=24, ignore_eos=True, stop=stop, include_stop_str_in_output=True
    )
    assert cut.text == whole.text[: whole.text.index(stop) + len(stop)]


def test_no_limit_of_tokens_means_the_length_of_the_engine(llm: LLM) -> None:
    (found,) = llm.generate([[5] * 250], max_tokens=None, ignore_eos=True)
    assert len(found.tokens) == 6


def test_allowed_token_ids_exclude_the_others(llm: LLM) -> None:
    (found,) = llm.generate(PROMPT, max_tokens=6, allowed_token_ids=[70, 71], ignore_eos=True)
    assert set(found.tokens) <= {70, 71}
    assert len(found.tokens) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_token": 4}, "there is no option 'max_token'; did you mean max_tokens?"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, got 1.5"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"n": 0}, "n must be over 0 and at most 128, got 0"),
        ({"logprobs": 101}, "logprobs must be at least 0 and at most 100, got 101"),
        ({"logprobs": 1, "log_probs": True}, "logprobs and log_probs are the same setting"),
        ({"guide": "abc"}, "a guide without it is a pydantic class, a JSON schema or a list"),
        ({"guide": int}, "the class int has no model_json_schema()"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one of json, regex"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs has no field 'jsn'"),
    ],
)
def test_wrong_options_are_refused_by_name(
    llm: LLM, options: dict[str, typing.Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        llm.generate(PROMPT, **options)
    assert message in str(caught.value)


def test_top_k_of_minus_one_means_off() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


class Colour(pydantic.BaseModel, extra="forbid"):
    red: bool
    name: typing.Literal["rose", "sky"]


@pytest.mark.parametrize(
    "options",
    [
        {"guide": Colour},
        {"guide": Colour.model_json_schema()},
        {"guide": json.dumps(Colour.model_json_schema())},
        {"guide": Colour.model_json_schema(), "guide_type": "json_schema"},
        {"structured_outputs": StructuredOutputsParams(json=Colour)},
        {"structured_outputs": {"json": Colour.model_json_schema()}},
    ],
)
def test_a_guide_may_be_a_class_a_schema_or_its_text(
    llm: LLM, options: dict[str, typing.Any]
) -> None:
    (found,) = llm.generate(PROMPT, max_tokens=200, **options)
    colour = found.parse(Colour)
    assert isinstance(colour, Colour)
    assert found.parse() == json.loads(found.text) == colour.model_dump()


def test_a_guide_may_be_a_list_of_texts(llm: LLM) -> None:
    (found,) = llm.generate(PROMPT, max_tokens=20, guide=["red", "blue"])
    assert found.text in ("red", "blue")
    same = StructuredOutputsParams(choice=["red", "blue"])
    assert llm.generate(PROMPT, max_tokens=20, structured_outputs=same) == [found]


# results and batches


def test_a_result_has_the_shape_of_vllm(llm: LLM) -> None:
    options = {"temperature": 100.0, "seed": 3, "max_tokens": 6}
    (found,) = llm.generate({"prompt": PROMPT}, n=3, **options)
    assert isinstance(found, RequestOutput)
    assert [one.index for one in found.outputs] == [0, 1, 2]
    assert [one.text for one in found.outputs] == [found.text, *[o.text for o in found.others]]
    assert len({tuple(one.token_ids) for one in found.outputs}) > 1
    assert found.finished
    ids = llm.tokenizer.encode(PROMPT)
    assert llm.generate({"prompt_token_ids": ids}, n=3, **options) == [found]
    with pytest.raises(TypeError, match="has the key prompt or prompt_token_ids"):
        llm.generate({"text": PROMPT})  # type: ignore[call-overload]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=5)]
    found = llm.generate([PROMPT, PROMPT], params)
    assert len(found[0].tokens) == 2
    assert found[1] == llm.generate(PROMPT, max_tokens=5)[0]
    with pytest.raises(ValueError, match=r"as many as prompts \(1\), got 2"):
        llm.generate(PROMPT, params)


def test_a_batch_of_conversations_has_the_answers_of_each(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("red", "blue", "green")]
    together = llm.chat(conversations, max_tokens=6)
    assert together == [llm.chat(one, max_tokens=6) for one in conversations]
    assert together[0] == llm.generate(llm.tokenizer.encode("red!", False), max_tokens=6)[0]


def test_the_last_message_is_continued(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": "red"},
        {"role": "assistant", "content": "is"},
    ]
    found = llm.chat(messages, max_tokens=6, continue_final_message=True)
    assert found == llm.generate(llm.tokenizer.encode("redis", False), max_tokens=6)[0]


# streams


def test_a_stream_is_read_without_a_coroutine(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, max_tokens=16)
    pieces = list(llm.stream(PROMPT, max_tokens=16))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 1


def test_closing_a_stream_cancels_its_request(llm: LLM) -> None:
    with llm.stream(PROMPT, max_tokens=200, ignore_eos=True) as stream:
        assert next(stream)
        assert llm._engine.outstanding == 1
    assert list(stream) == []
    assert len(llm.generate(PROMPT, max_tokens=2, ignore_eos=True)[0].tokens) == 2
    assert llm._engine.outstanding == 0


async def test_a_stream_is_read_in_one_way_only(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=16)
    await anext(stream)
    with pytest.raises(RuntimeError, match="not by both"):
        next(stream)
    await stream.aclose()


def test_an_error_reaches_the_reader_of_a_stream(llm: LLM) -> None:
    with pytest.raises(ValueError, match="Prompt length"):
        next(llm.stream([5] * 300))


# progress


def test_a_batch_shows_its_progress(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate([PROMPT, PROMPT], max_tokens=2)
    assert capsys.readouterr().err == ""  # not a terminal
    llm.generate([PROMPT, PROMPT], max_tokens=2, ignore_eos=True, progress=True)
    shown = capsys.readouterr().err
    assert "\r[" in shown
    assert "2/2 prompts, " in shown
    assert " tokens/s" in shown
    assert shown.endswith("\n")
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    llm.generate([PROMPT, PROMPT], max_tokens=2)
    assert "2/2 prompts" in capsys.readouterr().err
    llm.generate(PROMPT, max_tokens=2)
    llm.generate([PROMPT, PROMPT], max_tokens=2, progress=False)
    assert capsys.readouterr().err == ""


def test_an_earlier_run_does_not_count_for_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with BatchProgress("requests", 4, shown=True, done=3) as bar:
        bar.add(tokens=7)
    last = capsys.readouterr().err.rstrip().split("\r")[-1]
    assert "4/4 requests" in last
    assert "left" not in last


def test_phases_of_a_load_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    display = LoadProgress(shown=True)
    display.update("fetching", 0, 0)
    display.update("weights", 2_000_000, 4_000_000)
    display.update("weights", 4_000_000, 4_000_000)
    display.say("ready")
    shown = capsys.readouterr().err
    assert shown.startswith("Fetching\n\r[")
    assert "weights: 4.0/4.0 MB" in shown
    assert shown.endswith("\nready\n")
    LoadProgress(shown=False).update("weights", 1, 2)
    assert capsys.readouterr().err == ""


def test_an_llm_describes_itself(llm: LLM) -> None:
    text = repr(llm)
    assert text.startswith("<LLM '")
    assert "float32 on cpu, up to 256 tokens a request" in text
    assert "4,096 tokens of KV cache" in text


async def test_an_llm_is_used_in_several_event_loops(llm: LLM) -> None:
    async def read() -> str:
        return "".join([piece async for piece in llm.stream(PROMPT, max_tokens=6)])

    elsewhere = await asyncio.to_thread(asyncio.run, read())
    assert elsewhere == await read() == llm.generate(PROMPT, max_tokens=6)[0].text

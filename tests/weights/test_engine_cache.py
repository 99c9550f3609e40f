"""The cache of engines: names, concurrent builds, and the marks of running processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_hf_folder import save_model

from slipstream.engine.settings import EngineSettings
from slipstream.weights.cache.engines import cached_engine, describe_engine, list_engines, type_name
from slipstream.weights.cache.locks import hold, is_held, locked
from slipstream.weights.load import start_engine
from slipstream.weights.sources.open_source import canonical_source

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ENGINE_DEST_PATH", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("gpt2", "hf:gpt2"),
        ("hf:gpt2", "hf:gpt2"),
        ("llama-3.1-8b", "hf:meta-llama/Llama-3.1-8B"),
        ("org/name", "hf:org/name"),
        ("smollm2-135m", "smollm2-135m"),
        ("./mine", "{home}/mine"),
        ("local:mine", "{home}/mine"),
    ],
)
def test_a_source_has_one_name(
    home: Path, monkeypatch: pytest.MonkeyPatch, text: str, canonical: str
) -> None:
    (home / "mine").mkdir()
    monkeypatch.chdir(home)
    assert canonical_source(text) == canonical.format(home=home)


def test_the_name_says_source_and_type(home: Path) -> None:
    source = str(save_model(home / "my model"))
    plain = cached_engine(source)
    assert plain.name.startswith("my-model-bfloat16-")
    assert cached_engine(source, "bfloat16") == plain, "auto is bfloat16 here"
    assert cached_engine(source, "float16").name.startswith("my-model-float16-")
    quantised = cached_engine(source, weight_only="int4")
    assert quantised.name.startswith("my-model-int4-")
    assert type_name(describe_engine(quantised).config) == "int4"
    assert describe_engine(plain).config.source == source


def test_two_processes_build_one_engine(home: Path) -> None:
    source = save_model(home / "mine")
    code = (
        "import sys; from slipstream.weights.cache.engines import cached_engine; "
        "phases = []; print(cached_engine(sys.argv[1], progress=lambda *a: phases.append(a)), "
        "bool(phases))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with locked(f"source {source}"):  # both wait until they may begin
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(source)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
    printed = sorted(process.communicate(timeout=60)[0].split()[1] for process in processes)
    assert printed == ["False", "True"], "one builds, the other finds"
    assert len(list_engines()) == 1


def test_a_waiting_process_says_so(home: Path) -> None:
    code = (
        "from slipstream.weights.cache.locks import locked\n"
        "with locked('what', lambda: print('waits', flush=True)): print('in', flush=True)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with locked("what"):
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        with locked("something else"):
            pass
    assert process.communicate(timeout=60)[0] == "in\n"


def test_a_loaded_engine_is_marked_until_it_is_closed(home: Path) -> None:
    engine = cached_engine(str(save_model(home / "mine")))
    assert not describe_engine(engine).in_use
    loop = start_engine(engine, EngineSettings(cache_tokens=64, dtype="float32"))
    assert describe_engine(engine).in_use
    loop.close()
    assert not describe_engine(engine).in_use


def test_marks_of_missing_files_are_none(home: Path) -> None:
    assert hold(home / "absent") is None
    assert not is_held(home / "absent")

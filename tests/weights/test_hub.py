from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import FakeHub, serve
from tiny_models import expected_tensors

from slipstream.model.families.family import UnsupportedModel
from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.sources.hub import fetch_tokenizer
from slipstream.weights.sources.known_models import open_known_model
from slipstream.weights.sources.open_source import open_source
from slipstream.weights.sources.source import SourceError

SaveModel = Callable[..., tuple[Path, Any]]


@pytest.fixture
def hub(
    save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    folder, _ = save_model("llama", shard="40KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "consolidated.safetensors").write_bytes(b"a copy in another layout")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for variable in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    with serve(
        FakeHub({"org/tiny": folder, "org/closed": folder}, gated={"org/closed"}, token="secret")
    ) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.mark.parametrize("text", ["hf:org/tiny", "org/tiny"])
def test_only_needed_files_of_a_hub_model_are_downloaded(
    hub: FakeHub, tmp_path: Path, text: str
) -> None:
    engine = build_engine(text, tmp_path / "engine", dtype="float32")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf-llama")
    found = read_engine_folder(engine).tensors()
    for name, tensor in expected_tensors(model).items():
        assert torch.equal(found[name], tensor), name
    assert (engine / "tokenizer.json").is_file()
    assert json.loads((engine / "config.json").read_text())["slipstream"]["source"] == "hf:org/tiny"
    assert hub.downloaded() >= {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert not hub.downloaded() & {"consolidated.safetensors", "pytorch_model.bin", "params.json"}


def test_files_are_downloaded_once(hub: FakeHub) -> None:
    open_source("hf:org/tiny")
    hub.requests.clear()
    assert open_source("hf:org/tiny").spec.layers == 2
    assert hub.downloaded() == set()


def test_a_tokenizer_is_downloaded_without_weights(hub: FakeHub) -> None:
    folder = fetch_tokenizer("org/tiny")
    assert (folder / "tokenizer.json").is_file()
    assert {name for name in hub.downloaded() if name.endswith(".safetensors")} == set()
    with pytest.raises(SourceError, match="org/nothing: no such model at the hub"):
        fetch_tokenizer("org/nothing")


def test_only_the_config_of_an_unsupported_model_is_downloaded(hub: FakeHub) -> None:
    folder = hub.folders["org/tiny"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["MambaForCausalLM"]})
    )
    with pytest.raises(
        UnsupportedModel, match=r"MambaForCausalLM is not supported; supported: LlamaForCausalLM"
    ):
        open_source("hf:org/tiny")
    assert hub.downloaded() == {"config.json"}


def test_a_gated_model_needs_a_token_and_the_error_says_how_to_get_one(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        SourceError, match=r"^org/closed: .*accept its licence.*HF_TOKEN"
    ) as refusal:
        open_source("hf:org/closed")
    assert "\n" not in str(refusal.value)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert open_source("hf:org/closed").spec.layers == 2


def test_an_unknown_hub_model_is_refused(hub: FakeHub) -> None:
    with pytest.raises(
        SourceError, match=r"^org/absent: no such model at the hub, or it is private"
    ):
        open_source("org/absent")


def test_a_hub_repository_without_a_config_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("no model")
    hub.folders["org/empty"] = tmp_path / "empty"
    with pytest.raises(SourceError, match=r"^org/empty: .*no config\.json"):
        open_source("org/empty")


def test_a_hub_model_with_pickled_weights_is_refused(hub: FakeHub) -> None:
    for path in hub.folders["org/tiny"].glob("model*"):
        path.unlink()
    with pytest.raises(SourceError, match=r"no model\.safetensors"):
        open_source("org/tiny")


def test_a_full_disk_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*given: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fill)
    with pytest.raises(SourceError, match=r"^org/tiny: the disk of .* is full: .*HF_HOME"):
        open_source("hf:org/tiny")


def test_without_a_network_a_local_copy_is_used_and_a_missing_one_reported(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_source("hf:org/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    assert open_source("hf:org/tiny").spec.layers == 2
    with pytest.raises(
        SourceError, match=r"^org/other: the hub cannot be reached .*a local folder or GGUF file"
    ):
        open_source("hf:org/other")


def test_a_known_name_is_found_in_the_cache_without_asking_the_hub(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.folders["meta-llama/Llama-2-7b-hf"] = hub.folders["org/tiny"]
    assert open_known_model("llama-2-7b").spec.layers == 2
    assert "config.json" in hub.downloaded()
    hub.requests.clear()
    source = open_source("llama-2-7b")
    assert (source.label, source.spec.layers, hub.requests) == (
        "hf:meta-llama/Llama-2-7b-hf",
        2,
        [],
    )


def test_a_model_folder_mounted_as_the_cache_is_used(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(hub.folders["org/tiny"]))
    assert open_source("llama-2-7b").spec.layers == 2
    assert hub.requests == []
    with pytest.raises(SourceError, match="no such model"):  # the folder is a Llama, not a Mistral
        open_source("mistral-7b")


def test_a_download_reports_its_bytes(hub: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    reports: list[tuple[str, int, int]] = []
    open_source("hf:org/tiny", lambda *report: reports.append(report))
    # config.json comes first, to refuse a model before its weights are fetched
    names = hub.downloaded() - {"config.json"}
    missing = sum((hub.folders["org/tiny"] / name).stat().st_size for name in names)
    assert reports[0] == ("fetching org/tiny", 0, missing)
    assert reports[-1] == ("fetching org/tiny", missing, missing)
    assert capfd.readouterr().err == ""  # no bars of the library
    reports.clear()
    open_source("hf:org/tiny", lambda *report: reports.append(report))
    assert reports == []

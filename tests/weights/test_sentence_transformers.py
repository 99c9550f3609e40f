"""What a folder of sentence-transformers says about pooling, in its older and its newer form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import config_of, random_model

from slipstream.weights.build import build_engine
from slipstream.weights.checkpoint import write_checkpoint
from slipstream.weights.engine_config import PoolingDefaults
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.rank_split import RankMapping
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.sources.open_source import open_source
from slipstream.weights.sources.sentence_transformers import read_pooling
from slipstream.weights.sources.source import SourceError

# sentence-transformers 6.2 writes other paths of its classes than 5.x
OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."


def write(folder: Path, settings: dict[str, Any], *others: str, prefix: str = OLD) -> None:
    names = ["Transformer", "Pooling", *others]
    paths = ["", "1_Pooling", *[f"{number}_Other" for number in range(2, len(names))]]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": prefix + name}
        for number, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
@pytest.mark.parametrize("prefix", [OLD, NEW])
def test_the_kind_of_pooling_is_read(tmp_path, settings, kind, prefix):
    write(tmp_path, settings, prefix=prefix)
    assert read_pooling(tmp_path, ["Qwen3ForCausalLM"]) == PoolingDefaults(kind, normalize=False)


def test_a_normalize_module_means_unit_length(tmp_path):
    write(tmp_path, {"pooling_mode_lasttoken": True}, "Normalize")
    assert read_pooling(tmp_path, ["Qwen3Model"]) == PoolingDefaults("last", True, generates=False)


@pytest.mark.parametrize(
    ("settings", "others", "problem"),
    [
        ({"pooling_mode_lasttoken": True}, ["Dense"], "module Dense of modules.json"),
        ({"pooling_mode_max_tokens": True}, [], "asks for pooling_mode_max_tokens"),
        ({}, [], "asks for no pooling mode"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            [],
            "pooling_mode_mean_tokens and pooling_mode_cls_token",
        ),
        ({"pooling_mode": "max"}, [], "asks for pooling_mode_max"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, [], "include_prompt"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, settings, others, problem):
    write(tmp_path, settings, *others)
    found = read_pooling(tmp_path, ["LlamaForCausalLM"])
    assert found is not None
    assert found.kind == ""
    assert problem in found.problem


def test_a_path_outside_the_folder_is_refused(tmp_path):
    write(tmp_path, {"pooling_mode_lasttoken": True})
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["path"] = "../1_Pooling"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    found = read_pooling(tmp_path, ["LlamaForCausalLM"])
    assert found is not None
    assert "not the name of a folder" in found.problem


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"type": 7}]', "\xff"])
def test_a_damaged_list_of_modules_never_raises(tmp_path, content):
    (tmp_path / "modules.json").write_bytes(content.encode("latin-1"))
    found = read_pooling(tmp_path, ["LlamaForCausalLM"])
    assert found is None or found.kind == ""


def test_a_plain_model_declares_nothing_and_a_classifier_its_score_layer(tmp_path):
    assert read_pooling(tmp_path, ["LlamaForCausalLM"]) is None
    assert read_pooling(tmp_path, ["GPT2LMHeadModel"]) is None
    assert read_pooling(tmp_path, ["LlamaModel"]) == PoolingDefaults("", generates=False)
    classifier = read_pooling(tmp_path, ["Qwen2ForSequenceClassification"])
    assert classifier == PoolingDefaults("score", generates=False)


def test_attention_in_both_directions_is_refused(tmp_path):
    """As in gte-Qwen2, whose architecture has the name of a causal model."""
    random_model(config_of("qwen2")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": False}))
    with pytest.raises(SourceError, match="both directions"):
        HuggingFaceFolder(tmp_path, "model")


def test_a_checkpoint_keeps_the_score_layer_and_what_was_declared(tmp_path):
    torch.manual_seed(7)
    config = config_of("qwen2", num_labels=1, pad_token_id=0)
    model = transformers.Qwen2ForSequenceClassification(config)
    model.save_pretrained(tmp_path / "hf")
    write_checkpoint(
        open_source(str(tmp_path / "hf")),
        tmp_path / "checkpoint",
        dtype="float32",
        mapping=RankMapping(tp_size=2),
    )
    folder = read_engine_folder(
        build_engine(tmp_path / "checkpoint", tmp_path / "engine", dtype="float32")
    )
    assert folder.spec.labels == 1
    assert folder.pooling == PoolingDefaults("score", generates=False)
    assert torch.equal(folder.tensors()["score.weight"], model.score.weight)

"""`slipstream.LLM` with an adapter gives the answers of peft's merged model."""

import json

import pytest
import torch
from tiny_adapters import save_adapter
from tiny_models import config_of, random_model

from slipstream import LLM
from slipstream.llm import GenerationFailed

PROMPT = [7, 11, 13, 17]


def greedy(model) -> list[int]:
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(10):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def test_answers_with_an_adapter_folder_equal_the_merged_model(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    base = random_model(config_of("llama")).eval()
    base.save_pretrained(tmp_path / "model")
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(96)}, "unk_token": "0"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": words,
    }
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    merged = save_adapter(base, tmp_path / "french", rank=128)
    (tmp_path / "empty").mkdir()
    with LLM(tmp_path / "model", dtype="float32", adapter_max_rank=256, cache_tokens=4096) as llm:
        adapted, plain = (
            llm.generate(PROMPT, max_tokens=10, ignore_end=True, adapter=adapter)[0].tokens
            for adapter in (tmp_path / "french", None)
        )
        assert (adapted, plain) == (greedy(merged), greedy(base))
        assert adapted != plain
        with pytest.raises(
            ValueError, match="adapter must be the folder of an adapter, got 'nowhere'"
        ):
            llm.generate(PROMPT, adapter="nowhere")
        with pytest.raises(GenerationFailed, match=r"adapter 'empty': .*adapter_config\.json"):
            llm.generate(PROMPT, adapter=tmp_path / "empty")

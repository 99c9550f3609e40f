"""`slipstream run`: beams, samples, adapters and output files, compared with transformers."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy
import pytest
import torch
from real_server import CACHE_TOKENS, build_engine
from safetensors.torch import save_file
from tiny_hf_folder import greedy_text, save_model

from slipstream.cli.commands import run_command

TEXTS = ("What is ML?", "Hello")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_engine(model, tmp_path_factory.mktemp("engine") / "1-gpu", "--max_beam_width", "3")


def run(capsys: pytest.CaptureFixture[str], engine: Path, *words: object) -> list[str]:
    """Run the command and return the printed answers in order."""
    flags = [
        "--engine_dir",
        engine,
        "--max_output_len",
        8,
        "--max_tokens_in_paged_kv_cache",
        CACHE_TOKENS,
        "--input_text",
        *TEXTS,
        *words,
    ]
    assert run_command("run", [str(flag) for flag in flags]) == 0, capsys.readouterr()
    answer = re.compile(r'^Output \[Text \d Beam \d\]: "(.*?)"\n(?=Output|Input|\Z)', re.M | re.S)
    return answer.findall(capsys.readouterr().out)


def test_run_writes_ids_log_probs_and_logits(
    model: Path, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    run(
        capsys,
        engine,
        "--output_csv",
        tmp_path / "ids.csv",
        "--output_npy",
        tmp_path / "ids.npy",
        "--output_logits_npy",
        tmp_path / "scores.npy",
        "--output_log_probs_npy",
        tmp_path / "log.npy",
        "--output_cum_log_probs_npy",
        tmp_path / "sums.npy",
    )
    with (tmp_path / "ids.csv").open() as file:
        rows = [[int(cell) for cell in row] for row in csv.reader(file)]
    assert rows == numpy.load(tmp_path / "ids.npy").tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lengths = [len(tokenizer(text).input_ids) for text in TEXTS]
    with torch.inference_mode():
        logits = [
            reference(torch.tensor([row[: length + 8]])).logits[0].numpy()
            for row, length in zip(rows, lengths, strict=True)
        ]
    context = numpy.concatenate([one[:length] for one, length in zip(logits, lengths, strict=True)])
    answers = [one[length - 1 : -1] for one, length in zip(logits, lengths, strict=True)]
    # the engine may use a 16-bit type
    numpy.testing.assert_allclose(numpy.load(tmp_path / "scores_context.npy"), context, atol=0.3)
    numpy.testing.assert_allclose(
        numpy.load(tmp_path / "scores_generation.npy"), numpy.concatenate(answers), atol=0.3
    )
    log_probs = [torch.tensor(one).log_softmax(-1).max(-1).values.numpy() for one in answers]
    numpy.testing.assert_allclose(numpy.load(tmp_path / "log.npy")[:, 0], log_probs, atol=0.3)
    numpy.testing.assert_allclose(
        numpy.load(tmp_path / "sums.npy")[:, 0], [sum(one) for one in log_probs], atol=1.0
    )


def test_run_prints_beams_and_samples(
    model: Path, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = [greedy_text(model, text, 8, special=True, dtype="float32") for text in TEXTS]
    assert run(capsys, engine) == greedy
    beams = run(capsys, engine, "--num_beams", 3)
    assert len(set(beams[:3])) == len(set(beams[3:])) == 3
    draws = run(capsys, engine, "--num_return_sequences", 4, "--top_k", 40, "--temperature", 30)
    assert len(draws) == 8
    assert len(set(draws)) > 2
    assert (
        run_command(
            "run",
            [
                "--engine_dir",
                str(engine),
                "--max_output_len",
                "2",
                "--num_beams",
                "2",
                "--streaming",
            ],
        )
        == 1
    )
    assert "--streaming and --num_beams exclude each other" in capsys.readouterr().err


def test_run_flags_reach_the_engine(
    model: Path, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run(capsys, engine)
    short = run(capsys, engine, "--max_attention_window_size", 2)
    assert short != plain
    assert (
        run(capsys, engine, "--lookahead_config", "[4,4,4]", "--max_tokens_in_paged_kv_cache", 1024)
        == plain
    )
    with pytest.raises(SystemExit):
        run(capsys, engine, "--lookahead_config", "7")
    assert (
        run_command(
            "run",
            ["--engine_dir", str(engine), "--max_output_len", "2", "--sink_token_length", "4"],
        )
        == 1
    )
    assert "4 sink tokens need a larger attention window" in capsys.readouterr().err


def test_run_applies_adapters_by_their_position(
    model: Path, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = "base_model.model.model.layers.0.self_attn.v_proj.lora_"
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"{stem}A.weight": torch.randn(4, 64, generator=generator),
        f"{stem}B.weight": torch.randn(32, 4, generator=generator),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"r": 4, "lora_alpha": 4, "target_modules": ["v_proj"], "peft_type": "LORA"})
    )
    plain = run(capsys, engine)
    assert run(capsys, engine, "--lora_dir", tmp_path, "--lora_task_uids", -1) == plain
    both = run(capsys, engine, "--lora_dir", tmp_path)
    assert both[0] != plain[0]
    assert both[1] != plain[1]
    assert run(capsys, engine, "--lora_dir", tmp_path, "--lora_task_uids", -1, 0) == [
        plain[0],
        both[1],
    ]
    assert (
        run_command(
            "run", ["--engine_dir", str(engine), "--max_output_len", "2", "--lora_task_uids", "3"]
        )
        == 1
    )
    assert "a position in --lora_dir, which has 0 folders" in capsys.readouterr().err

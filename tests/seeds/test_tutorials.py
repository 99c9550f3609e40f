"""The tutorials' commands, in order; the last answer is the greedy text that transformers gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_hf_folder import greedy_text, save_model
from tutorial import Tutorial, answer_of, long_port_flags

Begin = Callable[..., Tutorial]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=4)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    begun: list[Tutorial] = []

    def start(name: str, places: dict[str, str], like: str) -> Tutorial:
        begun.append(Tutorial(name, tmp_path, places, like))
        return begun[0]

    yield start
    for tutorial in begun:
        tutorial.close()


def test_triton_cli(begin: Begin, llama: Path, tmp_path: Path) -> None:
    tutorial = begin("000_triton_cli", {"/engines": f"{tmp_path}/engines"}, "v0.10")
    shutil.copytree(llama, tmp_path / "home" / ".cache" / "huggingface")
    printed = tutorial.run(tutorial.text("before"))
    assert f"Current repo at {tmp_path}/home/models" in printed
    tutorial.serve(long_port_flags(tutorial, "-"))
    answer = answer_of(tutorial.ask())
    assert answer["text_output"] == greedy_text(llama, "What is ML?", 50, special=True, dtype="float32")


def test_convert_build_fill_launch(begin: Begin, llama: Path, tmp_path: Path) -> None:
    places = {"/tensorrtllm_client": f"{tmp_path}/tensorrtllm_backend/inflight_batcher_llm/client",
              "/tensorrtllm_backend/": f"{tmp_path}/tensorrtllm_backend/", "/Llama-2-7b-hf": str(llama),
              "/tmp/ckpt": f"{tmp_path}/ckpt", "=/engines": f"={tmp_path}/engines",
              "/opt/tritonserver": f"{tmp_path}/opt", "--request-output-len": "-u localhost:8001 --request-output-len"}
    tutorial = begin("000_manual", places, "v0.10")
    (tmp_path / "opt").mkdir()
    expected = greedy_text(llama, "What is ML?", 50, special=True)
    printed = tutorial.run(tutorial.text("before"))
    assert f'Input [Text 0]: "<s>What is ML?"\nOutput [Text 0 Beam 0]: "{expected}"\n' in printed
    tutorial.serve(long_port_flags(tutorial, "_"))
    printed = tutorial.ask()
    assert f"Got completed request\nInput: What is ML?\nOutput beam 0: {expected}\nOutput sequence:  [" in printed
    answer = answer_of(printed)
    assert next(iter(answer)) == "context_logits"
    assert answer["context_logits"] == 0.0
    assert answer["text_output"] == "What is ML?" + expected  # nobody asked to leave the prompt out


@pytest.mark.slow
def test_four_ranks_of_a_checkpoint(begin: Begin, llama: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "tensorrtllm_backend"
    places = {"$(pwd)/Llama-2-7b-hf": str(llama), "/tmp/llama": f"{tmp_path}/llama", "/workspace": str(workspace)}
    tutorial = begin("001", places, "v0.9")
    tutorial.run(tutorial.text("before"), workspace)
    ranks = workspace / "tensorrt_llm" / "examples" / "llama" / "tllm_checkpoint_4gpu_tp4"
    assert len(list(ranks.glob("rank*.safetensors"))) == 4
    tutorial.serve(long_port_flags(tutorial, "_"), workspace)
    assert "--world_size 4: one server is started" in tutorial.log()
    answer = answer_of(tutorial.ask(workspace))
    assert answer["text_output"] == greedy_text(llama, "What is machine learning?", 20, special=True)


def test_gpt_repository(begin: Begin, tmp_path: Path) -> None:
    gpt = save_model(tmp_path / "gpt2", "gpt2")
    workspace = tmp_path / "tensorrtllm_backend"
    places = {"${model_directory}": str(gpt), "--tokenizer_dir gpt2": f"--tokenizer_dir {gpt}",
              "--text": "-u localhost:8000 --text", "--batch_size": "-u localhost:8000 --batch_size"}
    tutorial = begin("002", places, "2023-09")
    tutorial.run(tutorial.text("before"), workspace)
    tutorial.serve(long_port_flags(tutorial, "_"), workspace)
    printed = tutorial.ask(workspace)
    prompt = "Born in north-east France, Soyer trained as a"
    assert f"Input: {prompt}\nOutput: {greedy_text(gpt, prompt, 10, special=True)}\n" in printed
    assert "[INFO] Batch size: 8, Start len: 128, Output len: 20\n[INFO] Latency: " in printed
    assert (workspace / "tools" / "gpt" / "input_data.json").is_file()


@pytest.mark.slow
def test_relative_paths_and_streams(begin: Begin, llama: Path, tmp_path: Path) -> None:
    tutorial = begin("003", {"./Meta-Llama-3-8B-Instruct": "./Meta-Llama-3-8B-Instruct"}, "v0.10")
    tutorial.run("slipstream workspace TensorRT-LLM --like v0.10")
    shutil.copytree(llama, tmp_path / "TensorRT-LLM" / "Meta-Llama-3-8B-Instruct")
    tutorial.run(tutorial.text("before"))
    tutorial.serve(long_port_flags(tutorial, "_"))
    client = "tensorrtllm_backend/inflight_batcher_llm/client/end_to_end_grpc_client.py"
    streamed = tutorial.run(f"python3 {client} -u localhost:{tutorial.ports[8001]} -S -o 30 -p 'What is ML?'")
    assert streamed == greedy_text(llama, "What is ML?", 30, special=True, dtype="bfloat16") + "\n"


def test_old_build_and_unfilled_templates(begin: Begin, llama: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "tensorrtllm_backend"
    places = {"${model_directory}": str(llama), "=/triton_model_repo": f"={workspace}/triton_model_repo",
              "#/triton_model_repo": f"#{workspace}/triton_model_repo",
              "--request-output-len": "-u localhost:8001 --request-output-len"}
    tutorial = begin("004", places, "2024-01")
    tutorial.run(tutorial.text("before"), workspace)
    tutorial.serve(long_port_flags(tutorial, "-"), workspace)
    prompt = "Born in north-east France, Soyer trained as a"
    expected = greedy_text(llama, prompt, 200, special=False, dtype="bfloat16")
    assert f"Output beam 0: {expected}\nOutput sequence:  [" in tutorial.ask(workspace)
    client = "inflight_batcher_llm/client/inflight_batcher_llm_client.py"
    flags = f"-u localhost:{tutorial.ports[8001]} --request-output-len 400 --stop-after-ms 1"
    stopped = tutorial.run(f"python3 {client} {flags}", workspace)
    assert "Got cancellation response from server\nGot completed request\n" in stopped

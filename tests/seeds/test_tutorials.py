"""Runs the tutorials' commands in order and compares the answers with greedy transformers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import tritonclient.grpc.aio as triton
from safetensors.torch import load_file, save_file
from tiny_hf_folder import greedy_text, save_model
from tritonclient.utils import np_to_triton_dtype
from tutorial import HERE, Tutorial, answer_of, blocks_of, long_port_flags

WORKSPACE = "tensorrtllm_backend"
BORN = "Born in north-east France, Soyer trained as a"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=4)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "gpt2", "gpt2")


@pytest.fixture(scope="module")
def tried_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cached CPU probe of the first server, which is copied to the homes of the others."""
    return tmp_path_factory.mktemp("tried") / "cpu-probe.json"


@pytest.fixture(scope="module")
def begun(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, llama: Path, gpt: Path
) -> Iterator[dict[str, Future[Tutorial]]]:
    """Run every tutorial up to its server, two at a time, each in its own folder and home.

    Most of their commands use one core, so the other core can prepare the later tests.
    """
    names = [
        item.name
        for item in request.session.items
        if item.path == request.path and item.name in BEGINNINGS
    ]
    with ThreadPoolExecutor(2) as threads:
        yield {
            name: threads.submit(BEGINNINGS[name], tmp_path_factory.mktemp(name), llama, gpt)
            for name in names
        }
        threads.shutdown(cancel_futures=True)


@pytest.fixture
def tutorial(
    request: pytest.FixtureRequest, begun: dict[str, Future[Tutorial]], tried_cpu: Path
) -> Iterator[Tutorial]:
    tutorial = begun[request.node.name].result()
    kept = tutorial.folder / "home" / ".cache" / "slipstream" / tried_cpu.name
    if tried_cpu.exists() and not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tried_cpu, kept)
    yield tutorial
    tutorial.close()
    if kept.exists():
        shutil.copy(kept, tried_cpu)


@pytest.mark.parametrize("file", sorted(HERE.glob("*.txt")), ids=lambda file: file.stem)
def test_every_block_of_a_seed_is_run_or_skipped_with_a_reason(file: Path) -> None:
    source = (HERE / "test_tutorials.py").read_text() + (
        HERE.parent / "support" / "tutorial.py"
    ).read_text()
    for name, commands in blocks_of(file):
        assert commands.strip()
        if not re.fullmatch(r"skipped: \S.{10,}", name):
            assert f'"{name}"' in source, f"nothing runs the block '{name}'"


def begin_triton_cli(folder: Path, llama: Path, gpt: Path) -> Tutorial:
    tutorial = Tutorial("000_triton_cli", folder, {"/engines": f"{folder}/engines"}, "v0.10")
    shutil.copytree(llama, folder / "home" / ".cache" / "huggingface")
    return tutorial.prepare()


def test_triton_cli(tutorial: Tutorial, llama: Path) -> None:
    where = f"{tutorial.folder}/home/models"
    assert f"triton - INFO - Current repo at {where}:\nmodels/\n├── ensemble/" in tutorial.printed
    assert tutorial.printed.endswith("triton - INFO - Serve it with: triton start\n")
    tutorial.serve(long_port_flags(tutorial, "-"))
    answer = answer_of(tutorial.ask())
    assert answer["text_output"] == greedy_text(
        llama, "What is ML?", 50, special=True, dtype="float32"
    )


def begin_convert_build_fill_launch(folder: Path, llama: Path, gpt: Path) -> Tutorial:
    places = {
        "/tensorrtllm_client": f"{folder}/tensorrtllm_backend/inflight_batcher_llm/client",
        "/tensorrtllm_backend/": f"{folder}/tensorrtllm_backend/",
        "/Llama-2-7b-hf": str(llama),
        "/tmp/ckpt": f"{folder}/ckpt",
        "=/engines": f"={folder}/engines",
        "/opt/tritonserver": f"{folder}/opt",
        "--request-output-len": "-u localhost:8001 --request-output-len",
        "hf-internal-testing/llama-tokenizer": str(llama),
        "--measurement-interval 4000": "--measurement-interval 300",
        "--num-prompts 100": "--num-prompts 10",
    }
    (folder / "opt").mkdir()
    return Tutorial("000_manual", folder, places, "v0.10").prepare()


def test_convert_build_fill_launch(tutorial: Tutorial, llama: Path) -> None:
    expected = greedy_text(llama, "What is ML?", 50, special=True)
    assert (
        f'Input [Text 0]: "<s>What is ML?"\nOutput [Text 0 Beam 0]: "{expected}"\n'
        in tutorial.printed
    )
    tutorial.serve(long_port_flags(tutorial, "_"))
    assert "tritonserver" in tutorial.process_names()  # the name for pkill and pgrep
    printed = tutorial.ask()
    assert (
        f"Got completed request\nInput: What is ML?\nOutput beam 0: {expected}\nOutput sequence:  ["
        in printed
    )
    answer = answer_of(printed)
    assert next(iter(answer)) == "context_logits"
    assert answer["context_logits"] == 0.0
    assert answer["text_output"] == "What is ML?" + expected  # with the prompt
    printed = tutorial.run(tutorial.text("load"))
    assert "LLM Metrics" in printed
    assert re.search(r"│ Output sequence length │ +300\.00 │", printed)  # with the prompt's tokens
    assert (
        "Generating artifacts/ensemble-triton-tensorrtllm-concurrency1/profile_export_genai_perf.json"
        in printed
    )


def begin_four_ranks(folder: Path, llama: Path, gpt: Path) -> Tutorial:
    workspace = folder / WORKSPACE
    places = {
        "$(pwd)/Llama-2-7b-hf": str(llama),
        "/tmp/llama": f"{folder}/llama",
        "/workspace": str(workspace),
    }
    return Tutorial("001", folder, places, "v0.9").prepare(cwd=workspace)


def test_four_ranks_of_a_checkpoint(tutorial: Tutorial, llama: Path) -> None:
    workspace = tutorial.folder / WORKSPACE
    ranks = workspace / "tensorrt_llm" / "examples" / "llama" / "tllm_checkpoint_4gpu_tp4"
    assert len(list(ranks.glob("rank*.safetensors"))) == 4
    tutorial.serve(long_port_flags(tutorial, "_"), workspace)
    assert "--world_size 4: one server is started" in tutorial.log()
    line = "tensorrt_llm was started for 4 ranks, which need as many GPUs: it runs with 1 rank"
    assert line in tutorial.log()
    answer = answer_of(tutorial.ask(workspace))
    assert answer["text_output"] == greedy_text(
        llama, "What is machine learning?", 20, special=True
    )


def begin_gpt_repository(folder: Path, llama: Path, gpt: Path) -> Tutorial:
    places = {
        "${model_directory}": str(gpt),
        "--tokenizer_dir gpt2": f"--tokenizer_dir {gpt}",
        "--text": "-u localhost:8000 --text",
        "--batch_size": "-u localhost:8000 --batch_size",
        "-b 8 --input-data": "--request-count 2 -b 8 --input-data",
    }
    return Tutorial("002", folder, places, "2023-09").prepare(cwd=folder / WORKSPACE)


def test_gpt_repository(tutorial: Tutorial, gpt: Path) -> None:
    workspace = tutorial.folder / WORKSPACE
    tutorial.serve(long_port_flags(tutorial, "_"), workspace)
    printed = tutorial.ask(workspace)
    assert f"Input: {BORN}\nOutput: {greedy_text(gpt, BORN, 10, special=True)}\n" in printed
    printed = tutorial.run(tutorial.text("load"), workspace)
    assert "[INFO] Batch size: 8, Start len: 128, Output len: 20\n[INFO] Latency: " in printed
    assert (workspace / "tools" / "gpt" / "input_data.json").is_file()
    levels = re.findall(
        r"^Concurrency: (\d+), throughput: [\d.]+ infer/sec, latency \d+ usec$", printed, re.M
    )
    assert levels == ["1", "3", "5", "7", "9"]
    script = f"python3 tools/gpt/end_to_end_test.py -u localhost:{tutorial.ports[8000]}"
    assert "[INFO] Functionality test succeed." in tutorial.run(script, workspace)


def begin_relative_paths(folder: Path, llama: Path, gpt: Path) -> Tutorial:
    tutorial = Tutorial(
        "003", folder, {"./Meta-Llama-3-8B-Instruct": "./Meta-Llama-3-8B-Instruct"}, "v0.10"
    )
    tutorial.run("slipstream workspace TensorRT-LLM --like v0.10")
    shutil.copytree(llama, folder / "TensorRT-LLM" / "Meta-Llama-3-8B-Instruct")
    return tutorial.prepare()


def test_relative_paths_and_streams(tutorial: Tutorial, llama: Path) -> None:
    tutorial.serve(long_port_flags(tutorial, "_"))
    client = "tensorrtllm_backend/inflight_batcher_llm/client/end_to_end_grpc_client.py"
    streamed = tutorial.run(
        f"python3 {client} -u localhost:{tutorial.ports[8001]} -S -o 30 -p 'What is ML?'"
    )
    expected = greedy_text(llama, "What is ML?", 30, special=True, dtype="bfloat16")
    assert streamed == expected + "\n"
    # The service sends 1.0. A high temperature would show that the answer is sampled.
    for temperature in (1.0, 1.0, 30.0):
        pieces = asyncio.run(ask_as_service(tutorial, "What is ML?", 30, temperature))
        assert "".join(pieces) == expected


async def ask_as_service(
    tutorial: Tutorial, prompt: str, tokens: int, temperature: float
) -> list[str]:
    """Return the pieces of an answer, requested as the tutorial's BentoML service does."""
    values = {
        "text_input": numpy.array([[prompt.encode()]], dtype=object),
        "max_tokens": numpy.array([[tokens]], dtype=numpy.int32),
        "stream": numpy.array([[True]]),
        "temperature": numpy.array([[temperature]], dtype=numpy.float32),
    }
    inputs = []
    for name, array in values.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": "ensemble",
            "inputs": inputs,
            "outputs": [triton.InferRequestedOutput("text_output")],
            "request_id": "7",
        }

    pieces = []
    async with triton.InferenceServerClient(f"localhost:{tutorial.ports[8001]}") as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            pieces.append(result.as_numpy("text_output").reshape(-1)[0].decode())
    return pieces


def begin_old_build(folder: Path, llama: Path, gpt: Path) -> Tutorial:
    workspace, dataset = folder / WORKSPACE, folder / "dataset.json"
    items = [
        {"input": word, "instruction": "Say more", "output": "one two three"}
        for word in ("a", "bc", "def")
    ]
    dataset.write_text(json.dumps(items))
    places = {
        "${model_directory}": str(llama),
        "${gpt_model_directory}": str(gpt),
        "=/triton_model_repo": f"={workspace}/triton_model_repo",
        "#/triton_model_repo": f"#{workspace}/triton_model_repo",
        "--request-output-len": "-u localhost:8001 --request-output-len",
        "--stop-after-ms 200": "--stop-after-ms 5",
        "<dataset path>": str(dataset),
        "<>": str(llama),
        "end_to_end_test.py": "end_to_end_test.py -u localhost:8000",
        "-i grpc": "-i grpc -u localhost:8001",
        "--request_rate 10": "--request_rate 100",
        "--num_requests 5000": "--num_requests 20",
    }
    return Tutorial("004", folder, places, "2024-01").prepare(cwd=workspace)


def test_old_build_and_unfilled_templates(tutorial: Tutorial, llama: Path) -> None:
    workspace = tutorial.folder / WORKSPACE
    tutorial.serve(long_port_flags(tutorial, "-"), workspace)
    expected = greedy_text(llama, BORN, 200, special=False, dtype="bfloat16")
    assert f"Output beam 0: {expected}\nOutput sequence:  [" in tutorial.ask(workspace)
    stopped = tutorial.run(tutorial.text("stop"), workspace)
    assert "Got cancellation response from server\nGot completed request\n" in stopped
    before, after = (
        json.loads(line.partition(":")[2]) for line in stopped.splitlines() if "sequence: " in line
    )
    assert len(after) - len(before) < 200
    printed = tutorial.run(tutorial.text("load"), workspace)
    assert "[INFO] Functionality test succeed.\n[INFO] Warm up for benchmarking.\n" in printed
    totals = re.findall(r"\|\s+Total requests\s+\|\s+([\d.]+)\s+\|", printed)
    assert totals == ["3.00", "20.00"]


ADAPTERS = ("Japanese-Alpaca-LoRA-7b-v0", "luotuo-lora-7b-0.1")
MODULES = {"q_proj": 1, "k_proj": 2, "v_proj": 3}  # module: its number in a request


def save_adapter(folder: Path, seed: int) -> None:
    """Write a PEFT adapter for the query, key and value projections of the small model."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module in MODULES:
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
            tensors[f"{stem}A.weight"] = torch.randn(4, 64, generator=generator) * 0.3
            tensors[f"{stem}B.weight"] = torch.randn(64, 4, generator=generator) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": 4, "lora_alpha": 8, "target_modules": list(MODULES), "peft_type": "LORA"})
    )


def merged(model: Path, adapter_folder: Path, folder: Path) -> Path:
    """Write a model with an adapter merged into its weights."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    adapter = load_file(adapter_folder / "adapter_model.safetensors")
    for name, second in adapter.items():
        if name.endswith("lora_B.weight"):
            first = adapter[name.replace("lora_B", "lora_A")]
            place = name.removeprefix("base_model.model.").replace("lora_B.", "")
            weights[place] += 8 / 4 * second.half().float() @ first.half().float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def begin_many_adapters(folder: Path, llama: Path, gpt: Path) -> Tutorial:
    workspace = folder / WORKSPACE
    places = {
        "=llama-7b-hf": f"={llama}",
        "/tmp/llama_7b_with_lora_qkv": f"{folder}/lora",
        "=/triton_model_repo": f"={workspace}/all_models/inflight_batcher_llm",
        "${tokenizer_directory}": str(llama),
        "--top-k 0": "-u localhost:8001 --top-k 1",
    }
    tutorial = Tutorial("004", folder, places, "2024-01")
    for seed, name in enumerate(ADAPTERS):
        save_adapter(workspace / name, seed)
    return tutorial.prepare("adapters", workspace)


def test_many_adapters_in_one_batch(tutorial: Tutorial, llama: Path) -> None:
    workspace = tutorial.folder / WORKSPACE
    engine = f"{tutorial.folder}/lora/trt_engines/fp16/1-gpu/"
    config = json.loads((Path(engine) / "config.json").read_text())
    assert config["build_config"]["max_batch_size"] == 128
    rows = numpy.load(workspace / "luotuo-lora-7b-0.1-weights" / "model.lora_config.npy")
    assert rows[0].tolist() == [
        [module, layer, 4] for layer in range(2) for module in MODULES.values()
    ]
    fill = "python3 tools/fill_template.py -i all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"
    tutorial.run(f"{fill} engine_dir:{engine}", workspace)
    tutorial.serve(long_port_flags(tutorial, "-"), workspace)
    printed = tutorial.run(tutorial.text("ask adapters"), workspace)
    # six clients write to one terminal, so their lines may mix
    assert printed.count("Got completed request") == 6
    models = [
        llama,
        *(merged(llama, workspace / name, tutorial.folder / name) for name in ADAPTERS),
    ]
    prompts = ("美国的首都在哪里? \\n答案:", "アメリカ合衆国の首都はどこですか? \\n答え:")
    # Only the first tokens: a separate adapter and a merged one round differently, and the texts
    # diverge later.
    expected = sorted(
        greedy_text(model, prompt, 4, special=True) for model in models for prompt in prompts
    )
    # the small tokenizer drops what is not ASCII, so both prompts are equal
    assert len(set(expected)) == 3
    answers = re.findall(r"Output beam 0: (.{4})", printed)
    assert sorted(answers) == expected


BEGINNINGS = {
    "test_triton_cli": begin_triton_cli,
    "test_convert_build_fill_launch": begin_convert_build_fill_launch,
    "test_four_ranks_of_a_checkpoint": begin_four_ranks,
    "test_gpt_repository": begin_gpt_repository,
    "test_relative_paths_and_streams": begin_relative_paths,
    "test_old_build_and_unfilled_templates": begin_old_build,
    "test_many_adapters_in_one_batch": begin_many_adapters,
}

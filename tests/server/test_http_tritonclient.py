"""The HTTP clients of tritonclient against `tritonserver` with a real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as http
import tritonclient.http.aio as aio
from http_support import post, wait_until
from safetensors.torch import save_file
from tiny_server import ROOT, wait_for
from tritonclient.utils import InferenceServerException

from slipstream.repository.templates import fill, template
from slipstream.weights.build import build_engine

VOCABULARY = 96
HIDDEN = 32
FFN = 48
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 1,
    "bos_token_id": 0,
}
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "lm_head.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.mlp.gate_proj.weight": (FFN, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (FFN, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, FFN),
}


def make_repository(folder: Path) -> Path:
    source = folder / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(3)
    save_file(
        {name: torch.randn(shape) * 0.3 for name, shape in SHAPES.items()},
        source / "model.safetensors",
    )
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(VOCABULARY)}, "unk_token": "0"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": words,
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    engine = build_engine(source, folder / "engine", dtype="float32")
    values = {
        "engine_dir": str(engine),
        "tokenizer_dir": str(engine),
        "decoupled_mode": "false",
        "exclude_input_in_output": "true",
        "triton_max_batch_size": "8",
        "max_tokens_in_paged_kv_cache": "4096",
    }
    for name in ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing"):
        (folder / "repository" / name / "1").mkdir(parents=True)
        (folder / "repository" / name / "config.pbtxt").write_text(fill(template(name), values))
    return folder / "repository"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tritonclient")
    flags = [
        "--http-port=0",
        "--grpc-port=0",
        "--metrics-port=0",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--model-control-mode=explicit",
        "--load-model=ensemble",
    ]
    log = folder / "log.txt"
    repository = make_repository(folder)
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "slipstream.cli.compat.tritonserver",
                f"--model-repository={repository}",
                *flags,
            ],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(lambda: "Started Metrics" in log.read_text() or process.poll() is not None, 90)
            assert process.poll() is None, log.read_text()
            line = next(
                line for line in log.read_text().splitlines() if "Started HTTPService" in line
            )
            yield line.rpartition(" ")[2]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    with http.InferenceServerClient(address, concurrency=4) as made:
        yield made


def tensors(module: Any, texts: list[str], tokens: int, binary: bool = True) -> list[Any]:
    text = module.InferInput("text_input", [len(texts), 1], "BYTES")
    text.set_data_from_numpy(
        np.array([[text.encode()] for text in texts], dtype=object), binary_data=binary
    )
    length = module.InferInput("max_tokens", [len(texts), 1], "INT32")
    length.set_data_from_numpy(np.full((len(texts), 1), tokens, dtype=np.int32), binary_data=binary)
    return [text, length]


def expected(client: Any, prompt: str, tokens: int) -> bytes:
    answer = client.infer("ensemble", tensors(http, [prompt], tokens))
    (text,) = answer.as_numpy("text_output")
    return bytes(text)


@pytest.mark.parametrize("binary", [True, False])
def test_infer_with_binary_and_json_tensors(client: Any, binary: bool) -> None:
    wanted = [http.InferRequestedOutput("text_output", binary_data=binary)]
    answer = client.infer(
        "ensemble", tensors(http, ["5 6 7"], 8, binary), outputs=wanted, request_id="r1"
    )
    response = answer.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == (
        "ensemble",
        "1",
        "r1",
    )
    assert [output["name"] for output in response["outputs"]] == ["text_output"]
    (text,) = answer.as_numpy("text_output")
    text = text if isinstance(text, bytes) else text.encode()
    assert text == expected(client, "5 6 7", 8)
    assert len(text.split()) == 8


def test_a_batch_equals_its_parts(client: Any) -> None:
    prompts = ["5 6 7", "9", "11 12"]
    answer = client.infer("ensemble", tensors(http, prompts, 6))
    assert list(answer.as_numpy("text_output")) == [
        expected(client, prompt, 6) for prompt in prompts
    ]


def test_async_infer(client: Any) -> None:
    waiting = [client.async_infer("ensemble", tensors(http, [str(n)], 5)) for n in (3, 4, 5, 6)]
    found = [bytes(one.get_result().as_numpy("text_output")[0]) for one in waiting]
    assert found == [expected(client, str(n), 5) for n in (3, 4, 5, 6)]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_both_ways(client: Any, algorithm: str) -> None:
    answer = client.infer(
        "ensemble",
        tensors(http, ["5 6"], 5),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert bytes(answer.as_numpy("text_output")[0]) == expected(client, "5 6", 5)


async def test_the_asyncio_client(address: str, client: Any) -> None:
    async with aio.InferenceServerClient(address) as other:
        assert await other.is_server_ready()
        answer = await other.infer("ensemble", tensors(aio, ["7 8"], 5))
        assert bytes(answer.as_numpy("text_output")[0]) == expected(client, "7 8", 5)


def test_server_and_model_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("ensemble", "1")
    assert client.get_server_metadata()["name"] == "triton"
    assert client.get_model_metadata("ensemble")["platform"] == "ensemble"
    assert client.get_model_config("tensorrt_llm")["backend"] == "tensorrtllm"
    assert client.get_log_settings()["log_verbose_level"] == 0
    assert client.get_trace_settings()["trace_rate"] == "1000"
    assert client.get_system_shared_memory_status() == []
    before = client.get_inference_statistics("ensemble")["model_stats"][0]["inference_stats"][
        "success"
    ]["count"]
    expected(client, "5", 2)
    after = client.get_inference_statistics("ensemble")["model_stats"][0]["inference_stats"][
        "success"
    ]["count"]
    assert after == before + 1


def test_errors_arrive_as_the_clients_exception(client: Any) -> None:
    from tritonclient.utils import InferenceServerException

    with pytest.raises(
        InferenceServerException, match="Request for unknown model: 'nope' is not found"
    ):
        client.infer("nope", tensors(http, ["5"], 1))


def test_an_engine_is_unloaded_and_loaded_again(client: Any) -> None:
    before = expected(client, "5 6 7", 6)
    client.unload_model("ensemble", unload_dependents=True)
    assert not client.is_model_ready("tensorrt_llm")

    def states() -> dict[str, str]:
        return {row["name"]: row["state"] for row in client.get_model_repository_index()}

    assert states()["tensorrt_llm"] in ("UNLOADING", "UNAVAILABLE")
    names = ("ensemble", "postprocessing", "preprocessing", "tensorrt_llm")
    wait_until(lambda: states() == dict.fromkeys(names, "UNAVAILABLE"))
    client.load_model("ensemble")
    assert expected(client, "5 6 7", 6) == before


@pytest.mark.slow
def test_ensemble_comes_back_with_its_engine(client: Any) -> None:
    before = expected(client, "5 6 7", 6)
    client.unload_model("tensorrt_llm")
    assert not client.is_model_ready("ensemble")
    with pytest.raises(InferenceServerException, match="'ensemble' has no available versions"):
        expected(client, "5 6 7", 6)
    client.load_model("tensorrt_llm")
    assert client.is_model_ready("ensemble")
    assert expected(client, "5 6 7", 6) == before


@pytest.mark.parametrize("name", [b'"id": "\xff"', b'"\xff": "\x80"', b'"id": "\\udc00"'])
def test_text_that_is_not_utf8_is_served(address: str, name: bytes) -> None:
    body = b'{"text_input": "5 \xff 6", "max_tokens": 2, ' + name + b"}"
    answer = post(int(address.rpartition(":")[2]), "/v2/models/ensemble/generate", body)
    assert (answer.status, b'"text_output"' in answer.body) == (200, True), answer.body


def test_files_are_refused_where_python_models_are_not_allowed(client: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("mine", config='{"backend": "python"}', files={"file:1/model.py": b"x"})
    assert caught.value.status() == "501"
    assert "start it with --allow-python-models" in caught.value.message()

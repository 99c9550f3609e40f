"""Custom steps around a real engine: a Python model calls preprocessing, the engine and
postprocessing itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from python_model_harness import ask, open_models, response_texts, text_tensor, write_model

from slipstream.engine.settings import EngineSettings
from slipstream.repository.models import read_repository
from slipstream.repository.templates import write_repository
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.kserve.inference import InferRequest, ModelRegistry
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.build import build_registry
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer

VOCABULARY, HIDDEN, FFN, HEADS = 96, 32, 48, 4
SETTINGS = EngineSettings(dtype="float32", device="cpu", cache_tokens=1024, max_rows=8, threads=1)

CUSTOM = """
import numpy as np
import triton_python_backend_utils as pb_utils
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
def call(model, outputs, decoupled=False, **inputs):
    tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
    request = pb_utils.InferenceRequest(model_name=model, requested_output_names=outputs, inputs=tensors)
    responses = request.exec(decoupled=decoupled)
    for response in responses if decoupled else [responses]:
        if response.has_error(): raise pb_utils.TritonModelException(response.error().message())
        yield {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request, request.get_response_sender())
    def answer(self, request, sender):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        query = np.array([[b"7 " + given["text_input"].ravel()[0]]], dtype=object)  # added by this model only
        (before,) = call("preprocessing", ["INPUT_ID", "REQUEST_INPUT_LEN"], QUERY=query,
                         REQUEST_OUTPUT_LEN=given["max_tokens"].astype(np.int32))
        for step in call("tensorrt_llm", ["output_ids", "sequence_length"], decoupled=True,
                         input_ids=before["INPUT_ID"], input_lengths=before["REQUEST_INPUT_LEN"],
                         request_output_len=given["max_tokens"].astype(np.int32),
                         end_id=np.array([[95]], np.int32), streaming=np.array([[True]])):
            (after,) = call("postprocessing", ["OUTPUT"], TOKENS_BATCH=step["output_ids"],
                            SEQUENCE_LENGTH=step["sequence_length"])
            text = b"<" + after["OUTPUT"].ravel()[0].strip() + b">"
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text], dtype=object))]))
        sender.send(flags=FINAL)
"""
CONFIG = """
max_batch_size: 8
model_transaction_policy { decoupled: True }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] }, { name: "max_tokens" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""


def build(folder: Path) -> Path:
    """Build a random Llama whose words are numbers."""
    import torch
    from safetensors.torch import save_file

    from slipstream.weights.build import build_engine

    source = folder / "model"
    source.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 95,
        "bos_token_id": 0,
    }
    (source / "config.json").write_text(json.dumps(config))
    place = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    shapes |= {f"{place}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {f"{place}mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
    shapes[f"{place}mlp.down_proj.weight"] = (HIDDEN, FFN)
    torch.manual_seed(3)
    tensors = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    for name in (
        "model.norm.weight",
        f"{place}input_layernorm.weight",
        f"{place}post_attention_layernorm.weight",
    ):
        tensors[name] = torch.ones(HIDDEN)
    save_file(tensors, source / "model.safetensors")
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(VOCABULARY)}, "unk_token": "0"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": words,
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Path(build_engine(source, folder / "engine", dtype="float32"))


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRegistry]:
    from slipstream.weights.load import start_engine

    folder = tmp_path_factory.mktemp("engine")
    engine_folder = build(folder)
    write_repository(folder / "repository", "tensorrt_llm_bls", engine_folder, engine_folder, 8)
    repository = read_repository(folder / "repository")
    engine = InProcessEngine(start_engine(str(engine_folder), SETTINGS))
    generators = {
        name: TextGenerator(Tokenizer.load(model.tokenizer_folder), engine)  # type: ignore[misc]
        for name, model in repository.engines.items()
    }
    yield build_registry(repository, generators)  # type: ignore[arg-type]
    engine.close()


async def test_a_python_chain_returns_the_engines_tokens(
    registry: ModelRegistry, tmp_path: Path
) -> None:
    def inputs(prompt: str) -> dict[str, Tensor]:
        return {
            "text_input": text_tensor(prompt, shape=(1, 1)),
            "max_tokens": Tensor.from_values("max_tokens", "INT32", (1, 1), [6]),
        }

    known = [(entry.name, entry.model) for entry in registry]
    streamed = inputs("7 3 4") | {"stream": Tensor.from_values("stream", "BOOL", (1, 1), [True])}
    expected = response_texts(
        await ask(registry.find("ensemble").model, InferRequest("ensemble", "1", streamed))
    )
    write_model(tmp_path, "custom", CUSTOM, CONFIG)
    async with open_models(tmp_path, "custom", others=known) as models:
        found = response_texts(
            await ask(models["custom"], InferRequest("custom", "1", inputs("3 4")))
        )
    # tokens of several steps may come in one response, so only the words are compared
    assert all(piece.startswith("<") and piece.endswith(">") for piece in found)
    assert " ".join(piece[1:-1] for piece in found).split() == "".join(expected).split()
    assert len("".join(expected).split()) == 6

"""Servers of tiny models that compute embeddings or scores, and transformers' models of the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
import transformers as hf
from http_support import RunningServer
from openai_server import SETTINGS, sdk
from tiny_hf_folder import BEGIN, END, POSITIONS, VOCABULARY, save_tokenizer
from tiny_models import config_of

from slipstream.engine_worker.process import start_real_engine
from slipstream.repository.models import read_repository
from slipstream.repository.templates import write_repository
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.kserve.health import ServerState
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.models.build import build_registry
from slipstream.server.services import create_app, create_context
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.build import build_engine

MODEL = "pooler"
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
MEAN = {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}


@dataclass
class PoolingServer:
    port: int
    client: openai.OpenAI
    engine: InProcessEngine
    model: Any  # transformers' model
    tokenizer: Any  # transformers' tokenizer

    def post(self, path: str, body: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.post(url, json=body, trust_env=False, timeout=20)

    def problem(self, path: str, body: Any) -> tuple[int, str | None, str]:
        answer = self.post(path, body)
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["message"]

    def states(self, tokens: list[int]) -> torch.Tensor:
        """Return transformers' final states of a prompt: [tokens, hidden]."""
        base = getattr(self.model, "model", self.model)
        with torch.inference_mode():
            states: torch.Tensor = base(torch.tensor([tokens])).last_hidden_state[0]
        return states


def save_pooling_model(folder: Path, family: str, architecture: str, **options: Any) -> None:
    """Save a random model under a class of transformers, with the tokenizer of the tests."""
    config = config_of(
        family,
        vocab_size=VOCABULARY,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=END,
        max_position_embeddings=POSITIONS,
        **options,
    )
    torch.manual_seed(11)
    model = getattr(hf, architecture)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)


def add_modules(folder: Path, pooling: dict[str, bool], *others: str) -> None:
    """Declare the modules of sentence-transformers: the model, a pooling and others."""
    names = ["Transformer", "Pooling", *others]
    prefix = "sentence_transformers.models."
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": prefix + name}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 64, **pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


@contextmanager
def pooling_server(
    folder: Path,
    architecture: str,
    *,
    embedding_pooling: str = "",
    parameters: Mapping[str, str] = {},
) -> Iterator[PoolingServer]:
    """Serve the model in `folder / "hf"`. `parameters`: of its engine in the repository."""
    engine_folder = build_engine(folder / "hf", folder / "engine", dtype="float32")
    repository = folder / "repository"
    write_repository(repository, MODEL, engine_folder, engine_folder, 64)
    config = repository / "tensorrt_llm" / "config.pbtxt"
    for name, value in parameters.items():
        line = f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
        config.write_text(f"{config.read_text()}\n{line}\n")
    engine = InProcessEngine(start_real_engine(str(engine_folder), SETTINGS))
    generator = TextGenerator(Tokenizer.load(engine_folder), engine)
    registry = build_registry(read_repository(repository), {"tensorrt_llm": generator})
    registry.wrap(ServerMetrics().count)
    context = create_context(embedding_pooling=embedding_pooling)
    model = getattr(hf, architecture).from_pretrained(folder / "hf", dtype=torch.float32).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / "hf")
    with RunningServer(create_app(registry, ServerState([engine]), context)) as server:
        client = sdk(server.port)
        yield PoolingServer(server.port, client, engine, model, tokenizer)
        client.close()
    engine.close()

"""A server with a tiny real engine, and OpenAI's SDK as its client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from http_support import RunningServer
from optional_tensors import write_declared
from tiny_hf_folder import save_model

from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.process import start_real_engine
from slipstream.repository.models import read_repository
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.models.build import build_registry
from slipstream.server.services import create_app, create_context
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.build import build_engine

SETTINGS = EngineSettings(
    dtype="float32", device="cpu", cache_tokens=2048, max_rows=4, threads=1, adapter_max_rank=8
)
MAX_WAITING = 64  # most requests that wait for the engine
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<{{ call.function.name }}({{ call.function.arguments.x }})>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if quietly %}[quietly {{ quietly }}]{% endif %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@dataclass
class Serving:
    port: int
    client: openai.OpenAI
    engine: InProcessEngine
    generator: TextGenerator
    registry: ModelRegistry
    state: ServerState
    model_folder: Path  # Hugging Face folder of the model
    merged: Any  # transformers' model, merged with the adapter `french`


@contextmanager
def running(folder: Path, template: str = TEMPLATE) -> Iterator[Serving]:
    save_model(folder / "hf")
    (folder / "hf" / "chat_template.jinja").write_text(template)
    merged = _save_adapter(folder / "hf", folder / "adapters" / "french")
    engine_folder = build_engine(folder / "hf", folder / "engine", dtype="float32")
    repository = write_declared(folder / "repo", engine_folder)
    config = repository / "tensorrt_llm" / "config.pbtxt"
    policy = f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {MAX_WAITING} }}"
    config.write_text(config.read_text().replace("dynamic_batching {", policy))
    (folder / "adapters" / "notes").mkdir()  # holds no adapter
    engine = InProcessEngine(start_real_engine(str(engine_folder), SETTINGS))
    generator = TextGenerator(Tokenizer.load(engine_folder), engine)
    registry = build_registry(
        read_repository(repository),
        {"tensorrt_llm": generator},
        adapter_folder=folder / "adapters",
    )
    metrics = ServerMetrics()
    registry.wrap(metrics.count)
    metrics.watch_engine("tensorrt_llm", engine)
    state = ServerState([engine])
    app = create_app(registry, state, create_context(), dashboard=metrics)
    with RunningServer(app) as server:
        client = sdk(server.port)
        yield Serving(
            server.port, client, engine, generator, registry, state, folder / "hf", merged
        )
        client.close()
    engine.close()


def sdk(port: int, key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=20
    )


def _save_adapter(model: Path, adapter: Path) -> Any:
    import torch
    import transformers
    from tiny_adapters import save_adapter

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return save_adapter(base, adapter)

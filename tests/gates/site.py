"""A server with two small real models: `one` with an adapter, and `two`, which answers unary calls.

The models have the same weights, and answer in a way that rounding does not change.
"""

from __future__ import annotations

import atexit
import functools
import json
import re
import shutil
import tempfile
from pathlib import Path

from command_line import run_cli
from large_vocabulary import save_large_model
from real_server import RealServer
from tiny_adapters import save_adapter
from tiny_hf_folder import save_model

ADAPTER = "one-lora"
CACHE_TOKENS = 8192  # the cache is soon full, so that its tables do not grow later
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
MORE_ADAPTERS = tuple(f"adapter-{number}" for number in range(6))  # of the large model
MOST_BEAMS = 8
_BEAMS = 'max_beam_width" value { string_value: "'
_ROOM = 'max_tokens_in_paged_kv_cache" value { string_value: "'


@functools.cache
def _source(large: bool) -> Path:
    """Return a folder with a Hugging Face model and adapters, once for all gates."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="gates-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = save_large_model(folder / "model") if large else save_model(folder / "model")
    names = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": TEMPLATE}))
    base = transformers.AutoModelForCausalLM.from_pretrained(source)
    save_adapter(base, folder / "adapters" / ADAPTER, seed=1)
    for seed, name in enumerate(MORE_ADAPTERS if large else (), 2):
        save_adapter(base, folder / "adapters" / name, seed=seed)
    return folder


def write_site(folder: Path, cache_tokens: int = CACHE_TOKENS, large: bool = False) -> Path:
    """Write the repository of both models. Return its folder.

    `large`: with a large vocabulary and a long context.
    """
    place = folder / "source"
    shutil.copytree(_source(large), place)
    repository = folder / "models"
    for name, options in (("one", ("--lora-dir", place / "adapters")), ("two", ())):
        words = ["-m", name, "-s", place / "model", "--dtype", "float32", *options]
        result = run_cli(["import", *words, "--repo", repository])
        assert result.exit_code == 0, result.output
    for file in repository.glob("*tensorrt_llm/config.pbtxt"):
        text = file.read_text()
        assert _ROOM in text
        text = text.replace(_ROOM, f"{_ROOM}{cache_tokens}")
        file.write_text(re.sub(f'{re.escape(_BEAMS)}[^"]*', f"{_BEAMS}{MOST_BEAMS}", text))
    for name in ("two", "two-tensorrt_llm"):
        file = repository / name / "config.pbtxt"
        text = file.read_text()
        assert "decoupled: True" in text
        file.write_text(text.replace("decoupled: True", "decoupled: False"))
    return repository


def start_site(repository: Path, folder: Path, *options: str) -> RealServer:
    """Start a server whose models are loaded and unloaded by requests."""
    return RealServer(
        repository,
        folder,
        "-m",
        "slipstream.cli.compat.tritonserver",
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        *options,
    )

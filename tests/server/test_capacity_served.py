"""The requests at once of a served engine: from the build, the repository and the command line."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from real_server import RealServer, build_engine, write_repository
from tiny_engine import build_tiny_engine

# Enough KV cache for 1024 requests: 128 tokens each.
CACHE = {"max_tokens_in_paged_kv_cache": str(1024 * 128)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a repository of an engine that was built with --max_batch_size 512."""
    folder = tmp_path_factory.mktemp("models")
    build_tiny_engine(folder)
    engine = build_engine(folder / "model", folder / "built", "--max_batch_size", "512")
    values = {"triton_max_batch_size": "8", "decoupled_mode": "False", "tokenizer_dir": str(engine)}
    for name in ("plain", "five"):
        write_repository(folder / name, "inflight_batcher_llm", "v0.18", engine, **values, **CACHE)
    with (folder / "five" / "tensorrt_llm" / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "max_num_sequences" value { string_value: "5" } }')
    return folder


def serve(models: Path, repository: str, folder: Path, *flags: str) -> tuple[str, dict[str, int]]:
    """Return the log of a server at its start, and gauges of its engine by request type."""
    program = ["-m", "slipstream.cli.main", "start", "--repo", str(models / repository)]
    server = RealServer(models, folder, *program, "--dtype", "float32", *flags)
    try:
        server.wait()
        metrics = httpx.get(f"http://{server.metrics}/metrics").text
        return server.log(), {
            name: int(float(value))
            for name, value in re.findall(
                r'^nv_trt_llm_request_metrics\{.*request_type="(\w+)".*\} (\S+)$', metrics, re.M
            )
        }
    finally:
        server.close()


@pytest.mark.parametrize(
    ("repository", "flags", "rows", "note"),
    [
        ("plain", [], 512, "the build's max_batch_size"),
        ("five", [], 5, "set by max_num_sequences in config.pbtxt"),
        ("five", ["--max-num-seqs", "600"], 600, "set by --max-batch-size"),
    ],
)
def test_requests_at_once(models, tmp_path, repository, flags, rows, note):
    log, gauges = serve(models, repository, tmp_path, *flags)
    assert f"  requests at once {rows:>9}         {note}\n" in log
    assert gauges["max"] == rows


def test_flags_override_the_repository(models, tmp_path):
    flags = ["--max-seq-len", "128", "--max-num-tokens", "64", "--kv-cache-memory-bytes", "1M"]
    log, _ = serve(models, "plain", tmp_path, *flags, "--no-enable-prefix-caching")
    # 2 layers, keys and values of 32 float32 numbers each
    assert f"  {2**20 // (2 * 2 * 32 * 4)} tokens in float32\n" in log
    assert "  tokens per step         64         set by --max-num-tokens\n" in log
    assert "  longest sequence       128 tokens  set by --max-seq-len\n" in log

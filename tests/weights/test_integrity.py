from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.settings import EngineSettings
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import EngineFolderError, read_engine_config
from slipstream.weights.integrity import verify_weights
from slipstream.weights.load import start_engine

SETTINGS = EngineSettings(device="cpu", dtype="float32", max_rows=2, cache_tokens=128)


@pytest.fixture
def engine(save_model: Callable[..., Any], tmp_path: Path) -> Path:
    folder, _ = save_model("llama")
    return build_engine(folder, tmp_path / "engine")


def test_an_engine_with_a_flipped_bit_does_not_start(engine: Path) -> None:
    start_engine(engine, SETTINGS)
    weights = bytearray((engine / "rank0.engine").read_bytes())
    weights[-9] ^= 1
    (engine / "rank0.engine").write_bytes(weights)
    with pytest.raises(
        EngineFolderError, match=r"rank0\.engine: not the weights that were built: their SHA-256"
    ):
        start_engine(engine, SETTINGS)


def test_a_tokenizer_may_be_edited(engine: Path) -> None:
    edited = [name for name in read_engine_config(engine).files if name.endswith(".json")]
    assert edited
    for name in edited:
        (engine / name).write_text((engine / name).read_text() + "\n")
    assert start_engine(engine, SETTINGS).info.max_rows == 2


def test_an_error_of_the_load_is_raised_before_the_check_ends(engine: Path) -> None:
    (engine / "rank0.engine").write_bytes(b"nothing")
    with pytest.raises(MemoryError, match="the cache"), verify_weights(read_engine_config(engine)):
        raise MemoryError("the cache")

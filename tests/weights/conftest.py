from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import config_of, random_model


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    def save(
        family: str, *, shard: str | None = None, dtype: torch.dtype | None = None, **options: Any
    ) -> tuple[Path, Any]:
        model = random_model(config_of(family, **options))
        model = model if dtype is None else model.to(dtype)
        folder = tmp_path / f"hf-{family}"
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        return folder, model

    return save

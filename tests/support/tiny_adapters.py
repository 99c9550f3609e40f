"""Random adapters for tiny models, created and merged by peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

ATTENTION = ["q_proj", "k_proj", "v_proj"]
ALL_MODULES = [*ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(
    model: Any,
    folder: Path,
    *,
    rank: int = 8,
    modules: list[str] | None = None,
    seed: int = 1,
    **options: Any,
) -> Any:
    """Save an adapter that changes most outputs. Return the model with the adapter merged."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, target_modules=modules or ATTENTION, **{"lora_alpha": 2 * rank, **options}
    )
    torch.manual_seed(seed)
    adapted = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()

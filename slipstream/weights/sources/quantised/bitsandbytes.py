"""bitsandbytes' matrices of 4 bits: each code stands for a value of a table (nf4, fp4).

P.weight [out * in / 2, 1], P.weight.absmax (the scale of each block), P.weight.quant_map, and the
other settings as JSON in P.weight.quant_state.bitsandbytes__nf4. The scales may be quantised, too.
"""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Any

from slipstream.weights.sources.quantised.layer import QuantisedLayer

if TYPE_CHECKING:
    import torch


def table_shape(layer: QuantisedLayer) -> tuple[int, int]:
    layer.slot("weight.absmax")
    layer.slot("weight.quant_map")
    rows, columns = _state(layer)["shape"]
    if prod(layer.slot("weight").shape) * 2 != rows * columns:
        raise layer.misfit("weight", f"its state says {[rows, columns]}")
    return int(rows), int(columns)


def read_table(layer: QuantisedLayer) -> torch.Tensor:
    """Return the matrix, float32 [out, in]."""
    import torch

    state = _state(layer)
    both = layer.tensor("weight").flatten()
    codes = torch.stack((both >> 4, both & 15), dim=1).flatten().long()
    values = layer.tensor("weight.quant_map").float()[codes]
    largest = layer.tensor("weight.absmax")
    if layer.has("weight.nested_absmax"):
        scales = layer.tensor("weight.nested_absmax").float()
        stored = layer.tensor("weight.nested_quant_map").float()[largest.long()]
        block = torch.arange(len(stored)) // int(state["nested_blocksize"])
        largest = stored * scales[block] + float(state["nested_offset"])
    each = int(state["blocksize"])
    spread = largest.float().repeat_interleave(each)[: len(values)]
    return (values * spread).view(table_shape(layer))


def _state(layer: QuantisedLayer) -> dict[str, Any]:
    for kind in ("nf4", "fp4"):
        name = f"weight.quant_state.bitsandbytes__{kind}"
        if layer.has(name):
            return dict(json.loads(bytes(layer.array(name).array)))
    raise layer.absent("weight.quant_state")

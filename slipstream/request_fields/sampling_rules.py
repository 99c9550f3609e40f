"""The rule of each protocol for which requests sample. docs/requests.md has it as a table.

- Triton's protocols follow TensorRT-LLM. A request samples if `top_k` is above 1, or if `top_k` is
  0 (or not sent) and `top_p` is above 0. All others are greedy, whatever `temperature` says; its
  default is 1. Upstream's clients rely on it: they send a temperature of 1 by default. `min_p` and
  `typical_p`, which upstream does not have, sample as `top_p` does.
- OpenAI's routes sample unless `temperature` is 0 or `top_k` is 1. The default of `temperature` is
  1 (`openai_default` in sampling_fields.py).
- `slipstream.LLM` samples if `temperature` is above 0 and `top_k` is not 1. The default of
  `temperature` is 0 (`SamplingParams`).

On every protocol a temperature of 0 is greedy. All rules end in `SamplingParams.temperature`, and
the engine has one rule: `SamplingParams.greedy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.request_fields.field import BEAM_SEARCH
from slipstream.request_fields.table import COPIED

_DEFAULT_TEMPERATURE = 1.0
# Parameters that turn sampling on, and the values that turn them off.
_ENABLING = tuple(
    (field.parameter, field.sampling_default) for field in COPIED if field.enables_sampling
)


def triton_temperature(values: Mapping[str, Any]) -> float:
    """Return the engine's temperature for a request on Triton's protocols. 0: greedy.

    `values`: the sampling parameters that the request has.
    """
    if values.get(BEAM_SEARCH, 1) > 1:
        return float(values.get("temperature", 0.0))  # beams are not drawn, but scored by it
    temperature = float(values.get("temperature", _DEFAULT_TEMPERATURE))
    top_k = values.get("top_k", 0)
    if top_k == 0:
        top_p = values.get("top_p", 0.0)
        enabled = any(values.get(parameter, off) != off for parameter, off in _ENABLING)
        return temperature if top_p > 0.0 or enabled else 0.0
    return temperature if top_k > 1 else 0.0

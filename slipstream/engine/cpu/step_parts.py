"""What a step consists of: operations that compiled code carries out in one call, and parts that
torch carries out. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from slipstream.kernels.adapters import CpuStepAdapters


@dataclass(slots=True)
class StepParts:
    """What the parts of torch need to know about a step."""

    tokens: int
    samples: int
    adapters: CpuStepAdapters | None = None


# encoded operations, or a part of torch
Segment = np.ndarray | Callable[[StepParts], None]

"""The number of replicas, from the requests in flight and what an engine runs at once.

Ray sends this module to its controller, so it imports nothing.
"""

from __future__ import annotations

from typing import Any

CAPACITY = "requests_at_once"  # statistic of a replica: requests that its engines run at once
TARGET_SHARE = 0.8  # of the capacity, so that a new replica is ready before requests wait


def replicas_by_capacity(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the wanted number of replicas, before Ray's bounds and delays, and no state.

    `context`: Ray's AutoscalingContext.
    """
    capacities = list((context.aggregated_metrics or {}).get(CAPACITY, {}).values())
    capacity = sum(capacities) / len(capacities) if capacities else 0.0
    if capacity <= 0:  # no replica has started yet
        return context.target_num_replicas, {}
    return context.total_num_requests / (TARGET_SHARE * capacity), {}

"""The application for Ray Serve: `serve run slipstream.ray.serve:app repository=/models`."""

# Ray reads the annotation of `app`, so it must be a class: no `from __future__ import annotations`.

import shlex
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from slipstream.cli.compat.tritonserver_flags import FlagError, parse_flags
from slipstream.ray.replica import Replica
from slipstream.ray.scaling import replicas_by_capacity

HEALTH_SECONDS = 5.0  # between two health checks, and the longest wait for one
# what a replica needs to end after its last request
_END_SECONDS = 30.0


class Arguments(BaseModel):
    """What follows the name of `app` in `serve run`, or `args` of a configuration file."""

    model_config = ConfigDict(extra="forbid")

    repository: str = Field(description="Model repository, under this path on every node.")
    ranks: int = Field(1, ge=1, description="GPUs of each engine.")
    gpus: int | None = Field(
        None, ge=0, description="GPUs of a replica (default: ranks); 0: run on CPUs."
    )
    nodes: int = Field(1, ge=1, description="Nodes that the ranks of a replica are divided among.")
    cpus: float = Field(2.0, gt=0, description="CPUs of a replica on each of its nodes.")
    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float | None = Field(
        None,
        gt=0,
        description="Requests in flight per replica to scale for "
        "(default: 0.8 of those that its engines run at once).",
    )
    max_ongoing_requests: int = Field(
        1024, ge=1, description="Requests in flight per replica; others wait in Ray."
    )
    upscale_delay_secs: float = Field(10.0, ge=0)
    downscale_delay_secs: float = Field(300.0, ge=0)
    exit_timeout_secs: float = Field(
        60.0, ge=0, description="Seconds for running requests to finish at a stop."
    )
    start_timeout_secs: float = Field(900.0, gt=0, description="Seconds for a server to start.")
    flags: str = Field("", description="Further flags of tritonserver, as on its command line.")

    def server_flags(self) -> list[str]:
        """Return the flags of the servers. Raise ValueError if one is wrong."""
        given = [f"--model-repository={self.repository}"]
        if self.ranks > 1:  # otherwise config.pbtxt may ask for several
            given.append(f"--ranks={self.ranks}")
        given += shlex.split(self.flags)
        try:
            parse_flags(given)
        except FlagError as error:
            raise ValueError(f"flags: {error}") from error
        return given

    def bundle(self) -> dict[str, float]:
        """Return what a replica needs on each of its nodes. Raise ValueError if they differ."""
        gpus = self.ranks if self.gpus is None else self.gpus
        for name, number in (("ranks", self.ranks), ("gpus", gpus)):
            if number % self.nodes:
                raise ValueError(
                    f"{name}: {number} cannot be divided equally among {self.nodes} nodes"
                )
        found = {"CPU": self.cpus}
        return found | ({"GPU": gpus // self.nodes} if gpus else {})

    def autoscaling(self) -> AutoscalingConfig:
        settings: dict[str, Any] = {
            "min_replicas": self.min_replicas,
            "max_replicas": self.max_replicas,
            "upscale_delay_s": self.upscale_delay_secs,
            "downscale_delay_s": self.downscale_delay_secs,
            "look_back_period_s": max(self.upscale_delay_secs, 15.0),
        }
        if self.target_ongoing_requests is None:
            settings["policy"] = AutoscalingPolicy(policy_function=replicas_by_capacity)
        else:
            settings["target_ongoing_requests"] = self.target_ongoing_requests
        return AutoscalingConfig(**settings)


def app(arguments: Arguments) -> serve.Application:
    """Return the application. One actor has all GPUs of a replica on a node: the ranks are its
    children. With several nodes the replica is a placement group, and has an actor on each.
    """
    bundle = arguments.bundle()
    spread: dict[str, Any] = {}
    if arguments.nodes > 1:
        spread = {
            "placement_group_bundles": [bundle] * arguments.nodes,
            "placement_group_strategy": "STRICT_SPREAD",
        }
    deployment = serve.deployment(
        Replica,
        name="slipstream",
        ray_actor_options={
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
        },
        **spread,
        autoscaling_config=arguments.autoscaling(),
        max_ongoing_requests=arguments.max_ongoing_requests,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=arguments.exit_timeout_secs + _END_SECONDS,
    )
    flags = arguments.server_flags()
    times = (arguments.start_timeout_secs, arguments.exit_timeout_secs)
    return deployment.bind(flags, *times, arguments.nodes)

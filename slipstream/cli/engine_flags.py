"""The flags of `slipstream start` for engines, by the names of vLLM and TensorRT-LLM."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from typing import Any, get_args

from slipstream.cli.arguments import (
    RANKS_HELP,
    REPLICAS_HELP,
    ArgumentContainer,
    Parser,
    UsageError,
    at_least,
)
from slipstream.engine.options import OPTION_NAMES, flag, flags, read_size
from slipstream.engine.sampling_params import EMBEDDING_KINDS
from slipstream.engine.settings import CacheType, EngineSettings, Policy

AUTO = "auto"
WEIGHT_ONLY = ("int8", "int4", "fp8")
_CAPACITY = (
    "What is not given is decided from the machine, the build and the repository; the table at the "
    "start shows it. A flag applies to all engines and overrides their config.pbtxt."
)


def add_engine_flags(parser: Parser, extended: bool = False) -> None:
    """extended: only --help-all shows them"""
    group = parser.extended_group if extended else parser.group
    _add_engines(group("engines"))
    _add_capacity(group("capacity", _CAPACITY))


def _add_engines(group: ArgumentContainer) -> None:
    _add_devices(group)
    add_weight_only(group, "; needs MODEL, because the engines of a repository are already built")
    group.add_argument(
        "--embeddings",
        choices=EMBEDDING_KINDS,
        metavar="KIND",
        help="Serve embeddings of any model, pooled by KIND: last, mean, weightedmean or cls "
        "(default: only of models that declare them).",
    )
    group.add_argument(
        "--target-itl-ms",
        type=at_least(1),
        metavar="MILLISECONDS",
        help="Compute long prompts in chunks, so that the time between two tokens of a stream "
        "stays below this (default: no target).",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="Give a request the same tokens whatever else runs beside it, in 16-bit types, too; "
        "slower (default: off).",
    )
    group.add_argument(
        "--server-timeout",
        type=at_least(1),
        default=300.0,
        metavar="SECONDS",
        help="Fail if an engine has not loaded after this long.",
    )
    group.add_argument(
        "--idle-unload",
        type=at_least(1),
        metavar="SECONDS",
        help="Unload an engine that has had no request for this long, and free its memory. The "
        "next request loads it again, and waits for it (default: never).",
    )
    group.add_argument(
        "--watchdog-secs",
        type=at_least(1),
        default=60.0,
        metavar="SECONDS",
        help="Restart an engine that has not responded for this long.",
    )


def _add_devices(group: ArgumentContainer) -> None:
    group.add_argument(
        "--dtype",
        default=AUTO,
        choices=[AUTO, "bfloat16", "float16", "float32"],
        help="Data type of the computation.",
    )
    group.add_argument(
        "--device", default=AUTO, choices=[AUTO, "cpu", "cuda"], help="Device to run on."
    )
    group.add_argument(
        "--replicas",
        "--data-parallel-size",
        "-dp",
        type=at_least(1, int),
        metavar="N",
        help=f"{REPLICAS_HELP}.",
    )
    group.add_argument(
        *flags("ranks"),
        "-tp",
        dest="ranks",
        type=at_least(1, int),
        metavar="N",
        help=f"{RANKS_HELP}.",
    )
    group.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=at_least(1, int),
        default=1,
        metavar="N",
        help="Run N times as many ranks. There are no pipeline stages: all ranks divide every "
        "layer.",
    )
    group.add_argument(
        "--cluster-key",
        default="",
        metavar="FILE",
        help="File of the key that ranks and replicas on several machines share, with mode 0600 "
        "(default: SLIPSTREAM_CLUSTER_KEY_FILE or SLIPSTREAM_CLUSTER_KEY).",
    )
    group.add_argument(
        "--rank-wait-secs",
        type=at_least(1),
        default=300.0,
        metavar="SECONDS",
        help="Seconds to wait for the processes on other machines at the start.",
    )


def add_weight_only(group: ArgumentContainer, note: str = "") -> None:
    """Add the flag that quantises the weights of a new build."""
    group.add_argument(
        "--weight-only",
        "--quantization",
        "-q",
        choices=WEIGHT_ONLY,
        metavar="TYPE",
        help=f"Build the engine with linear layers of this type: int8, int4 or fp8{note} (default: "
        "the model's own type).",
    )


def _add_capacity(group: ArgumentContainer) -> None:
    group.add_argument(
        *flags("max_rows"),
        dest="max_rows",
        type=at_least(1, int),
        metavar="N",
        help="Run at most this many requests at once, up to 4096 (default: as many as the machine "
        "and the build allow).",
    )
    _add_size(
        group,
        "max_sequence_tokens",
        "Longest sequence, prompt and output together, in tokens (default: the build's, which is "
        "the model's unless it was chosen).",
    )
    _add_size(
        group,
        "step_tokens",
        "Most tokens that one step computes (default: 8192 on a GPU, 512 on a CPU, or the build's "
        "max_num_tokens if that is less).",
    )
    _add_cache(group)
    _add_switch(group, "reuse", "Reuse the KV cache of prompts with the same beginning")
    _add_switch(group, "chunked", "Spread a long prompt over several steps")
    group.add_argument(
        *flags("policy"),
        dest="policy",
        choices=get_args(Policy),
        metavar="POLICY",
        help="guaranteed_no_evict: start a request only if its whole output fits the KV cache; "
        "max_utilization: start it if its prompt fits, and pause requests when the cache is full "
        "(default: guaranteed_no_evict).",
    )


def _add_cache(group: ArgumentContainer) -> None:
    group.add_argument(
        *flags("cache_memory_fraction"),
        dest="cache_memory_fraction",
        type=_fraction,
        metavar="FRACTION",
        help="Share of the GPU memory that the weights leave free for the KV cache, above 0 and up "
        "to 1 (default: 0.9). No effect on a CPU.",
    )
    group.add_argument(
        *flags("gpu_memory_utilization"),
        dest="gpu_memory_utilization",
        type=_fraction,
        metavar="FRACTION",
        help="As in vLLM: share of the whole GPU memory for this server's engine, weights and "
        f"activations included, in place of {flag('cache_memory_fraction')} (default: none). No "
        "effect on a CPU.",
    )
    _add_size(
        group,
        "cache_bytes",
        "Size of the KV cache in bytes, on a GPU or a CPU; K, M, G, T: powers of 1024, k, m, g, t: "
        "powers of 1000 (default: by memory).",
        "BYTES",
    )
    group.add_argument(
        *flags("cache_dtype"),
        dest="cache_dtype",
        choices=get_args(CacheType),
        metavar="TYPE",
        help="Type of cached keys and values. fp8: 8 bits, on GPUs with FP8 instructions; auto: as "
        "the engine was built (default: auto).",
    )


def _add_size(group: ArgumentContainer, setting: str, text: str, metavar: str = "N") -> None:
    group.add_argument(
        *flags(setting), dest=setting, type=_explained(read_size), metavar=metavar, help=text
    )


def _add_switch(group: ArgumentContainer, setting: str, text: str) -> None:
    state = "on" if getattr(EngineSettings, setting) else "off"
    group.add_argument(
        *flags(setting),
        dest=setting,
        action=argparse.BooleanOptionalAction,
        help=f"{text}, or not (default: {state}).",
    )


def _explained(read: Callable[[str], int]) -> Callable[[str], int]:
    """Return a `type=` function whose errors argparse shows."""

    def convert(text: str) -> int:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _fraction(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number <= 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not '{text}'")
    return number


def explain_stages(given: Namespace) -> str:
    """Return what --pipeline-parallel-size does; empty: it was not given."""
    if given.pipeline_parallel_size == 1:
        return ""
    return (
        f"--pipeline-parallel-size {given.pipeline_parallel_size}: there are no pipeline stages; "
        f"each engine runs with {given.pipeline_parallel_size * (given.ranks or 1)} "
        "tensor-parallel ranks"
    )


def all_ranks(given: Namespace) -> int | None:
    """Return the ranks that the command line asks for; None: it does not say."""
    if given.pipeline_parallel_size == 1:
        ranks: int | None = given.ranks
        return ranks
    return int(given.pipeline_parallel_size * (given.ranks or 1))


def engine_overrides(given: Namespace) -> dict[str, Any]:
    """Return the engine settings that the command line gives. Raises UsageError."""
    names = ("dtype", "device", "replicas", "target_itl_ms", "deterministic", *OPTION_NAMES)
    wanted = {name: getattr(given, name) for name in names}
    overrides = {name: value for name, value in wanted.items() if value not in (None, AUTO)}
    if (ranks := all_ranks(given)) is not None:
        overrides["ranks"] = ranks
    if "target_itl_ms" in overrides and overrides.get("chunked") is False:
        raise UsageError(
            "--target-itl-ms needs prompts in chunks: leave out --no-enable-chunked-prefill"
        )
    if {"cache_memory_fraction", "gpu_memory_utilization"} <= overrides.keys():
        raise UsageError(
            f"{flag('gpu_memory_utilization')} is a share of all GPU memory, "
            f"{flag('cache_memory_fraction')} of what the weights leave free: give one of them"
        )
    if overrides.get("device") == "cpu":
        for setting in ("cache_memory_fraction", "gpu_memory_utilization"):
            if setting in overrides:
                raise UsageError(
                    f"{flag(setting)} has no effect on a CPU: use {flag('cache_bytes')}"
                )
    return overrides

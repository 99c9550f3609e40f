"""The files that `slipstream bench` writes, and the facts on its page."""

from __future__ import annotations

import platform
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from slipstream.bench import plots
from slipstream.bench.plots import Run
from slipstream.bench.text_load import LoadLevel
from slipstream.client.connection import Connection, ServerError
from slipstream.engine.memory.cores import usable_cores
from slipstream.kernels.cpu.machine import read_cpu
from slipstream.version import VERSION
from slipstream.weights.whole_file import write_whole


def level_folder(given: Namespace, load: str) -> Path:
    """Return the folder of a level of load, named as genai-perf does."""
    name = "_".join(given.model).replace("/", "_")
    what = given.endpoint_type if given.service_kind == "openai" else given.backend
    folder: Path = given.artifact_dir / f"{name}-{given.service_kind}-{what}-{load}"
    return folder


def write_plots(
    given: Namespace, levels: Sequence[LoadLevel], runs: Sequence[Run], server: str
) -> None:
    """Write a page in the folder of the level, or of several levels, beside their folders.

    server: what the server says about itself
    """
    if len(runs) == 1:
        path = level_folder(given, levels[0].folder_name) / "plots.html"
    else:
        numbers = ",".join(f"{level.value:g}" for level in levels)
        path = level_folder(given, f"{levels[0].mode}{numbers}.html")
    title = f"{', '.join(given.model)} at {given.url}"
    write_whole(path, plots.page(title, load_unit(given), runs, _facts(given, server)))
    print(f"[INFO] Plots: {path}", flush=True)


def load_unit(given: Namespace) -> str:
    return "requests a second" if given.request_rate else "requests in flight"


def describe_server(connection: Connection) -> str:
    """Return name and version of the server, as its metadata say. Empty if it has none."""
    try:
        metadata = connection.metadata()
    except ServerError:
        return ""  # a server of OpenAI's API alone has no such route
    return " ".join(str(metadata[key]) for key in ("name", "version") if metadata.get(key))


def _facts(given: Namespace, server: str) -> list[tuple[str, str]]:
    """Return what a reader of the page must know about the measurement."""
    processor = read_cpu()[0] or platform.machine()
    machine = f"{processor}, {usable_cores():g} cores, {platform.release()}"
    return [
        ("Date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
        ("Server", f"{server or 'no metadata'}, at {given.url}"),
        ("Load generator", f"slipstream bench {VERSION}"),
        ("Load generator's machine", machine),
        ("API", f"{given.endpoint_type}{', streaming' if given.streaming else ''}"),
    ]

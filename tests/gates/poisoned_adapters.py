"""Files of adapters that are damaged: a request for the adapter gets the reason, others go on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
from real_server import RealServer

from gates.site import ADAPTER, start_site, write_site
from gates.table import Row

_FILES = ("adapter_model.safetensors", "adapter_config.json")
_MOST_SECONDS = 2.0
_LONGEST_REASON = 4000


def damage_adapters(folder: Path, damages: Mapping[str, Callable[[bytes], bytes]]) -> list[Row]:
    """Give each damaged file an adapter of its own, and ask one server for all of them."""
    folder.mkdir()
    repository = write_site(folder)
    adapters = folder / "source" / "adapters"
    for place, file in enumerate(_FILES):
        for number, damage in enumerate(damages.values()):
            damaged = adapters / f"damaged-{place}-{number}"
            shutil.copytree(adapters / ADAPTER, damaged)
            content = (damaged / file).read_bytes()
            (damaged / file).write_bytes(damage(content))
    server = start_site(repository, folder / "server", "--exit-timeout-secs=2")
    try:
        server.wait()
        return [_ask(server, place, file, [*damages]) for place, file in enumerate(_FILES)]
    finally:
        server.close()


def _ask(server: RealServer, place: int, file: str, names: list[str]) -> Row:
    served = 0
    slowest = 0.0
    problems = []
    for number, name in enumerate(names):
        begun = time.monotonic()
        status, reason = _complete(server, f"damaged-{place}-{number}")
        seconds = time.monotonic() - begun
        slowest = max(slowest, seconds)
        served += status == 200
        if status == 500 or status not in (200, 400, 404):
            problems.append(f"{name}: status {status} {reason[:200]}")
        elif status != 200 and not 0 < len(reason) <= _LONGEST_REASON:
            problems.append(f"{name}: a reason of {len(reason)} characters")
        elif seconds > _MOST_SECONDS:
            problems.append(f"{name}: {seconds:.1f} s")
        if _complete(server, ADAPTER)[0] != 200:
            problems.append(f"{name}: another adapter does not answer")
    if "Traceback" in server.log():
        problems.append("a traceback")
    text = f"{len(names)} ways: {served} served, slowest {slowest:.1f} s"
    if problems:
        text = f"{text}; {', '.join(problems)}"
    return Row(f"adapters/{file}", text, not problems)


def _complete(server: RealServer, model: str) -> tuple[int, str]:
    body = {"model": model, "prompt": "a", "max_tokens": 2}
    url = f"http://{server.http}/v1/completions"
    answer = httpx.post(url, json=body, timeout=60, trust_env=False)
    error = answer.json().get("error") or {}
    return answer.status_code, str(error.get("message", ""))

"""The engine without a server, at the same batch: `python -m serving.offline ORDER`.

The engine has the settings of the served repository. As in the online load, `concurrency` requests
are in flight until the requests run out. ORDER is a JSON file; each line printed is a JSON object.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from serving.cells import Cell
from serving.load import BENCHMARKS
from serving.servers import ServerOptions
from serving.shapes import Model

_ids = itertools.count(1)


class OfflineEngine:
    def __init__(self, order: dict[str, Any]) -> None:
        from slipstream.engine_worker.process import start_real_engine
        from slipstream.repository.models import read_repository

        engine = read_repository(Path(order["repository"])).engines["tensorrt_llm"]
        settings = replace(engine.settings, device=order["device"], dtype=order["dtype"])
        self._loop: Any = start_real_engine(order["engine"], settings)
        gc.collect()
        gc.freeze()  # as in an engine's process

    def run(self, cell: Cell, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        """Run a load; return its seconds and the tokens of each answer."""
        numbers: dict[int, int] = {}  # request → index of its prompt
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = iter(range(len(prompts)))
        began = time.perf_counter()
        for index in itertools.islice(waiting, cell.concurrency):
            self._submit(cell, prompts, index, numbers)
        while self._loop.has_work():
            outputs = self._loop.step()
            if outputs is None:
                continue
            position = 0
            columns = (outputs.request_ids, outputs.token_counts, outputs.finish_reasons)
            for request, count, reason in zip(*columns, strict=True):
                answers[numbers[request]] += outputs.tokens[position : position + count]
                position += count
                following = next(waiting, None) if reason else None
                if following is not None:
                    self._submit(cell, prompts, following, numbers)
        return time.perf_counter() - began, answers

    def _submit(
        self, cell: Cell, prompts: list[list[int]], index: int, numbers: dict[int, int]
    ) -> None:
        from slipstream.engine.request import GenerateRequest
        from slipstream.engine.sampling_params import SamplingParams

        request_id = next(_ids)
        numbers[request_id] = index
        sampling = SamplingParams(
            max_tokens=cell.output_tokens, seed=cell.seed * 100_000 + index, **cell.sampling
        )
        self._loop.submit(GenerateRequest(request_id, prompts[index], sampling))


def run_offline(
    model: Model,
    repository: Path,
    options: ServerOptions,
    loads: list[tuple[Cell, list[list[int]]]],
    folder: Path,
) -> Iterator[dict[str, Any]]:
    """Yield the seconds and tokens of each load, run one after the other in another process."""
    order = {
        "engine": str(model.engine),
        "repository": str(repository),
        "device": options.device,
        "dtype": model.dtype if model.dtype == "float32" else "auto",
        "loads": [{"cell": asdict(cell), "prompts": prompts} for cell, prompts in loads],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "offline.json"
    path.write_text(json.dumps(order))
    paths = [str(BENCHMARKS), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "serving.offline", str(path)]
    with (folder / "offline.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait():
            text = (folder / "offline.log").read_text(errors="replace")
            raise RuntimeError(f"the offline engine failed: {text[-1000:]}")
    finally:
        process.kill()
        process.wait()


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    engine = OfflineEngine(order)
    for number, load in enumerate(order["loads"]):
        cell = Cell(**load["cell"])
        prompts = load["prompts"]
        if not number:  # the first step of a process is slower
            engine.run(replace(cell, output_tokens=2), [prompts[0][:8]])
        seconds, answers = engine.run(cell, prompts)
        print(json.dumps({"seconds": seconds, "tokens": answers}), flush=True)
    os._exit(0)  # tearing down torch's thread pools takes long and can crash


if __name__ == "__main__":
    main()

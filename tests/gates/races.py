"""Cancel, load, unload, kill, drain and restart in random order, against a model of what must hold."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import httpx
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tiny_server import MODEL, TRITONSERVER, TinyServer, make_repository

from gates.table import Row
from gates.traffic import expected
from slipstream.server.engine_link.client import Supervision

_ENGINE = "tensorrt_llm"
_OPTIONS = (
    "--model-control-mode=explicit",
    "--load-model=*",
    "--http-address=127.0.0.1",
    "--exit-timeout-secs=20",
)
_REFUSED = (400, 404, 503)
_SECONDS = 60.0
_STEP_MS = 5
_MOST_KILLS = Supervision().restarts  # by default a server ends when its engine fails once more


class _Stream:
    """A client that reads a stream in a thread of its own."""

    def __init__(self, url: str, first: int, tokens: int) -> None:
        self._body = {
            "text_input": str(first),
            "max_tokens": tokens,
            "stream": True,
            "seed": _STEP_MS,
        }
        self._url = f"{url}/v2/models/{MODEL}/generate_stream"
        self.whole = expected(first, tokens)
        self.text = ""
        self.error = ""
        self.left = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with (
                httpx.Client(timeout=_SECONDS, trust_env=False) as client,
                client.stream("POST", self._url, json=self._body) as response,
            ):
                if response.status_code != 200:
                    self.error = f"status {response.status_code}"
                for line in response.iter_lines():
                    if self.left.is_set():
                        return
                    if found := re.search(r'"text_output":"([^"]*)"', line):
                        self.text += found[1]
                    elif '"error"' in line:
                        self.error = line
        except httpx.HTTPError as error:
            self.error = repr(error)

    def join(self) -> None:
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive(), "a stream did not end"


class Site:
    """The server that all examples share, and how often each rule has run."""

    def __init__(self, folder: Path) -> None:
        self._repository = make_repository(folder)
        self._temporary = folder / "tmp"
        self.client = httpx.Client(timeout=_SECONDS, trust_env=False)
        self.done: Counter[str] = Counter()
        self.kills = 0  # of this server's engine: a few are allowed
        self.server = self._start()

    def _start(self) -> TinyServer:
        self.server = TinyServer(self._repository, self._temporary, *_OPTIONS, program=TRITONSERVER)
        return self.server.wait_started()

    def describe(self) -> str:
        """Return whether the server runs, and its last lines."""
        code = self.server.process.poll()
        state = "runs" if code is None else f"exit code {code}"
        return f"the server: {state}; {' / '.join(self.server.lines[-3:])}"

    def restart(self) -> int:
        """Stop the server as an operator does. Return its exit code."""
        self.server.process.send_signal(signal.SIGTERM)
        code = self.server.wait_exit()
        self.server = self._start()
        self.kills = 0
        return code

    def revive(self) -> None:
        """Start a server if the one of the last sequence has ended."""
        if self.server.process.poll() is not None:
            self.server = self._start()
            self.kills = 0

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(f"{self.server.url}{path}", json=body)

    def status(self, path: str) -> int:
        return self.client.get(f"{self.server.url}{path}").status_code

    def wait_status(self, path: str, wanted: int) -> None:
        deadline = time.monotonic() + _SECONDS
        while (found := self.status(path)) != wanted:
            assert time.monotonic() < deadline, f"{path} answers {found}, not {wanted}"
            time.sleep(0.02)

    def wait_idle(self) -> None:
        """Wait until the engine runs nothing and all blocks are free."""
        place = f"http://127.0.0.1:{self.server.ports['Metrics Service']}/metrics"
        deadline = time.monotonic() + _SECONDS
        while True:
            metrics = self.client.get(place).text
            counts = re.findall(
                r'^(?:slipstream_requests_running\{|[^\n]*block_type="used")[^\n]*\} (\S+)',
                metrics,
                re.MULTILINE,
            )
            if counts and not any(map(float, counts)):
                return
            assert time.monotonic() < deadline, f"not idle: {counts}"
            time.sleep(0.05)

    def close(self) -> None:
        self.client.close()
        self.server.close()


class Machine(RuleBasedStateMachine):
    site: ClassVar[Site]

    def __init__(self) -> None:
        super().__init__()
        self.site.revive()
        self.streams: list[_Stream] = []
        self.disturbed = False  # since the oldest stream began
        # None: it depends on the other one, and on what was loaded before
        self.loaded: dict[str, bool | None] = {MODEL: True, _ENGINE: True}
        for name in (_ENGINE, MODEL):
            self._load(name)

    def _load(self, name: str) -> None:
        answer = self.site.post(f"/v2/repository/models/{name}/load", {})
        assert answer.status_code == 200, answer.text
        self.loaded[name] = True
        if name == MODEL:
            self.loaded[_ENGINE] = True  # which it needs
        elif self.loaded[MODEL] is False:
            self.loaded[MODEL] = None

    @rule(first=st.integers(1, 500), tokens=st.integers(1, 12))
    def generate(self, first: int, tokens: int) -> None:
        self.site.done["generate"] += 1
        body = {"text_input": str(first), "max_tokens": tokens}
        answer = self.site.post(f"/v2/models/{MODEL}/generate", body)
        if all(self.loaded.values()):
            assert answer.status_code == 200, answer.text
            assert answer.json()["text_output"] == expected(first, tokens)
        elif False in self.loaded.values():
            assert answer.status_code in _REFUSED, answer.text

    @rule(first=st.integers(1, 500), tokens=st.integers(5, 60))
    def begin_stream(self, first: int, tokens: int) -> None:
        self.site.done["begin a stream"] += 1
        self.disturbed = self.disturbed or not all(self.loaded.values())
        self.streams.append(_Stream(self.site.server.url, first, tokens))

    @rule()
    def leave_a_stream(self) -> None:
        if self.streams:
            self.site.done["leave a stream"] += 1
            self.streams.pop().left.set()

    @rule()
    def read_streams(self) -> None:
        for stream in self.streams:
            self.site.done["read a stream"] += 1
            stream.join()
            assert stream.whole.startswith(stream.text), f"{stream.text} of {stream.whole}"
            if not self.disturbed:
                assert (stream.text, stream.error) == (stream.whole, "")
            elif stream.text != stream.whole:
                assert stream.error, f"ended without a reason: {stream.text}"
        self.streams = []
        self.disturbed = False

    @rule(name=st.sampled_from((MODEL, _ENGINE)))
    def unload(self, name: str) -> None:
        self.site.done["unload"] += 1
        self.disturbed = True
        answer = self.site.post(f"/v2/repository/models/{name}/unload", {})
        assert answer.status_code == 200, answer.text
        other = MODEL if name == _ENGINE else _ENGINE
        self.loaded[name] = False
        self.loaded[other] = self.loaded[other] and None

    @rule(name=st.sampled_from((MODEL, _ENGINE)))
    def load(self, name: str) -> None:
        self.site.done["load"] += 1
        self.disturbed = True
        self._load(name)

    @rule()
    def kill_the_engine(self) -> None:
        process = self.site.server.engine_process()
        if not process or self.site.kills >= _MOST_KILLS:
            return
        self.site.kills += 1
        self.site.done["kill the engine"] += 1
        self.disturbed = True
        os.kill(process, signal.SIGKILL)
        deadline = time.monotonic() + _SECONDS
        while self.site.server.engine_process() in (process, 0):
            assert time.monotonic() < deadline, "the engine was not replaced"
            time.sleep(0.02)
        if self.loaded[_ENGINE]:
            self.site.wait_status(f"/v2/models/{_ENGINE}/ready", 200)

    @rule(
        first=st.sampled_from(("load", "unload", "generate", "kill")),
        second=st.sampled_from(("load", "unload", "generate")),
        name=st.sampled_from((MODEL, _ENGINE)),
    )
    def two_at_once(self, first: str, second: str, name: str) -> None:
        """Two operations at the same time. Which comes first is open; then both models are loaded."""
        self.site.done["two at once"] += 1
        self.disturbed = True
        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(self._operate, kind, name) for kind in (first, second)]
            statuses = [one.result(_SECONDS) for one in both]
        assert all(status in (200, *_REFUSED) for status in statuses), statuses
        for model in (_ENGINE, MODEL):
            self._load_after_failure(model)

    def _operate(self, kind: str, name: str) -> int:
        """Return the status of one operation; 200 for a kill."""
        if kind == "generate":
            body = {"text_input": "5", "max_tokens": 3}
            answer = self.site.post(f"/v2/models/{MODEL}/generate", body)
            assert answer.status_code != 200 or answer.json()["text_output"] == "6 7 8"
            return answer.status_code
        if kind != "kill":
            return self.site.post(f"/v2/repository/models/{name}/{kind}", {}).status_code
        process = self.site.server.engine_process()
        if process and self.site.kills < _MOST_KILLS:
            self.site.kills += 1
            with suppress(ProcessLookupError):  # an unload has ended it
                os.kill(process, signal.SIGKILL)
        return 200

    def _load_after_failure(self, name: str) -> None:
        """Load a model. Its engine may have been killed while it was loaded."""
        deadline = time.monotonic() + _SECONDS
        while True:
            answer = self.site.post(f"/v2/repository/models/{name}/load", {})
            if answer.status_code == 200:
                break
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)
        self.loaded[name] = True
        self.site.wait_status(f"/v2/models/{name}/ready", 200)

    @rule(chance=st.integers(0, 3))
    def drain_and_restart(self, chance: int) -> None:
        if chance:  # the others are quicker
            return
        self.site.done["drain and restart"] += 1
        whole = self.disturbed
        assert self.site.restart() == 0, self.site.server.lines[-3:]
        self.loaded = {MODEL: True, _ENGINE: True}
        self.disturbed = True  # a stream may have begun after the signal
        self.read_streams()
        self.disturbed = whole and bool(self.streams)

    @invariant()
    def health_says_what_is_loaded(self) -> None:
        assert self.site.status("/v2/health/live") == 200
        for name, loaded in self.loaded.items():
            if loaded is None:
                continue
            wanted = 200 if loaded else 400
            if loaded:
                self.site.wait_status(f"/v2/models/{name}/ready", wanted)
            assert self.site.status(f"/v2/models/{name}/ready") == wanted, name

    def teardown(self) -> None:
        for name in (_ENGINE, MODEL):
            self._load(name)
        self.disturbed = True
        self.read_streams()
        self.site.wait_idle()


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    await asyncio.to_thread(_run, folder, long, rows)


def _run(folder: Path, long: bool, rows: list[Row]) -> None:
    site = Site(folder)
    try:
        for number in range(3 if long else 1):
            rows.append(_try_seed(site, number, 12 if long else 4, 20 if long else 12))
        tracebacks = sum("Traceback" in line for line in site.server.lines)
    finally:
        site.close()
    kinds = ", ".join(f"{count} × {name}" for name, count in sorted(site.done.items()))
    rows.append(Row("what was done", f"{kinds}; {tracebacks} tracebacks", not tracebacks))


def _try_seed(site: Site, number: int, examples: int, steps: int) -> Row:
    """Run examples without shrinking: the seed finds a failure again."""
    found = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    problem = ""
    try:
        run_state_machine_as_test(
            seed(number)(type("Machine", (Machine,), {"site": site})), settings=found
        )
    except Exception as error:
        # a failure that does not come again has the first one inside
        first = next(iter(getattr(error, "exceptions", ())), error)
        steps_taken = " / ".join(getattr(error, "__notes__", []))
        problem = f": {type(first).__name__}: {first}; {site.describe()}; {steps_taken}"
        problem = problem.replace("\n", " ").replace("|", "/")[:1200]
    return Row(
        f"seed {number}", f"{examples} sequences of up to {steps} steps{problem}", not problem
    )

"""A deployment of Ray Serve on two nodes on this machine: streams, scales, drains and is repaired.

python -m venv VENV && VENV/bin/pip install -e '.[ray,test]'
VENV/bin/pytest -m cluster tests/deploy/test_ray.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import tiny_engine
import yaml
from free_ports import free_ports
from manifests import DEPLOY, ROOT
from real_server import limit_cache
from tiny_server import children_of, is_running, parent_of, wait_for

from slipstream.repository.templates import write_repository

ray = pytest.importorskip("ray", reason="Ray is not installed")
serve = pytest.importorskip("ray.serve", reason="Ray is not installed")

pytestmark = pytest.mark.cluster

ROWS = 4  # requests that an engine runs at once
TOKENS = 1500  # of a long answer: a few seconds
# of answers that Ray waits for at a deletion, for 60 seconds at most, also on a busy machine
LAST_TOKENS = 500
NAME = "slipstream"
SERVER = "slipstream.ray.server_process"
# 95 is the id of no token in the answers, so they have all tokens
BODY = {"text_input": "5 6 7", "end_id": 95}


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_engine, "POSITIONS", 4096)
        patch.setattr(tiny_engine, "LAYERS", 8)
        engine = tiny_engine.build_tiny_engine(folder)
    write_repository(folder / "repository", "tiny", engine, engine, ROWS)
    limit_cache(folder / "repository", 4096 * (ROWS + 1))
    with (folder / "repository" / "tensorrt_llm" / "config.pbtxt").open("a") as config:
        for name, value in (("max_num_sequences", ROWS), ("deterministic", "true")):
            config.write(f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n')
    return folder / "repository"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start two nodes; return their address."""
    from ray.cluster_utils import Cluster

    place = Path("/tmp") / f"ray-{os.getpid()}"  # paths of sockets are short
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(place))
        patch.setenv("RAY_TMPDIR", str(place))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
        try:
            started.add_node(num_cpus=3)
            ray.init(address=started.address, namespace="serve", log_to_driver=False)
            yield started.address
        finally:
            ray.shutdown()
            started.shutdown()
            shutil.rmtree(place, ignore_errors=True)


class Site:
    """The application of deploy/ray/serve.yaml, with values of this machine."""

    def __init__(self, address: str, repository: Path, folder: Path, **arguments: object) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        settings = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())
        settings["proxy_location"] = "HeadOnly"  # two nodes have one address here
        settings["http_options"] = {"host": "127.0.0.1", "port": port}
        settings["applications"][0]["args"] |= {
            "repository": str(repository),
            "gpus": 0,
            "max_replicas": 2,
            "upscale_delay_secs": 1,
            "downscale_delay_secs": 1,
            "flags": "--http-metrics=true",
            **arguments,
        }
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(settings))
        program = str(Path(sys.executable).parent / "serve")
        subprocess.run(
            [program, "run", "--non-blocking", "--address", address, str(path)], check=True
        )
        wait_for(self.ready, 180)

    def ready(self) -> bool:
        found = serve.status().applications[NAME]
        assert found.status != "DEPLOY_FAILED", (found.message, found.deployments)
        try:
            return httpx.get(f"{self.url}/v2/health/ready", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def replicas(self) -> int:
        """Return the number of replicas that run, with those that start or stop."""
        states = serve_status().replica_states
        return sum(states.values())

    def generate(self, tokens: int) -> list[str]:
        body = BODY | {"max_tokens": tokens}
        found = httpx.post(f"{self.url}/v2/models/tiny/generate", json=body, timeout=120)
        assert found.status_code == 200, found.text
        words: list[str] = found.json()["text_output"].split()
        return words

    def stream(self, tokens: int) -> list[str]:
        """Return the pieces of a streamed answer."""
        body = BODY | {"max_tokens": tokens, "stream": True}
        url = f"{self.url}/v2/models/tiny/generate_stream"
        with httpx.stream("POST", url, json=body, timeout=120) as found:
            assert found.status_code == 200
            assert found.headers["content-type"].startswith("text/event-stream")
            return [text_of(line) for line in found.iter_lines() if line.startswith("data: ")]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        (value,) = (line.split()[-1] for line in text.splitlines() if line.startswith(f"{name}{{"))
        return float(value)


def text_of(line: str) -> str:
    text: str = json.loads(line.removeprefix("data: "))["text_output"]
    return text


def serve_status():
    return serve.status().applications[NAME].deployments[NAME]


def servers() -> dict[int, int]:
    """Return the servers of all replicas: the process, and that of its node."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if SERVER.encode() in path.read_bytes().split(b"\0"):
                server = int(path.parent.name)
                found[server] = parent_of(parent_of(server))  # of the actor
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def site(cluster, repository, tmp_path_factory):
    return Site(cluster, repository, tmp_path_factory.mktemp("site"))


def test_tokens_are_streamed(site):
    expected = site.generate(64)
    assert len(expected) == 64
    pieces = site.stream(64)
    assert "".join(pieces).split() == expected
    assert len(pieces) > 8


def test_a_token_arrives_before_the_answer_ends(site):
    body = BODY | {"max_tokens": TOKENS, "stream": True}
    url = f"{site.url}/v2/models/tiny/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=120) as found:
        lines = found.iter_lines()  # its end would close the connection
        assert text_of(next(lines)).strip()
        wait_for(lambda: site.metric("slipstream_requests_running") == 1)
    # the client has left
    wait_for(lambda: site.metric("slipstream_requests_running") == 0)
    assert site.metric("slipstream_requests_cancelled_total") == 1


def test_the_routes_of_the_server_are_there(site):
    models = httpx.get(f"{site.url}/v1/models", timeout=30)
    assert "tiny" in [model["id"] for model in models.json()["data"]]
    request = {"model": "tiny", "prompt": "5 6 7", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{site.url}/v1/completions", json=request, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 4
    stats = httpx.get(f"{site.url}/v2/models/tiny/stats?x=%20", timeout=30).json()
    assert stats["model_stats"][0]["name"] == "tiny"
    unknown = httpx.get(f"{site.url}/v2/models/other", timeout=30)
    assert unknown.status_code == 404
    assert "'other'" in unknown.json()["error"]
    wrong = httpx.post(f"{site.url}/v2/models/tiny/generate", content=b"{", timeout=30)
    assert wrong.status_code == 500  # as Triton
    assert "failed to parse the request JSON buffer" in wrong.json()["error"]
    assert "<html" in httpx.get(f"{site.url}/docs", timeout=30).text


class Load:
    """Streams that follow each other until the load is stopped, with what went wrong."""

    def __init__(self, site: Site, clients: int, expected: list[str]) -> None:
        self._site = site
        self._expected = expected
        self._stopping = threading.Event()
        self.problems: list[object] = []
        self.answers = 0
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                found = "".join(self._site.stream(TOKENS)).split()
            except (httpx.HTTPError, AssertionError) as error:
                self.problems.append(repr(error))
                return
            self.answers += 1
            if found != self._expected:
                self.problems.append(f"{len(found)} tokens")

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)


def test_replicas_follow_the_load_and_no_stream_is_cut(site):
    """0.8 × 4 rows are the target: six streams need two replicas, one stream needs one."""
    expected = site.generate(TOKENS)
    assert len(expected) == TOKENS
    assert site.replicas() == 1
    with Load(site, 6, expected) as heavy:
        wait_for(lambda: len(servers()) == 2, 120)
        assert len(set(servers().values())) == 2  # a node has no room for two
        wait_for(lambda: serve_status().replica_states.get("RUNNING") == 2, 120)
    with Load(site, 1, expected) as light:
        wait_for(lambda: len(servers()) == 1, 180)
    assert heavy.problems + light.problems == []
    assert heavy.answers >= 6
    assert light.answers >= 1
    wait_for(lambda: site.replicas() == 1, 60)


@pytest.mark.parametrize("of_the_actor", [False, True])
def test_a_killed_replica_is_replaced(site, of_the_actor):
    """The server is killed, or the actor that runs it."""
    wait_for(lambda: len(servers()) == 1, 60)
    (server,) = servers()
    engines = children_of(server)
    os.kill(parent_of(server) if of_the_actor else server, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, [server, *engines])), 30)

    def replaced() -> bool:
        return len(servers()) == 1 and server not in servers() and site.ready()

    wait_for(replaced, 180)
    assert len(site.generate(8)) == 8


def test_wrong_arguments_are_refused(repository):
    from slipstream.ray.serve import Arguments, app

    with pytest.raises(ValueError, match=r"flags: unknown flag --nope"):
        app(Arguments(repository="/models", flags="--nope=1"))
    with pytest.raises(ValueError, match="repo"):
        Arguments.model_validate({"repo": "/models"})


def test_a_deployment_that_is_deleted_finishes_its_streams_and_leaves_nothing(site):
    expected = site.generate(LAST_TOKENS)
    answers: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(site.stream(LAST_TOKENS)))
        for _ in range(ROWS)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: site.metric("slipstream_requests_running") == ROWS)
    serve.delete(NAME)
    for thread in threads:
        thread.join(120)
    assert ["".join(pieces).split() for pieces in answers] == [expected] * ROWS
    wait_for(lambda: not servers(), 120)

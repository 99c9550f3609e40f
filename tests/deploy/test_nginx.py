"""Two servers behind nginx with the settings of deploy/nginx are restarted without a failed request.

apt-get install nginx
pytest -m cluster tests/deploy/test_nginx.py
"""

from __future__ import annotations

import json
import shutil
import threading

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from front_ends import open_stream, token_inputs
from nginx_site import BODY, CLIENTS, EXPECTED, Load, Site
from tiny_server import MODEL, wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    yield site
    site.close()


def test_both_servers_are_restarted_without_a_failed_request(site):
    load = Load(site.url)
    wait_for(lambda: load.answers >= 2 * CLIENTS)
    for address in site.servers:
        assert site.restart(address) == 0
        before = load.answers
        wait_for(lambda before=before: load.answers >= before + 4 * CLIENTS)
    load.stop()
    assert load.problems == []
    assert load.answers > 10 * CLIENTS
    # both servers have answered
    for server in site.servers.values():
        metrics = httpx.get(f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics").text
        assert f'nv_inference_request_success{{model="{MODEL}",version="1"}} 0' not in metrics


def test_tokens_pass_nginx_as_they_come(site):
    """The second token takes a second: a proxy that collects pieces would hold the first one back."""
    body = {"text_input": "5", "max_tokens": 3, "random_seed": 1000, "stream": True}
    url = f"{site.url}/v2/models/{MODEL}/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60) as found:
        lines = found.iter_lines()
        assert json.loads(next(lines)[6:])["text_output"].strip() == "6"
        busy = [httpx.get(f"{server.url}/load").json() for server in site.servers.values()]
        assert {"server_load": 1} in busy  # the answer is not complete


def test_a_grpc_stream_passes_nginx(site):
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{site.grpc}")
    with open_stream(client) as results:
        inputs = token_inputs([5], 3, streaming=np.array([[True]]))
        client.async_stream_infer("tensorrt_llm", inputs)
        tokens: list[int] = []
        while len(tokens) < 3:  # a result may have several
            result, error = results.get(timeout=30)
            assert error is None
            tokens += result.as_numpy("output_ids").ravel().tolist()
    client.close()
    assert tokens == [6, 7, 8]


def test_a_server_that_is_killed_costs_no_request_that_had_no_answer(site):
    """Requests without a byte of an answer go to the other server."""
    url = f"{site.url}/v2/models/{MODEL}/generate"
    slow = BODY | {"random_seed": 100}
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(httpx.post(url, json=slow, timeout=60)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    first = site.servers["10.0.0.1"]
    wait_for(lambda: httpx.get(f"{first.url}/load").json() == {"server_load": 2})
    first.process.kill()
    for thread in threads:
        thread.join(60)
    assert [one.status_code for one in answers] == [200] * 4
    assert {one.json()["text_output"].strip() for one in answers} == {EXPECTED}

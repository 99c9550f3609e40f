"""Prometheus reads the rules and the configuration of deploy/, and the rules give what they say.

apt-get install prometheus
pytest -m cluster tests/deploy/test_prometheus.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from contextlib import contextmanager

import httpx
import pytest
import yaml
from free_ports import free_ports
from manifests import DEPLOY, ROOT, manifest
from real_server import RealServer, limit_cache
from tiny_hf_folder import save_model
from tiny_server import MODEL, TinyServer, make_repository, wait_for

from slipstream.cli.commands import run_command

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed"),
]

SETTINGS = DEPLOY / "compose" / "prometheus.yml"
DASHBOARD = ROOT / "slipstream" / "server" / "metrics" / "grafana.json"
# two pods: the first computes and has waiting requests, the second is idle
SERIES = {
    'nv_inference_queue_duration_us{namespace="n",pod="a",model="m"}': "0+30000000x10",
    'nv_inference_queue_duration_us{namespace="n",pod="b",model="m"}': "0+0x10",
    'nv_inference_compute_infer_duration_us{namespace="n",pod="a",model="m"}': "0+60000000x10",
    'nv_inference_compute_infer_duration_us{namespace="n",pod="b",model="m"}': "0+0x10",
    'nv_inference_request_duration_us{namespace="n",pod="a",model="m"}': "0+90000000x10",
    'nv_inference_request_duration_us{namespace="n",pod="b",model="m"}': "0+0x10",
    'nv_inference_request_success{namespace="n",pod="a",model="m"}': "0+30x10",
    'nv_inference_request_success{namespace="n",pod="b",model="m"}': "0+0x10",
    'nv_trt_llm_request_metrics{namespace="n",pod="a",model="m",request_type="waiting"}': "6x10",
    'nv_trt_llm_request_metrics{namespace="n",pod="b",model="m",request_type="waiting"}': "0x10",
    'nv_trt_llm_request_metrics{namespace="n",pod="a",model="m",request_type="active"}': "70x10",
    'nv_trt_llm_request_metrics{namespace="n",pod="b",model="m",request_type="active"}': "0x10",
    'nv_trt_llm_request_metrics{namespace="n",pod="a",model="m",request_type="max"}': "64x10",
    'nv_trt_llm_request_metrics{namespace="n",pod="b",model="m",request_type="max"}': "64x10",
}
RECORDED = {
    "triton:queue_compute:ratio": {'{namespace="n",pod="a"}': 0.5, '{namespace="n",pod="b"}': 0},
    # microseconds; an idle pod has none
    "triton:request_duration:average": {'{namespace="n",pod="a",model="m"}': 3_000_000},
    "slipstream:requests_waiting:sum": {'{namespace="n",pod="a"}': 6, '{namespace="n",pod="b"}': 0},
    "slipstream:requests_occupancy:ratio": {
        '{namespace="n",pod="a"}': 70 / 64,
        '{namespace="n",pod="b"}': 0,
    },
}


def promtool(*words):
    return subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True)


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(manifest("PrometheusRule", "slipstream")["spec"]))
    return path


def test_promtool_accepts_the_rules_and_the_configuration(rules, tmp_path):
    checked = promtool("check", "rules", rules)
    assert (checked.returncode, "4 rules found" in checked.stdout) == (0, True), checked
    assert promtool("check", "config", SETTINGS).returncode == 0
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(rules.read_text().replace("sum by", "summ by", 1))
    assert promtool("check", "rules", wrong).returncode != 0


def test_the_rules_record_what_they_say(rules, tmp_path):
    expected = [
        {
            "expr": name,
            "eval_time": "8m",
            "exp_samples": [
                {"labels": f"{name}{labels}", "value": value} for labels, value in values.items()
            ],
        }
        for name, values in RECORDED.items()
    ]
    test = {
        "rule_files": [str(rules)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in SERIES.items()
                ],
                "promql_expr_test": expected,
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test))
    found = promtool("test", "rules", path)
    assert found.returncode == 0, found.stdout + found.stderr


@contextmanager
def scraping(metrics, rules, folder):
    """Run Prometheus with the settings of compose for a server's metrics port. Yields its address."""
    settings = yaml.safe_load(SETTINGS.read_text())
    settings["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(rules)]
    settings["scrape_configs"][0]["static_configs"] = [
        {
            "targets": [metrics],
            "labels": {"namespace": "n", "pod": "a"},  # as a PodMonitor adds them
        }
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ,
    )
    try:
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def prometheus(rules, tmp_path):
    """Return a server, and the address of a Prometheus that scrapes it."""
    server = TinyServer(make_repository(tmp_path), tmp_path / "tmp").wait_started()
    with scraping(f"127.0.0.1:{server.ports['Metrics Service']}", rules, tmp_path) as address:
        yield server, address
    server.close()


def query(address, expression):
    """Return the values of an expression; none while Prometheus starts."""
    try:
        found = httpx.get(f"{address}/api/v1/query", params={"query": expression})
    except httpx.TransportError:
        return []
    if found.status_code == 503:
        return []
    assert found.status_code == 200, found.text
    return [float(one["value"][1]) for one in found.json()["data"]["result"]]


def dashboard_expressions(model=".*", engine=".*", interval="1m"):
    """Yield the queries of the dashboard with a value for each of its variables."""
    document = json.loads(DASHBOARD.read_text("utf-8"))
    for panel in document["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", interval)
            yield text.replace("$model", model).replace("$engine", engine)


def label_values(address, series, label):
    """Return what Grafana offers for `label_values(series, label)`."""
    params = {"match[]": series}
    found = httpx.get(f"{address}/api/v1/label/{label}/values", params=params)
    return found.json()["data"] if found.status_code == 200 else []  # it starts


def test_prometheus_records_the_rules_and_answers_the_dashboard(prometheus):
    server, address = prometheus
    body = {"text_input": "5", "max_tokens": 3}

    def ask() -> bool:
        url = f"{server.url}/v2/models/{MODEL}/generate"
        httpx.post(url, json=body).raise_for_status()
        return bool(query(address, "triton:request_duration:average > 0"))

    wait_for(ask, 60)
    assert query(address, 'up{job="slipstream"}') == [1]
    for name in RECORDED:
        assert query(address, name), name
    assert query(address, "slipstream:requests_waiting:sum") == [0]
    expressions = list(dashboard_expressions())
    assert len(expressions) > 30
    for expression in expressions:
        query(address, expression)  # Prometheus refuses an expression that is wrong


@pytest.fixture
def two_models(tmp_path):
    """A server with two imported models, each with an engine of its own."""
    repository = tmp_path / "repository"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
        for name, size in (("first", 16), ("second", 32)):
            save_model(tmp_path / name, hidden_size=size)
            words = ["-m", name, "-s", str(tmp_path / name), "--repo", str(repository)]
            assert run_command("import", [*words, "--dtype", "float32"]) == 0
    limit_cache(repository)
    server = RealServer(repository, tmp_path)
    yield server.wait(120)
    server.close()


def test_every_choice_of_the_filters_has_data(two_models, rules, tmp_path):
    """Each query but those of GPUs returns data for All, and for each model that has requests."""
    ended = threading.Event()

    def load(model):
        url = f"http://{two_models.http}/v2/models/{model}/generate"
        while not ended.wait(0.05):
            body = {"text_input": "Once upon a time", "max_tokens": 6}
            httpx.post(url, json=body, timeout=60).raise_for_status()

    models = ("first", "second")
    threads = [threading.Thread(target=load, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    try:
        with scraping(
            two_models.metrics.replace("localhost", "127.0.0.1"), rules, tmp_path
        ) as address:
            wait_for(lambda: missing(address, "first") == [], 90)
            found = {model: missing(address, model) for model in models}
            assert found == {model: [] for model in models}
            every = ".*"
            assert missing(address, every) == []
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def missing(address, model):
    """Return the queries without data if this model is chosen, as Grafana fills in the variables."""
    try:
        engines = label_values(address, f'slipstream_model_info{{model=~"{model}"}}', "engine")
    except httpx.TransportError:
        return ["Prometheus does not answer yet"]
    if not engines:
        return ["no engine of the model"]
    expressions = dashboard_expressions(model, "|".join(engines), "20s")
    return [
        expression
        for expression in expressions
        if "nv_gpu_" not in expression and not query(address, expression)
    ]

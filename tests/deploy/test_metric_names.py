"""Rules and autoscalers of deploy/ name metrics that a server has."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from manifests import DEPLOY, ROOT, documents, manifest
from tiny_server import MODEL, TinyServer, make_repository

# what a selector of PromQL is here: a name, perhaps with equal labels
SELECTOR = re.compile(r"\b((?:nv|slipstream)_\w+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Return (name, labels) of everything that a server reports after a request."""
    folder = tmp_path_factory.mktemp("metrics")
    server = TinyServer(make_repository(folder), folder / "tmp").wait_started()
    body = {"text_input": "5", "max_tokens": 2}
    httpx.post(f"{server.url}/v2/models/{MODEL}/generate", json=body).raise_for_status()
    place = f"http://127.0.0.1:{server.ports['Metrics Service']}"
    text = httpx.get(f"{place}/metrics").text
    server.close()
    return [read_sample(line) for line in text.splitlines() if not line.startswith("#")]


def read_sample(line):
    """Return the name and the labels of a line such as `name{model="m"} 1`."""
    return line.partition("{")[0].split()[0], read_labels(line)


def read_labels(text):
    return dict(re.findall(r'(\w+)="([^"]*)"', text))


def rules():
    (group,) = manifest("PrometheusRule", "slipstream")["spec"]["groups"]
    return {rule["record"]: rule["expr"] for rule in group["rules"]}


def selectors(expression):
    """Return (name, labels) of each selector of an expression."""
    return [(name, read_labels(labels)) for name, labels in SELECTOR.findall(expression)]


def missing(expression, samples):
    """Return the selectors of an expression that select nothing."""
    return [
        (name, wanted)
        for name, wanted in selectors(expression)
        if not any(name == found and wanted.items() <= labels.items() for found, labels in samples)
    ]


def test_the_rules_are_upstreams_and_those_of_the_autoscaler():
    assert list(rules()) == [
        "triton:queue_compute:ratio",
        "triton:request_duration:average",
        "slipstream:requests_waiting:sum",
        "slipstream:requests_occupancy:ratio",
    ]


@pytest.mark.parametrize("record", list(rules()))
def test_every_metric_of_a_rule_exists(record, samples):
    expression = rules()[record]
    assert selectors(expression)
    assert missing(expression, samples) == []


@pytest.mark.parametrize(
    "expression",
    ["sum(nv_inference_queue_us)", 'sum(nv_trt_llm_request_metrics{request_type="queued"})'],
)
def test_a_metric_that_does_not_exist_is_found(expression, samples):
    assert len(missing(expression, samples)) == 1


def test_the_autoscaler_reads_what_the_rules_record():
    metrics = manifest("HorizontalPodAutoscaler", "slipstream")["spec"]["metrics"]
    assert [metric["type"] for metric in metrics] == ["Pods", "Pods"]
    names = [metric["pods"]["metric"]["name"] for metric in metrics]
    assert set(names) <= rules().keys()
    for name in names:  # the adapter finds the pod of a series by these labels
        assert "by (namespace, pod)" in rules()[name]


def test_the_monitor_and_compose_scrape_the_metrics_port():
    (endpoint,) = manifest("PodMonitor", "slipstream")["spec"]["podMetricsEndpoints"]
    (container,) = manifest("Deployment", "slipstream")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (ports[endpoint["port"]], endpoint["path"]) == (8002, "/metrics")
    (settings,) = documents(DEPLOY / "compose" / "prometheus.yml")
    (job,) = settings["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8002"]}]


def test_compose_provisions_the_dashboard_of_the_package():
    (compose,) = documents(DEPLOY / "compose" / "compose.yaml")
    mounts = dict(
        mount.removesuffix(":ro").split(":") for mount in compose["services"]["grafana"]["volumes"]
    )
    source = ROOT / "slipstream" / "server" / "metrics" / "grafana.json"
    (place,) = (
        target
        for path, target in mounts.items()
        if path.startswith(".") and (DEPLOY / "compose" / path).resolve() == source
    )
    (provider,) = documents(DEPLOY / "compose" / "grafana" / "dashboards" / "slipstream.yaml")
    assert provider["providers"][0]["options"]["path"] == place.rpartition("/")[0]
    # it asks for any data source of this type
    (sources,) = documents(DEPLOY / "compose" / "grafana" / "datasources" / "prometheus.yaml")
    (variable,) = (
        one
        for one in json.loads(source.read_text("utf-8"))["templating"]["list"]
        if one["type"] == "datasource"
    )
    assert variable["query"] == sources["datasources"][0]["type"]

"""The manifests of deploy/kubernetes: their schemas, and the names that they have in common."""

from __future__ import annotations

import copy
import shutil
import subprocess

import pytest
import yaml
from manifests import (
    KUBERNETES,
    all_documents,
    documents,
    find_problems,
    kustomizations,
    manifest,
    manifest_files,
    pod_templates,
)

FILES = manifest_files()
NAMES = [path.relative_to(KUBERNETES).as_posix() for path in FILES]
WORKLOADS = ("Deployment", "Job", "LeaderWorkerSet", "ServingRuntime")


def containers():
    """Return (name of the manifest, pod spec, container) of everything that runs."""
    return [
        (document["metadata"]["name"], template["spec"], container)
        for document in all_documents()
        for template in pod_templates(document)
        for container in template["spec"]["containers"]
    ]


def test_every_kind_of_workload_is_found():
    kinds = [document["kind"] for document in all_documents()]
    assert sorted(kind for kind in kinds if kind in WORKLOADS) == sorted(WORKLOADS)
    assert len(containers()) == 5  # a LeaderWorkerSet has two


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_fits_its_schema(name):
    for document in documents(KUBERNETES / name):
        assert find_problems(document) == []


def misspelled(part, path=()):
    """Yield copies of a document, each with one field name that has a letter too many."""
    if isinstance(part, list):
        part = dict(enumerate(part))
    if not isinstance(part, dict):
        return
    for name, value in part.items():
        if isinstance(name, str):
            yield (*path, name)
        yield from misspelled(value, (*path, name))


def with_typo(document, path):
    changed = copy.deepcopy(document)
    part = changed
    for name in path[:-1]:
        part = part[name]
    part[f"{path[-1]}x"] = part.pop(path[-1])
    return changed


# Fields whose members are names of the user: any name is right there.
FREE = {
    "labels", "annotations", "matchLabels", "requests", "limits", "metadata", "selector",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_misspelled_field_is_found(name):
    tried = set()  # each name once: checks take a hundredth of a second
    for document in documents(KUBERNETES / name):
        for path in misspelled(document["spec"], ("spec",)):
            if FREE.isdisjoint(path[:-1]) and path[-1] not in tried:
                tried.add(path[-1])
                assert find_problems(with_typo(document, path)) != [], path
    assert len(tried) >= 2


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("Deployment", "slipstream", ("spec", "strategy", "rollingUpdate"), "fast"),
        ("PodDisruptionBudget", "slipstream", ("spec", "maxUnavailable"), [1]),
        ("LeaderWorkerSet", "slipstream-ranks", ("spec", "leaderWorkerTemplate", "size"), "2"),
        ("LeaderWorkerSet", "slipstream-ranks", ("spec", "startupPolicy"), "LeaderFirst"),
        (
            "LeaderWorkerSet",
            "slipstream-ranks",
            ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "tolerations"),
            {"operator": "Exists"},
        ),
        ("ServingRuntime", "slipstream", ("spec", "protocolVersions"), ["v3"]),
        ("InferenceService", "llm", ("spec", "predictor", "timeout"), "600s"),
        ("PodMonitor", "slipstream", ("spec", "podMetricsEndpoints"), [{"interval": "often"}]),
        ("PrometheusRule", "slipstream", ("spec", "groups"), [{"rules": []}]),
    ],
)
def test_a_wrong_value_is_found(kind, name, path, value):
    document = copy.deepcopy(manifest(kind, name))
    part = document
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    assert find_problems(document) != []


def test_an_unknown_kind_is_found():
    assert find_problems({"apiVersion": "v1", "kind": "Podd", "metadata": {}}) != []


@pytest.mark.parametrize("path", kustomizations(), ids=lambda path: path.parent.name)
def test_a_kustomization_lists_the_files_of_its_folder(path):
    document = yaml.safe_load(path.read_text("utf-8"))
    allowed = {"apiVersion", "kind", "namespace", "resources", "components", "patches"}
    assert set(document) <= allowed | {"images", "replicas"}
    listed = [path.parent / name for name in document["resources"] + document.get("components", [])]
    assert [place for place in listed if not place.exists()] == []
    own = {found.name for found in path.parent.glob("*.yaml")} - {path.name}
    assert own <= set(document["resources"])
    images = document.get("images", [])
    assert [image["name"] for image in images] == ["slipstream"] * len(images)


def test_what_runs_is_confined():
    for name, spec, container in containers():
        security = spec.get("securityContext", {}) | container["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] == 10001, name
        assert security["readOnlyRootFilesystem"] is True, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"] == {"drop": ["ALL"]}, name
    predictor = manifest("InferenceService", "llm")["spec"]["predictor"]
    specs = [predictor] + [
        template["spec"]
        for document in all_documents()
        if document["kind"] != "ServingRuntime"
        for template in pod_templates(document)
    ]
    assert [spec["automountServiceAccountToken"] for spec in specs] == [False] * 5


def exit_timeout(container) -> int:
    (flag,) = (arg for arg in container["args"] if arg.startswith("--exit-timeout-secs="))
    return int(flag.partition("=")[2])


def test_the_grace_period_is_30_seconds_longer_than_the_exit_timeout():
    predictor = manifest("InferenceService", "llm")["spec"]["predictor"]
    checked = 0
    for _, spec, container in containers():
        if container["command"] == ["tritonserver"]:
            grace = spec.get("terminationGracePeriodSeconds")
            if container["name"] == "kserve-container":
                grace = predictor["terminationGracePeriodSeconds"]
            assert grace == exit_timeout(container) + 30
            checked += 1
    assert checked == 4


def test_mounts_ports_and_probes_name_what_exists():
    for name, spec, container in containers():
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes, name
        ports = container.get("ports", [])
        known = {port.get("name") for port in ports} | {port["containerPort"] for port in ports}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in known, name


def test_leader_and_workers_run_the_same_command():
    leader, worker = pod_templates(manifest("LeaderWorkerSet", "slipstream-ranks"))
    (of_leader,) = leader["spec"]["containers"]
    (of_worker,) = worker["spec"]["containers"]
    for field in ("command", "args", "env", "image", "volumeMounts", "resources"):
        assert of_leader[field] == of_worker[field], field
    # a worker answers this probe only, on the HTTP port
    assert of_worker["livenessProbe"]["httpGet"] == {"path": "/v2/health/live", "port": "http"}
    assert of_worker.keys().isdisjoint({"readinessProbe", "startupProbe"})
    size = manifest("LeaderWorkerSet", "slipstream-ranks")["spec"]["leaderWorkerTemplate"]["size"]
    gpus = int(of_leader["resources"]["limits"]["nvidia.com/gpu"])
    assert f"--ranks={size * gpus}" in of_leader["args"]


def test_selectors_find_the_pods_of_the_deployment():
    labels = manifest("Deployment", "slipstream")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Service", "slipstream")["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert manifest(kind, "slipstream")["spec"]["selector"] == {"matchLabels": labels}
    target = manifest("HorizontalPodAutoscaler", "slipstream")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "slipstream")


@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize(
    "name", ["overlays/cpu", "overlays/gpu", "import", "leader-worker-set", "kserve"]
)
def test_kubectl_builds_manifests_that_fit_their_schemas(name):
    built = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES / name], capture_output=True, text=True, check=True
    )
    found = list(yaml.safe_load_all(built.stdout))
    assert len(found) >= 2
    for document in found:
        assert find_problems(document) == []
        assert document["metadata"]["namespace"] == "slipstream"
        for template in pod_templates(document):
            images = [container["image"] for container in template["spec"]["containers"]]
            assert images == ["slipstream:0.1.0"]

"""The pods of deploy/kubernetes run: their commands, probes, volumes and users, without a cluster.

pytest -m cluster tests/deploy/test_pods.py   # as root
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from manifests import manifest, pod_templates
from pods import Pod, connect, reason_to_skip
from real_server import limit_cache
from tiny_engine import build_tiny_engine
from tiny_server import wait_for

from slipstream.repository.templates import write_repository

pytestmark = pytest.mark.cluster

KEY = "key-of-the-test"
SECRETS = {
    "slipstream-keys": {"api-key": KEY},
    "slipstream-cluster": {"cluster-key": "0123456789abcdef"},
}
GENERATE = "/v2/models/tiny/generate"
BODY = {"text_input": "5 6 7", "max_tokens": 8, "end_id": 95}


@pytest.fixture(scope="module", autouse=True)
def allowed():
    if reason := reason_to_skip():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Return a volume as the import job of deploy/kubernetes/import fills it, readable for all."""
    folder = tmp_path_factory.mktemp("volume")
    engine = build_tiny_engine(folder / "built")
    shutil.copytree(engine, folder / "engines" / "tiny")
    place = Path("/models/engines/tiny")  # where the volume is in a container
    write_repository(folder / "repository", "tiny", place, place, 64)
    limit_cache(folder / "repository", 4096)
    # What KServe copies to another place: the engine is in its model's version folder, and no file names
    # a path.
    shutil.copytree(folder / "repository", folder / "kserve")
    shutil.copytree(engine, folder / "kserve" / "tensorrt_llm" / "1", dirs_exist_ok=True)
    for config in (folder / "kserve").glob("*/config.pbtxt"):
        config.write_text(config.read_text().replace(str(place), ""))
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture
def start(tmp_path):
    running = []

    def start_pod(template, **settings):
        running.append(Pod(template, tmp_path / str(len(running)), secrets=SECRETS, **settings))
        return running[-1]

    yield start_pod
    for pod in running:
        pod.close()


def check_confinement(pod) -> None:
    status = pod.status()
    assert status["Uid"].split() == ["10001"] * 4
    assert status["NoNewPrivs"] == "1"
    assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {"0" * 16}
    assert status["NSpid"].split()[-1] == "1"  # signals reach the server, no shell
    assert [path for path in ("/", "/usr", "/models", "/etc") if pod.can_write(path)] == []


def test_the_deployment_serves_and_ends_in_its_grace_period(start, models):
    (template,) = pod_templates(manifest("Deployment", "slipstream"))
    pod = start(template, claims={"models": models})
    pod.wait_started()
    assert pod.probe("readinessProbe")
    assert pod.probe("livenessProbe")
    check_confinement(pod)
    assert len(pod.ask(8000, GENERATE, BODY, KEY)["text_output"].split()) == 8
    assert "API key" in pod.ask(8000, GENERATE, BODY)["error"]
    assert "nv_trt_llm_request_metrics" in pod.in_network(
        "curl", "-s", "http://127.0.0.1:8002/metrics"
    )
    pod.terminate()
    assert pod.wait_terminated() == 0
    program, seconds = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    assert shutil.which(program)
    assert int(seconds) + 60 < template["spec"]["terminationGracePeriodSeconds"]
    assert '"level": "error"' not in pod.log()


def test_the_runtime_of_kserve_serves_its_ports(start, models, tmp_path):
    (template,) = pod_templates(manifest("ServingRuntime", "slipstream"))
    spec = template["spec"]
    # KServe adds the volume that it has filled, and the grace period of the service
    predictor = manifest("InferenceService", "llm")["spec"]["predictor"]
    (container,) = spec["containers"]
    mounts = [
        *container["volumeMounts"],
        {"name": "kserve", "mountPath": "/mnt/models", "readOnly": True},
    ]
    volumes = [*spec["volumes"], {"name": "kserve", "persistentVolumeClaim": {}}]
    grace = {"terminationGracePeriodSeconds": predictor["terminationGracePeriodSeconds"]}
    template = {
        "spec": grace | {"containers": [container | {"volumeMounts": mounts}], "volumes": volumes}
    }
    assert predictor["model"]["storageUri"].rpartition("/")[2] == "kserve"
    pod = start(template, claims={"kserve": models / "kserve"})
    pod.wait_started()
    assert pod.probe("readinessProbe")
    assert pod.probe("livenessProbe")
    assert pod.status()["Uid"].split() == ["10001"] * 4
    assert len(pod.ask(8080, GENERATE, BODY)["text_output"].split()) == 8
    assert "Started GRPCInferenceService at 0.0.0.0:9000" in pod.log()
    pod.terminate()
    assert pod.wait_terminated() == 0


def test_the_import_job_ends_with_a_repository(start, models, tmp_path):
    """The job builds from a folder here: the known model of the manifest would be downloaded."""
    volume = tmp_path / "volume"
    shutil.copytree(models / "built" / "model", volume / "source")
    os.chown(volume, 10001, 10001)
    (template,) = pod_templates(manifest("Job", "slipstream-import"))
    (model,) = (word for word in template["spec"]["containers"][0]["args"] if "--model" in word)
    args = [*template["spec"]["containers"][0]["args"], "--source=/models/source"]
    container = template["spec"]["containers"][0] | {"args": args}
    changed = {"spec": template["spec"] | {"containers": [container]}}
    job = start(changed, claims={"models": volume}, arguments={model: "--model=tiny"})
    assert job.wait_exit(120) == 0, job.log()
    (engine,) = (volume / "engines").glob("*/rank0.engine")
    config = (volume / "repository" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert f"/models/engines/{engine.parent.name}" in config


def test_a_leader_and_its_worker_run_the_same_command(start, models):
    document = manifest("LeaderWorkerSet", "slipstream-ranks")
    leader_template, worker_template = pod_templates(document)
    pods = []
    for index, template in enumerate((leader_template, worker_template)):
        pods.append(
            start(
                template,
                claims={"models": models},
                # what the controller sets
                more={
                    "LWS_LEADER_ADDRESS": "10.77.0.1",
                    "LWS_GROUP_SIZE": str(document["spec"]["leaderWorkerTemplate"]["size"]),
                    "LWS_WORKER_INDEX": str(index),
                },
                arguments={"--ranks=16": "--ranks=2"},
                network=f"10.77.0.{index + 1}/24",
            )
        )
    leader, worker = pods
    connect(leader, worker)
    leader.wait_started()
    assert leader.probe("readinessProbe")
    check_confinement(leader)
    check_confinement(worker)
    assert len(leader.ask(8000, GENERATE, BODY, KEY)["text_output"].split()) == 8
    assert "on cpu with 2 ranks" in leader.log()
    wait_for(lambda: worker.probe("livenessProbe"))
    # each pod has one of the two ranks
    assert [len(pod.engine_processes()) for pod in pods] == [1, 1]
    for pod in pods:
        pod.terminate()
    assert [pod.wait_terminated() for pod in pods] == [0, 0]

"""The Kubernetes manifests of deploy/, and the problems that their schemas find in them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from source_tree import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
KUSTOMIZATION = "kustomization.yaml"
VERSION = "1.34"  # of Kubernetes
CUSTOM_RESOURCES = ROOT / "tests" / "deploy" / "custom_resources.yaml"
# the part of each kind that is a pod template
POD_TEMPLATES = {
    "Deployment": [("spec", "template")],
    "Job": [("spec", "template")],
    "LeaderWorkerSet": [
        ("spec", "leaderWorkerTemplate", "leaderTemplate"),
        ("spec", "leaderWorkerTemplate", "workerTemplate"),
    ],
}
POD_FIELDS_OF_A_RUNTIME = ("containers", "volumes")

Document = dict[str, Any]


def kustomizations() -> list[Path]:
    return sorted(KUBERNETES.rglob(KUSTOMIZATION))


def manifest_files() -> list[Path]:
    return sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != KUSTOMIZATION)


def documents(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def all_documents() -> Iterator[Document]:
    for path in manifest_files():
        yield from documents(path)


def manifest(kind: str, name: str) -> Document:
    """Return the manifest of this kind and name."""
    (found,) = (
        document
        for document in all_documents()
        if (document["kind"], document["metadata"]["name"]) == (kind, name)
    )
    return found


def pod_templates(document: Document) -> list[Document]:
    """Return the pod templates in a manifest. A serving runtime has the fields of one."""
    if document["kind"] == "ServingRuntime":
        spec = document["spec"]
        return [{"spec": {name: spec[name] for name in POD_FIELDS_OF_A_RUNTIME if name in spec}}]
    found = []
    for path in POD_TEMPLATES.get(document["kind"], []):
        part = document
        for name in path:
            part = part[name]
        found.append(part)
    return found


def find_problems(document: Document) -> list[str]:
    """Return what the schemas find wrong in a manifest. Unknown fields are wrong."""
    schema = _custom_schemas().get(f"{document['apiVersion']} {document['kind']}")
    if schema is None:
        return _core_problems(document)
    found = [
        error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)
    ]
    for template in pod_templates(document) if not found else ():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
        found += _core_problems(pod | {"template": template})
    return found


def _core_problems(document: Document) -> list[str]:
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [error.message]
    return []


@cache
def _custom_schemas() -> dict[str, Document]:
    """Return the schemas of custom resources by their version and kind."""
    metadata = {"type": "object", "required": ["name"]}
    texts = {"type": "string"}
    return {
        name: _closed(
            {
                "required": ["apiVersion", "kind", "metadata", "spec"],
                "properties": {
                    "apiVersion": texts, "kind": texts, "metadata": metadata, "spec": spec,
                },
            }
        )
        for name, spec in yaml.safe_load(CUSTOM_RESOURCES.read_text("utf-8")).items()
    }  # fmt: skip


def _closed(schema: Document) -> Document:
    """Return the schema without fields that it does not name."""
    closed = dict(schema)
    if "properties" in schema:
        closed |= {"type": "object", "additionalProperties": False}
        closed["properties"] = {name: _closed(part) for name, part in schema["properties"].items()}
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    return closed

"""Kubernetes manifests against KubeRay's schemas and the kinds of Kubernetes; the Dockerfile against the repository."""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.fleet.spec import read_spec
from router.config import RouterSettings

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "deploy" / "kubernetes"
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


def manifest(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))


def closed(schema: Any) -> Any:
    """The schema, with every object that names its keys taking no others."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: closed(part) for key, part in schema.items()}
    if schema.get("type") == "object" and "properties" in schema and "additionalProperties" not in schema:
        parts["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        parts.pop("type", None)
    return parts


@cache
def validator(kind: str) -> Any:
    """Of KubeRay's schema, which is taken as it is: to check that it is one takes seconds."""
    path = ROOT / "tests" / "data" / "kuberay" / f"{kind}.v1.json.gz"
    schema = closed(json.loads(gzip.decompress(path.read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own, which the definition leaves open
    return jsonschema.validators.validator_for(schema)(schema)


def check(kind: str, document: dict[str, Any]) -> None:
    """Raises ValidationError."""
    validator(kind).validate(document)


@pytest.mark.parametrize(("kind", "name"), [("rayclusters", "raycluster"), ("rayjobs", "rayjob")])
def test_kuberay_takes_the_manifest_and_would_not_take_a_slip(kind, name):
    check(kind, manifest(name))
    slip = manifest(name)
    slip["spec"]["suspnd"] = True
    with pytest.raises(jsonschema.ValidationError, match="suspnd"):
        check(kind, slip)


def test_the_job_has_nothing_that_kuberay_refuses_of_one_with_a_cluster_selector():
    """Its admission checks, which its schema does not hold."""
    spec = manifest("rayjob")["spec"]
    assert spec["clusterSelector"]
    assert not {"rayClusterSpec", "suspend", "backoffLimit"} & spec.keys()
    assert spec.get("submissionMode") != "SidecarMode"


def test_pods_run_without_root_as_the_user_of_the_image():
    """By number, for Kubernetes cannot tell whether a name is root's."""
    users = set(re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE))
    spec = manifest("raycluster")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert {str(pod["securityContext"]["runAsUser"])} == users
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["imagePullPolicy"] == "IfNotPresent", "an image that was built here is in no registry"


def test_the_head_notices_lost_pods_as_fast_as_the_heads_of_the_cluster_files():
    (container,) = manifest("raycluster")["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    given = {f"{each['name']}={each['value']}" for each in container["env"] if "health_check" in each["name"]}
    commands = (ROOT / "deploy" / "clusters" / "cpu.yaml").read_text()
    assert given == set(re.findall(r"RAY_health_check_\w+=\d+", commands))


def test_a_wrong_type_deep_inside_is_found():
    wrong = manifest("raycluster")
    wrong["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["ports"] = [{"containerPort": "x"}]
    with pytest.raises(jsonschema.ValidationError):
        check("rayclusters", wrong)


def test_the_job_finds_the_cluster_and_the_file_that_the_head_mounts():
    cluster, job = manifest("raycluster"), manifest("rayjob")
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    mount = pod["containers"][0]["volumeMounts"][0]["mountPath"]
    (generated,) = manifest("kustomization")["configMapGenerator"]
    assert pod["volumes"][0]["configMap"]["name"] == generated["name"]
    assert f"fleet apply {mount}/{generated['files'][0]} " in job["spec"]["entrypoint"]


def test_the_service_leads_to_the_ports_of_the_router():
    cluster, service = manifest("raycluster"), manifest("service")
    spec = read_spec(FOLDER / "fleet.yaml")
    settings = {name: field.default for name, field in RouterSettings.model_fields.items()} | spec.router_settings(0)
    ports = {
        port["name"]: port["containerPort"]
        for port in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    }
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == {
        "grpc": settings["port"],
        "http": settings["http_port"],
        "metrics": settings["metrics_port"],
    }
    assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    assert settings["host"] == "0.0.0.0"


def test_a_pod_of_the_group_has_what_one_worker_needs_and_there_may_be_as_many_as_the_fleet_asks_for():
    (group,) = manifest("raycluster")["spec"]["workerGroupSpecs"]
    spec = read_spec(FOLDER / "fleet.yaml")
    assert spec.models["demo"].needs == {"GPU": 1.0}
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert group["maxReplicas"] >= spec.models["demo"].workers.max


def test_the_folder_is_what_kustomize_applies():
    resources = manifest("kustomization")["resources"]
    others = {"kustomization.yaml", "images.yaml", "fleet.yaml"}
    assert {path.name for path in FOLDER.glob("*.yaml")} == {*resources, *others}


def test_ray_is_the_version_that_is_tested():
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert manifest("raycluster")["spec"]["rayVersion"] == pinned[1]


def test_the_dockerfile_copies_what_the_wheel_is_made_of_and_has_an_image_for_each_name():
    copied = {source for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for source in line.split()}
    assert [source for source in copied if not (ROOT / source).exists()] == []
    packages = re.search(r"^packages = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert packages is not None
    assert {package.split("/")[0] for package in re.findall(r'"(.+?)"', packages[1])} <= copied
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE))
    images = {image["name"] for image in manifest("kustomization")["images"]}
    assert images == {"radixfleet-router", "radixfleet-worker"}
    assert {name.removeprefix("radixfleet-") for name in images} <= targets

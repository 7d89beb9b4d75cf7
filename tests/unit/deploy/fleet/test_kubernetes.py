"""Kubernetes manifests against KubeRay's schemas and the kinds of Kubernetes; the Dockerfile against the repository."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.fleet.reconcile import PATIENCE_S
from deploy.fleet.spec import read_spec
from router.config import RouterSettings
from worker.config import WorkerSettings

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


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and spec of each pod that the manifests describe."""
    spec = manifest("raycluster")["spec"]
    yield "head", spec["headGroupSpec"]["template"]["spec"]
    for group in spec["workerGroupSpecs"]:
        yield group["groupName"], group["template"]["spec"]
    yield "submitter", manifest("rayjob")["spec"]["submitterPodTemplate"]["spec"]


@pytest.mark.parametrize(("name", "pod"), list(pods()))
def test_namespaces_with_the_restricted_pod_security_standard_take_every_pod(name, pod):
    """Its user by number, for Kubernetes cannot tell whether a name is root's."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {str(pod["securityContext"]["runAsUser"])} == set(re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE))
    containers = [each["securityContext"] for each in pod["containers"]]
    if name == "head":  # where KubeRay puts Ray's autoscaler, too
        containers.append(manifest("raycluster")["spec"]["autoscalerOptions"]["securityContext"])
    assert containers == [{"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}] * len(containers)


@pytest.mark.parametrize(("name", "pod"), list(pods()))
def test_pods_hold_what_they_ask_for_and_only_the_autoscaler_may_ask_kubernetes(name, pod):
    for container in pod["containers"]:
        assert container["imagePullPolicy"] == "IfNotPresent", "an image that was built here is in no registry"
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys() & container["resources"]["limits"].keys()
    assert pod.get("automountServiceAccountToken", True) is (name == "head")


def pre_stop(pod: dict[str, Any]) -> tuple[str, float]:
    """What a pod runs before it ends, and how long it waits for it."""
    (container,) = pod["containers"]
    *_, command = container["lifecycle"]["preStop"]["exec"]["command"]
    (timeout_s,) = re.findall(r" --timeout (\d+) ", command)
    return command, float(timeout_s)


COMMAND_S = 15.0
"""In which `radixfleet fleet` has started and given its order, and after it the supervisor ends the member."""


def test_a_worker_s_pod_gives_its_requests_the_time_that_the_fleet_gives_them():
    (group,) = manifest("raycluster")["spec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    command, timeout_s = pre_stop(pod)
    assert "fleet drain --node $POD_IP " in command
    assert "POD_IP" in {each["name"] for each in pod["containers"][0]["env"]}
    given = read_spec(FOLDER / "fleet.yaml").models["demo"].settings
    grace_s = given.get("drain_grace_s", WorkerSettings.model_fields["drain_grace_s"].default)
    assert timeout_s >= COMMAND_S + 2 * PATIENCE_S + grace_s + COMMAND_S
    assert pod["terminationGracePeriodSeconds"] >= timeout_s + COMMAND_S


def test_the_head_s_pod_lets_the_running_requests_of_all_routers_end():
    spec = read_spec(FOLDER / "fleet.yaml")
    pod = manifest("raycluster")["spec"]["headGroupSpec"]["template"]["spec"]
    command, timeout_s = pre_stop(pod)
    assert re.findall(r"router-\d+", command) == [f"router-{index}" for index in range(spec.routers.count)]
    grace_s = spec.routers.settings.get("drain_grace_s", RouterSettings.model_fields["drain_grace_s"].default)
    assert timeout_s >= grace_s + COMMAND_S
    assert pod["terminationGracePeriodSeconds"] > timeout_s
    assert {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "0"} in pod["containers"][0]["env"]


def test_nodes_are_drained_without_the_last_worker_or_the_head():
    cluster, budget = manifest("raycluster"), manifest("disruption")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert type(budget["spec"]["minAvailable"]) is int, "a RayCluster has no scale subresource"
    assert budget["spec"]["selector"]["matchLabels"] == {
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/group": group["groupName"],
    }
    kept = cluster["spec"]["headGroupSpec"]["template"]["metadata"]["annotations"]
    assert kept == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }


def named_ports(pod: dict[str, Any]) -> dict[str, int]:
    (container,) = pod["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_all_may_call_the_router_and_only_the_cluster_s_own_reach_ray():
    cluster, policy = manifest("raycluster"), manifest("networkpolicy")["spec"]
    own = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert policy["podSelector"] == {"matchLabels": own}
    everyone = {port["port"] for rule in policy["ingress"] if "from" not in rule for port in rule["ports"]}
    assert everyone == {port["targetPort"] for port in manifest("service")["spec"]["ports"]}
    submitter = manifest("rayjob")["spec"]["submitterPodTemplate"]["metadata"]["labels"]
    inside = [rule["from"] for rule in policy["ingress"] if "ports" not in rule]
    assert inside == [[{"podSelector": {"matchLabels": own}}, {"podSelector": {"matchLabels": submitter}}]]


def test_prometheus_reaches_the_metrics_and_kuberay_the_dashboard_each_from_its_namespace():
    """A label that any pod may bear opened the ports by which programs are run."""
    spec, policy = manifest("raycluster")["spec"], manifest("networkpolicy")["spec"]
    (group,) = spec["workerGroupSpecs"]
    head, worker = (named_ports(each["template"]["spec"]) for each in (spec["headGroupSpec"], group))
    assert not head.keys() & worker.keys(), "what is open at the head is open at no worker"
    outside = {}
    for rule in policy["ingress"]:
        for peer in rule.get("from", ()):
            if "namespaceSelector" in peer:
                assert peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
                (who,) = peer["podSelector"]["matchLabels"].values()
                outside[who] = [port["port"] for port in rule["ports"]]
    assert outside == {"prometheus": ["worker-metrics"], "kuberay-operator": ["dashboard"]}
    (model,) = read_spec(FOLDER / "fleet.yaml").models.values()
    assert worker == {"worker-metrics": model.settings["metrics_port"]}
    assert "dashboard" in head


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

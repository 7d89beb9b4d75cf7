"""Cluster files: what Ray's own checks say, and that they start a fleet whose file is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.fleet.spec import read_spec

CLUSTERS = Path(__file__).parents[4] / "deploy" / "clusters"
NAMES = ("aws", "cpu", "gcp", "on-premise")


def cluster(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text()))


def test_every_cluster_file_is_tested():
    assert {path.stem for path in CLUSTERS.glob("*.yaml")} == {*NAMES, "fleet-gpu", "fleet-cpu"}


@pytest.mark.parametrize("name", NAMES)
def test_ray_accepts_it_and_would_not_accept_a_slip(name):
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(cluster(name)))
    with pytest.raises(Exception, match="setup_comands"):
        validate_config(prepare_config(cluster(name) | {"setup_comands": []}))


@pytest.mark.parametrize("name", NAMES)
def test_the_head_starts_a_fleet_that_is_right(name):
    config = cluster(name)
    applied = re.fullmatch(
        r"radixfleet fleet apply ~/radixfleet/(\S+) --no-wait", config["head_start_ray_commands"][-1]
    )
    assert applied is not None
    assert config["file_mounts"] == {"~/radixfleet": "."}
    spec = read_spec(CLUSTERS.parents[1] / applied[1])
    (model,) = spec.models.values()
    assert set(model.needs) == ({"worker_slot"} if name == "cpu" else {"GPU"})


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_its_comments_name_the_file_itself(name):
    text = (CLUSTERS / f"{name}.yaml").read_text()
    named = re.findall(r"^#\s+ray \w+ (\S+)", text, re.MULTILINE)
    assert set(named) == {f"deploy/clusters/{name}.yaml"}
    assert len(named) == 5


def test_hosts_without_gpus_have_slots_for_the_fleets_workers():
    config = cluster("cpu")
    commands = " ".join(config["worker_start_ray_commands"])
    slots = [int(number) for number in re.findall(r"slot\": (\d+)", commands)]
    spec = read_spec(CLUSTERS / "fleet-cpu.yaml")
    assert slots == [2]
    assert sum(slots) * config["min_workers"] >= spec.models["demo"].workers.max


def test_nodes_of_aws_are_what_its_api_takes():
    """Where botocore is installed: RunInstances would refuse unknown or mistyped parameters."""
    loaders = pytest.importorskip("botocore.loaders")
    from botocore.model import ServiceModel
    from botocore.validate import ParamValidator

    api = ServiceModel(loaders.Loader().load_service_model("ec2", "service-2"), "ec2")
    shape = api.operation_model("RunInstances").input_shape
    for node in cluster("aws")["available_node_types"].values():
        parameters = {**node["node_config"], "MinCount": 1, "MaxCount": 1}
        assert ParamValidator().validate(parameters, shape).generate_report() == ""


def test_nodes_of_aws_name_their_image_for_rays_own_is_too_old():
    """Ray fills in an image of Ubuntu 18.04, which no wheel of torch runs on."""
    images = [node["node_config"].get("ImageId") for node in cluster("aws")["available_node_types"].values()]
    assert len(set(images)) == len(images) == 2
    assert None not in images


def test_nodes_of_google_cloud_have_objects_where_its_api_has_objects():
    """The Instance resource of the Compute Engine API; Ray passes it on unread."""
    for node in cluster("gcp")["available_node_types"].values():
        config = node["node_config"]
        assert isinstance(config.get("scheduling", {}), dict)
        assert isinstance(config.get("metadata", {}).get("items", []), list)
        (disk,) = config["disks"]
        assert disk["boot"]

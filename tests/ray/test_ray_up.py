"""deploy/clusters/cpu.yaml for real: `ray up`, `exec`, `submit`, `down` against three hosts; its fleet starts itself.

Changed against the file: addresses and keys, the packages (those of this checkout, not installed), a model that
is small, and less memory for Ray.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.host_network import HostNetwork, why_not
from tests.support.ray_host import ROOT, eventually
from tests.support.tiny_model import tiny_model

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]

FLEET = """
routers: {settings: {host: 0.0.0.0}}
models:
  demo:
    workers: {min: 2, max: 4}
    settings: {model: MODEL, runner: sim, inline: true, log_level: warning}
"""


@pytest.fixture
def files() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rf-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def cluster_file(network: HostNetwork) -> Path:
    """The file of the repository, for these hosts."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "clusters" / "cpu.yaml").read_text())
    head, *workers = network.addresses
    config["provider"] |= {"head_ip": head, "worker_ips": workers}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(network.files / "key")}
    config["min_workers"] = config["max_workers"] = len(workers)
    (network.files / "mounted" / "deploy" / "clusters").mkdir(parents=True)
    fleet = FLEET.replace("MODEL", str(network.files / "model"))
    (network.files / "mounted" / "deploy" / "clusters" / "fleet-cpu.yaml").write_text(fleet)
    config["file_mounts"] = {"~/radixfleet": str(network.files / "mounted")}
    binaries = Path(sys.executable).parent
    lines = [
        f"export PATH={binaries}:$PATH PYTHONPATH={ROOT / 'proto'}:{ROOT}",
        "export OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0",
    ]
    config["setup_commands"] = [f"grep -qF {line!r} ~/.bashrc || echo {line!r} >> ~/.bashrc" for line in lines]
    for kind in ("head_start_ray_commands", "worker_start_ray_commands"):
        config[kind] = [
            command.replace("ray start ", "ray start --object-store-memory=80000000 --include-dashboard=false ")
            if "--head" in command
            else command.replace("ray start ", "ray start --object-store-memory=80000000 ")
            for command in config[kind]
        ]
    path = network.files / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_cluster_comes_up_with_its_fleet_takes_orders_and_goes(files: Path) -> None:
    shutil.copytree(tiny_model(), files / "model")
    with HostNetwork.start(files, 3) as network:
        path = cluster_file(network)
        up = f"ray up {path} --yes --no-config-cache"
        network.run(up, timeout_s=400)
        assert network.addresses[0] in network.run(f"ray get-head-ip {path}").stdout

        def status() -> dict[str, Any]:
            told = network.run(f"ray exec {path} 'radixfleet fleet status --json'", check=False).stdout
            line = next((line for line in told.splitlines() if line.startswith("{")), "{}")
            return dict(json.loads(line))

        def settled(workers: int) -> Any:
            found = status()
            there = [member for member in found.get("members", []) if member["kind"] == "worker"]
            return found.get("settled") and len(there) == workers and found

        found = eventually(lambda: settled(2), "the fleet is up", timeout_s=300)
        alive = [node["address"] for node in found["nodes"] if node["alive"]]
        assert network.addresses[0] in alive
        assert found["routers"] == [f"{network.addresses[0]}:7070"]

        eventually(
            lambda: len([n for n in status()["nodes"] if n["alive"]]) == 3, "all hosts have joined", timeout_s=300
        )
        network.run(f"ray exec {path} 'radixfleet fleet scale demo 4'", timeout_s=300)
        found = settled(4)
        assert found
        nodes = {member["node_id"] for member in found["members"] if member["kind"] == "worker"}
        assert len(nodes) >= 2, "workers are spread over hosts"
        answer = network.run(
            f"{sys.executable} -m deploy.cli generate --prompt hello --max-new-tokens 4 --ignore-eos "
            f"--endpoint {network.addresses[0]}:7070 --json"
        )
        assert '"finish_reason": "length"' in answer.stdout

        (files / "job.py").write_text("import ray\nray.init('auto')\nprint('nodes', len(ray.nodes()))\n")
        assert "nodes 3" in network.run(f"ray submit {path} {files / 'job.py'}").stdout

        network.run(f"ray exec {path} 'radixfleet fleet down'", timeout_s=200)
        network.run(f"ray down {path} --yes", timeout_s=200)

        def ours() -> str:
            return "".join(
                network.ssh(address, "pgrep -af 'rayle[t]|gcs_serve[r]|worker.engin[e]|Acto[r]' || true")
                for address in network.addresses
            )

        eventually(lambda: not ours(), "nothing is left on any host", timeout_s=120)

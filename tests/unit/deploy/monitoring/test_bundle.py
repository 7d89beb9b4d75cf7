"""What `radixfleet monitoring` writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from deploy.commands.monitoring import monitoring


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(monitoring, arguments)
    return result.exit_code, result.output


def test_all_that_prometheus_and_grafana_need_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "mon"
    code, output = run(str(folder), "--router", "10.0.0.1:7071", "--router", "[fd00::2]:7071")
    assert code == 0
    assert "docker compose up -d" in output
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    urls = [each["url"] for each in jobs["radixfleet"]["http_sd_configs"]]
    assert urls == ["http://10.0.0.1:7071/sd", "http://[fd00::2]:7071/sd"]
    assert list(jobs) == ["radixfleet", "ray"]
    assert len(list((folder / "grafana" / "dashboards").glob("*.json"))) == 3


def test_containers_may_read_all_of_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        run(str(tmp_path / "new" / "mon"))
    finally:
        os.umask(before)
    written = list((tmp_path / "new").rglob("*"))
    assert len(written) > 8
    assert {path.stat().st_mode & 0o777 for path in written} == {0o644, 0o755}


def test_every_file_that_the_compose_file_mounts_is_written(tmp_path: Path) -> None:
    run(str(tmp_path / "mon"))
    services = yaml.safe_load((tmp_path / "mon" / "compose.yaml").read_text())["services"]
    mounts = {mount.split(":")[0] for service in services.values() for mount in service["volumes"]}
    sources = {mount for mount in mounts if mount.startswith(".")}
    assert len(sources) == 3
    assert all((tmp_path / "mon" / source).exists() for source in sources)
    provider = yaml.safe_load((tmp_path / "mon/grafana/provisioning/dashboards/radixfleet.yml").read_text())
    inside = {mount.split(":")[1] for service in services.values() for mount in service["volumes"]}
    assert provider["providers"][0]["options"]["path"] in inside


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, output = run(str(tmp_path))
    assert code == 2
    assert "--force" in output
    assert run(str(tmp_path), "--force")[0] == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("address", ["10.0.0.1", "http://10.0.0.1:7071", "host:port", "host:70710"])
def test_a_router_that_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    code, output = run(str(tmp_path / "mon"), "--router", address)
    assert code == 2
    assert "host:port" in output
    assert not (tmp_path / "mon").exists()

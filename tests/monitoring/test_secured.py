"""A fleet that asks for keys and speaks TLS, scraped as prometheus.yml says that it can be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring.bundle import prometheus_config
from tests.support.prometheus import Prometheus, needs_prometheus, running_prometheus
from tests.support.secured_fleet import KEY, WRONG, SecuredFleet, secured_fleet
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.prometheus, needs_prometheus]


def config(fleet: SecuredFleet, folder: Path, key: str, *, mutual: bool = False) -> dict[str, Any]:
    """With the lines that the shipped file has as a comment."""
    assert fleet.certificates is not None
    values: dict[str, Any] = yaml.safe_load(prometheus_config([f"127.0.0.1:{fleet.router.metrics_port}"]))
    values["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    del values["rule_files"]
    (folder / "api-key").write_text(key)
    own = fleet.certificates.client
    access = {
        "authorization": {"type": "Bearer", "credentials_file": str(folder / "api-key")},
        "tls_config": {"ca_file": str(fleet.certificates.ca)}
        | ({"cert_file": str(own.cert), "key_file": str(own.key)} if mutual else {}),
    }
    job = values["scrape_configs"][0]
    job |= access
    (discovery,) = job["http_sd_configs"]
    discovery |= {"url": discovery["url"].replace("http://", "https://"), **access}
    return values


def roles_that_are_up(prometheus: Prometheus, *, at_least: int) -> list[str]:
    """Waits for so many."""

    up: list[str] = []

    def enough() -> bool:
        up[:] = [each["metric"]["role"] for each in prometheus.get("query", query="up == 1")["result"]]
        return len(up) >= at_least

    def faults() -> list[tuple[str, str]]:
        return [(each["scrapeUrl"], each["lastError"]) for each in prometheus.get("targets")["activeTargets"]]

    wait_until(enough, faults)
    return sorted(up)


@pytest.mark.parametrize("mutual", [False, True], ids=["TLS", "mutual TLS"])
async def test_with_a_key_and_the_ca_all_is_scraped(tmp_path: Path, *, mutual: bool) -> None:
    """And with a certificate, where the fleet asks for one."""
    async with secured_fleet(tmp_path, mutual=mutual) as fleet:

        def scraped() -> list[str]:
            with running_prometheus(config(fleet, tmp_path, KEY, mutual=mutual)) as prometheus:
                return roles_that_are_up(prometheus, at_least=2)

        assert await asyncio.to_thread(scraped) == ["router", "worker"]


async def test_with_another_key_nothing_is_found(tmp_path: Path) -> None:
    async with secured_fleet(tmp_path) as fleet:

        def errors() -> str:
            with running_prometheus(config(fleet, tmp_path, WRONG)) as prometheus:
                wait_until(lambda: "prometheus_sd_http_failures_total 0" not in prometheus.page("metrics"))
                return str(prometheus.get("targets")["activeTargets"])

        assert await asyncio.to_thread(errors) == "[]"

"""Prometheus' list of what to scrape, as the router's metrics port gives it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from radixfleet.client import Client
from router.api.scrape_targets import scrape_targets
from router.app import running_router
from tests.support.router_fixture import settings
from tests.support.router_parts import Parts
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.status, answer.headers["Content-Type"], json.load(answer)


async def test_the_router_and_its_workers_are_listed_with_their_labels() -> None:
    """The addresses in the list answer with metrics: behaviour 63 begins there."""
    async with (
        sim_worker(worker_id="w-a") as worker,
        running_router(settings(workers=(worker.address,))) as router,
        Client(router.address),
    ):
        await until(lambda: all(state.facts for state in router.registry.workers))
        asked = f"localhost:{router.metrics_port}"
        status, kind, groups = await asyncio.to_thread(fetch, f"http://{asked}/sd")
        assert (status, kind) == (200, "application/json")
        assert groups == [
            {"targets": [asked], "labels": {"role": "router"}},
            {
                "targets": [f"localhost:{worker.metrics_port}"],
                "labels": {"role": "worker", "worker_id": "w-a", "model": "sim-model"},
            },
        ]
        pages = [await asyncio.to_thread(page, group["targets"][0]) for group in groups]
    assert "radixfleet_router_requests_total" in pages[0]
    assert "radixfleet_worker_requests_total" in pages[1]


def test_ports_that_speak_tls_are_scraped_by_https() -> None:
    for router_tls in (False, True):
        (router,) = json.loads(scrape_targets([], "r:1", router_tls=router_tls))
        assert router["labels"].get("__scheme__") == ("https" if router_tls else None)
    parts = Parts(num_workers=1)
    (state,) = parts.workers
    assert state.facts is not None
    state.facts = dataclasses.replace(state.facts, metrics_port=9100)
    labels = [group["labels"] for group in json.loads(scrape_targets([state], "r:1", worker_tls=True))]
    assert [group.get("__scheme__") for group in labels] == [None, "https"]


def page(target: str) -> str:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.parametrize(
    ("address", "asked", "target"),
    [
        ("10.0.0.7:7080", "10.0.0.1:7071", "10.0.0.7:9100"),
        ("127.0.0.1:7080", "10.0.0.1:7071", "10.0.0.1:9100"),
        ("[::1]:7080", "[fd00::1]:7071", "[fd00::1]:9100"),
        ("localhost:7080", "router.example:7071", "router.example:9100"),
        ("localhost:7080", "", "localhost:9100"),
    ],
)
def test_a_worker_on_the_routers_machine_is_reached_by_the_routers_host(address: str, asked: str, target: str) -> None:
    parts = Parts(num_workers=0)
    worker = parts.add("w0", metrics_port=9100)
    worker.address = address
    (_, group) = json.loads(scrape_targets([worker], asked))
    assert group["targets"] == [target]


def test_workers_without_metrics_are_left_out() -> None:
    parts = Parts(num_workers=0)
    silent = parts.add("w0", metrics_port=0)
    unknown = parts.add("w1")
    unknown.facts = None
    assert len(json.loads(scrape_targets([silent, unknown], "10.0.0.1:7071"))) == 1


def test_processes_that_share_its_ports_are_listed_with_it() -> None:
    groups = json.loads(scrape_targets([], "r:1", other_ports=[7, 8], router_tls=True))
    assert [group["targets"] for group in groups] == [["r:1"], ["r:7"], ["r:8"]]
    assert {group["labels"]["role"] for group in groups} == {"router"}
    assert {group["labels"]["__scheme__"] for group in groups} == {"https"}

"""Every metric that the documents name exists on a live endpoint."""

import asyncio
import re
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from deploy.reference import DOCUMENTS
from radixfleet.client import Client
from router.app import running_router
from router.config import RouterSettings
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker

ROOT = Path(__file__).parents[2]
NAMED = "".join((ROOT / name).read_text() for name in DOCUMENTS)


def scrape(port: int) -> set[str]:
    """Names that PromQL can ask for: of families, and of their samples."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        text = page.read().decode()
    names = set()
    for family in text_string_to_metric_families(text):
        names |= {family.name, *(sample.name for sample in family.samples)}
    return names


async def test_every_metric_that_the_documents_name_is_exported():
    """Behaviour 63."""
    async with (
        sim_worker() as worker,
        running_router(RouterSettings(port=0, metrics_port=0, http_port=-1, workers=(worker.address,))) as router,
        Client(router.address) as client,
    ):
        await until(lambda: any(not state.ineligible_reason for state in router.registry.workers))
        await client.complete("hello", max_new_tokens=3)
        known = await asyncio.to_thread(scrape, worker.metrics_port) | await asyncio.to_thread(
            scrape, router.metrics_port
        )
    named = set(re.findall(r"\bradixfleet_(?:worker|router)_\w+", NAMED))
    assert len(named) > 10
    assert named - known == set()

"""A router with engines of other kinds behind it, played by fakes on real ports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from radixfleet.client import Client
from radixfleet.clock import Clock
from radixfleet.errors import RadixfleetError
from router.app import Router, running_router
from router.workers.state import WorkerState
from tests.support.byte_tokenizer import byte_spec
from tests.support.fake_worker import FakeWorker
from tests.support.foreign_engine import ForeignEngine
from tests.support.http_client import Answer, post
from tests.support.openai_engine import OpenAiEngine
from tests.support.router_fixture import NO_RETRY, settings
from tests.support.waiting import until

Engine: TypeAlias = ForeignEngine | OpenAiEngine | FakeWorker

PROMPT = "the worker keeps a prefix of each prompt in its cache and the router sends the next request there " * 10


class Fleet:
    """A router and what is behind it."""

    def __init__(self, router: Router, client: Client) -> None:
        self.router, self.client = router, client

    def state(self, worker: Engine) -> WorkerState:
        return next(state for state in self.router.registry.workers if state.address == worker.address)

    async def matched(self, worker: Engine, prompt: Any) -> int:
        """Tokens of the prompt that the router thinks the worker has."""
        told = await self.client.explain(prompt)
        return next(each.matched_tokens for each in told.candidates if each.address == worker.address)

    async def until_matched(self, worker: Engine, prompt: Any, tokens: int) -> None:
        async with asyncio.timeout(60):
            while await self.matched(worker, prompt) != tokens:  # noqa: ASYNC110  only asking tells
                await asyncio.sleep(0.01)

    async def http(self, path: str, body: Mapping[str, Any]) -> Answer:
        return await post(self.router.http_port, path, {"model": "fake-model", **body})

    def metric(self, name: str) -> float:
        return self.router.metrics.registry.get_sample_value(f"radixfleet_router_{name}") or 0.0


@asynccontextmanager
async def behind_router(*workers: Engine, clock: Clock | None = None, **values: Any) -> AsyncIterator[Fleet]:
    """All of them connected; at the end nothing of a request is left anywhere."""
    try:
        for worker in workers:
            await worker.start()
        addresses = tuple(worker.address for worker in workers)
        async with (
            running_router(settings(**{"workers": addresses, "http_port": 0, **values}), clock) as router,
            Client(router.address, retry=NO_RETRY, timeout_s=60.0) as client,
        ):
            fleet = Fleet(router, client)
            await until(lambda: all(not state.ineligible_reason for state in router.registry.workers))
            yield fleet
            await until(lambda: not router.log.in_flight)
            for worker in workers:
                await until(lambda worker=worker: not worker.running)
            for state in router.registry.workers:
                assert (state.books.own_requests, state.books.own_tokens) == (0, 0)
            assert router.sketch.open_leases == 0
            router.sketch.check()
    finally:
        for worker in workers:
            await worker.kill()


async def until_served_by(fleet: Fleet, engine: OpenAiEngine) -> None:
    """The next request is this engine's, by turns."""
    while (await fleet.client.explain("hello")).worker_id != engine.worker_id:
        with suppress(RadixfleetError):
            await fleet.client.complete("hello", max_new_tokens=1)


def model_directory(folder: Path) -> Path:
    spec = byte_spec()
    (folder / "tokenizer.json").write_text(spec.tokenizer_json)
    settings_json = {"eos_token": spec.eos_token, "chat_template": spec.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_json))
    return folder

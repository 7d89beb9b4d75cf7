"""A worker that hangs, as SIGSTOP makes it: its connections stay whole, and it says nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from radixfleet.answers import Delta
from radixfleet.client import Client
from radixfleet.errors import Unavailable
from router.app import Router, running_router
from router.workers.state import WorkerState
from tests.support.router_fixture import NO_RETRY, settings
from tests.support.told_silence import ToldSilence
from tests.support.waiting import until
from tests.support.worker_process import START_S, WorkerProcess, worker_process

PROMPT = tuple(range(3, 203))
NEW_TOKENS = 1500
"""Some 15 s of the simulated device: it is far from the end when the worker is stopped."""
CONNECT_S = 60.0
"""Nothing but a worker that is stopped takes so long to answer a question."""


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> ToldSilence:
    told = ToldSilence()
    monkeypatch.setattr("router.workers.connection.limited_silence", told.limited)
    return told


@dataclass(frozen=True)
class Fleet:
    router: Router
    client: Client
    workers: dict[str, WorkerProcess]
    silence: ToldSilence

    async def hang(self, name: str) -> None:
        """The worker is stopped, and for longer than it may be silent."""
        worker = self.workers[name]
        await worker.stop()
        self.silence.falls(worker.address)

    def state(self, name: str) -> WorkerState:
        return self.router.registry.get(name)

    async def until_serving(self, *names: str) -> None:
        def serving() -> set[str]:
            return {worker.name for worker in self.router.registry.workers if not worker.ineligible_reason}

        await until(lambda: serving() == set(names), f"serving: {names}", timeout_s=START_S)

    async def until_settled(self, name: str) -> None:
        """The worker itself says that nothing runs or waits there and nothing is held, and the books agree."""

        def settled() -> bool:
            state = self.state(name)
            load = state.books.reported
            held = (load.running_requests, load.waiting_requests, load.kv_protected_tokens)
            return state.connected and held == (0, 0, 0) and state.books.running_requests == 0

        await until(settled, f"nothing is left at {name}", timeout_s=START_S)
        state = self.state(name)
        assert (state.books.own_requests, state.books.own_tokens, state.books.outstanding_tokens) == (0, 0, 0)


@asynccontextmanager
async def fleet(folder: Path, silence: ToldSilence, *names: str, link: bool = True) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(worker_process(name, folder)) for name in names]
        addresses = [worker.address for worker in workers]
        values = settings(workers=addresses, link=link, retry_ratio=1, connect_timeout_s=CONNECT_S)
        router = await stack.enter_async_context(running_router(values))
        client = await stack.enter_async_context(Client(router.address, retry=NO_RETRY))
        made = Fleet(router, client, {worker.name: worker for worker in workers}, silence)
        await made.until_serving(*names)
        yield made
        assert router.sketch.open_leases == 0
        router.sketch.check()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("link", [True, False], ids=["link", "calls"])
async def test_running_requests_leave_it_and_it_wakes_with_nothing_left(
    tmp_path: Path, silence: ToldSilence, link: bool
) -> None:
    """Behaviours 44 and 53: told how far they got; what the worker still held is aborted when it wakes."""
    async with fleet(tmp_path, silence, "w0", link=link) as made:
        started = asyncio.Event()
        with capture_logs() as logs:
            running = asyncio.create_task(
                made.client.complete(
                    PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0, on_text=lambda _: started.set()
                )
            )
            await asyncio.wait_for(started.wait(), START_S)
            await made.hang("w0")
            with pytest.raises(Unavailable, match=r"worker w0 was lost after \d+ tokens?:") as caught:
                await running
        assert int(caught.value.metadata["delivered_tokens"]) > 0
        failed = [entry for entry in logs if entry["event"] == "request failed at worker"]
        assert "says nothing" in failed[0]["detail"], "not by keepalive or deadline"
        assert made.state("w0").ineligible_reason == "disconnected"
        assert made.state("w0").books.own_requests == 0

        made.workers["w0"].wake()
        await made.until_serving("w0")
        await made.until_settled("w0")
        done = await made.client.complete(PROMPT, max_new_tokens=4, ignore_eos=True, temperature=0.0)
        assert len(done.token_ids) == 4


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_an_answer_goes_on_elsewhere_when_its_client_asked_for_that(tmp_path: Path, silence: ToldSilence) -> None:
    """Behaviour 53: no token is lost or repeated, against an answer of the other worker alone."""
    async with fleet(tmp_path, silence, "w0", "w1") as made:
        tokens: list[int] = []
        first = ""
        async for event in made.client.generate(
            PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0, resume=True
        ):
            if not isinstance(event, Delta):
                continue
            tokens += event.token_ids
            if not first:
                first = next(name for name in made.workers if made.state(name).books.own_requests)
                await made.hang(first)
                other = asyncio.create_task(
                    made.client.complete(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0)
                )
        whole = await other
        made.workers[first].wake()
        await made.until_serving("w0", "w1")
        for name in made.workers:
            await made.until_settled(name)
        assert tuple(tokens) == whole.token_ids
        assert len(tokens) == NEW_TOKENS

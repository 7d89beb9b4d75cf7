"""What a change of one worker comes to for the fleet. Nobody answers at the addresses: a test says what they tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from radixfleet.access import Access
from radixfleet.errors import Overloaded
from radixfleet.types import WorkerStatus
from router.workers import registry as module
from router.workers.registry import WorkerRegistry
from router.workers.state import WorkerState
from router.workers.surroundings import Surroundings
from router.workers.tokenizers import TokenizerStore
from tests.support.router_fixture import settings
from tests.support.router_parts import CAPACITY, Heard, Parts, facts

ADDRESSES = [f"127.0.0.1:{port}" for port in range(1, 6)]


class Told:
    """A registry whose workers tell what a test says."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self.registry = registry

    def add(self, address: str, worker_id: str, **fields: Any) -> WorkerState:
        """A worker that is connected."""
        self.registry.add(address)
        worker = self.registry.get(address)
        worker.facts = facts(worker_id, **fields)
        self.connect(worker)
        return worker

    def connect(self, worker: WorkerState, *, connected: bool = True) -> None:
        worker.connected, worker.status, worker.updated_at_s = connected, WorkerStatus.SERVING, 0.0
        worker.changed()
        self.registry._connections[worker.address]._changed()

    def addresses(self) -> list[str]:
        return [worker.address for worker in self.registry.workers]


@asynccontextmanager
async def told(*workers: str) -> AsyncIterator[Told]:
    """`workers`: addresses of the settings."""
    parts = Parts(num_workers=0)
    with ThreadPoolExecutor(1) as threads:
        given = settings(workers=workers)
        store = TokenizerStore(threads)
        around = Surroundings(given, parts.sketch, store, parts.metrics, Heard(), Access(), parts.clock, Random(1))
        registry = WorkerRegistry(around, lambda: None, lambda: None)
        yield Told(registry)
        await registry.close()


async def test_a_group_is_made_anew_only_for_what_it_is_made_of() -> None:
    """A new one of a thousand workers took 3 ms of the event loop, for each that was lost or found again."""
    async with told() as fleet:
        worker, _ = fleet.add(ADDRESSES[0], "w0"), fleet.add(ADDRESSES[1], "w1")
        group = fleet.registry.group("m")
        fleet.connect(worker, connected=False)
        assert [not view.unavailable for view in fleet.registry.group("m").view] == [False, True]
        fleet.connect(worker)
        worker.facts = facts("w0", status=WorkerStatus.SERVING, version="the same but for this")
        fleet.connect(worker)
        assert fleet.registry.group("m") is group
        assert [not view.unavailable for view in group.view] == [True, True]
        worker.facts = facts("w0", dialect="vllm")
        fleet.connect(worker)
        assert not fleet.registry.group("m").all_native
        worker.facts = facts("w0", capacity=replace(CAPACITY, kv_tokens=1_000))
        fleet.connect(worker)
        assert fleet.registry.group("m").longest_everywhere == 1_000, "it came back with a smaller KV pool"
        fleet.registry.remove(worker)
        assert [one.worker_id for one in fleet.registry.group("m").workers] == ["w1"]


async def test_an_address_that_turns_out_to_be_another_worker_frees_its_double() -> None:
    async with told() as fleet:
        first, second = fleet.add(ADDRESSES[0], "same"), fleet.add(ADDRESSES[1], "same")
        assert (first.duplicate_of, second.duplicate_of) == ("", ADDRESSES[0])
        first.facts = facts("other")
        fleet.connect(first)
        assert (first.duplicate_of, second.duplicate_of) == ("", "")


async def test_what_other_processes_know_has_not_registered_again() -> None:
    """One that was registered once, by hand, was given up after 15 minutes of downtime, as those that repeat it are."""
    async with told() as fleet:
        fleet.registry.learn([ADDRESSES[0], ADDRESSES[0]])
        fleet.registry.learn(ADDRESSES[:2])
        assert fleet.addresses() == ADDRESSES[:2]
        assert {connection._renewed_at_s for connection in fleet.registry._connections.values()} == {None}


async def test_who_registers_again_is_given_up_unless_it_is_configured() -> None:
    async with told(ADDRESSES[0]) as fleet:
        for _ in range(2):
            for address in ADDRESSES[:2]:
                fleet.registry.add(address, repeats=True)
        renewed = [connection._renewed_at_s for connection in fleet.registry._connections.values()]
        assert [each is not None for each in renewed] == [False, True]


async def test_more_than_may_be_known_are_not_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that heard from others who knew as many as may be did not start."""
    monkeypatch.setattr(module, "MAX_ADDRESSES", 2)
    async with told() as fleet:
        fleet.registry.learn(ADDRESSES)
        assert fleet.addresses() == ADDRESSES[:2]


async def test_news_of_a_removed_worker_is_not_of_its_successor() -> None:
    async with told() as fleet:
        old = fleet.add(ADDRESSES[0], "w0")
        fleet.registry.remove(old)
        fleet.add(ADDRESSES[0], "w0")
        fleet.registry.resumed(old)
        assert ADDRESSES[0] in fleet.registry._kinds, "else its tokenizer is dropped"


async def test_a_registry_that_closes_minds_no_worker_that_is_removed_meanwhile() -> None:
    """As one is that has moved, when the other address is lost in that moment."""
    async with told() as fleet:
        fleet.add(ADDRESSES[0], "w0")
        removed = fleet.add(ADDRESSES[1], "w1")
        asyncio.get_running_loop().call_soon(lambda: fleet.registry.remove(fleet.registry.get("w1")))
    assert removed.removed
    assert fleet.addresses() == []
    assert not fleet.registry._leaving


async def test_workers_without_a_name_are_no_doubles() -> None:
    async with told() as fleet:
        assert [fleet.add(address, "").duplicate_of for address in ADDRESSES] == [""] * 5


async def test_addresses_are_bounded_but_for_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a connection and a place in every choice, and whoever may register could add them without end."""
    monkeypatch.setattr(module, "MAX_ADDRESSES", 2)
    async with told(ADDRESSES[2]) as fleet:
        assert [fleet.registry.add(address) for address in ADDRESSES[:2]] == [True, True]
        with pytest.raises(Overloaded, match=r"2 addresses .* \(radixfleet workers remove\)"):
            fleet.registry.add(ADDRESSES[3])
        assert fleet.registry.add(ADDRESSES[1]) is False
        assert fleet.registry.add(ADDRESSES[2]) is True
        assert fleet.addresses() == ADDRESSES[:3]

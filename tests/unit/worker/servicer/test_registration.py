"""The worker makes itself known to routers that come, go and forget."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from structlog.testing import capture_logs

from radixfleet.endpoint import Endpoint
from radixfleet.types import WorkerId
from radixfleet.watched_file import UnusableFile
from tests.support.fake_engine import FakeEngine
from tests.support.registering_router import RegisteringRouter
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.servicer import registration
from worker.servicer.registration import Registration


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "REGISTER_EVERY_S", 0.05)
    monkeypatch.setattr(registration, "_BRIEF_S", 0.0)


async def test_it_does_not_matter_who_starts_first_or_restarts() -> None:
    """Behaviour 55: the router comes later, dies, and comes back having forgotten everything."""
    async with AsyncExitStack() as stack:
        first = await RegisteringRouter().start()
        await first.stop()  # its port is free, and nobody listens there
        router = f"127.0.0.1:{first.port}"
        await stack.enter_async_context(Registration([router], WorkerId("w"), 5, "10.0.0.9:5"))
        for _ in range(2):
            late = await RegisteringRouter().start(first.port)
            await until(lambda late=late: len(late.registered) >= 2)
            assert set(late.registered) == {"10.0.0.9:5"}
            assert late.repeats == {True}
            await late.stop()


async def test_a_router_that_starts_again_hears_of_the_worker_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 55: the end of the connection tells; nobody waits for the next time to register."""
    monkeypatch.setattr(registration, "REGISTER_EVERY_S", 3600.0)
    first = await RegisteringRouter().start()
    async with Registration([f"127.0.0.1:{first.port}"], WorkerId("w"), 5, "10.0.0.9:5"):
        await until(lambda: bool(first.registered))
        for _ in range(2):
            await first.stop()
            first = await RegisteringRouter().start(first.port)
            await until(lambda router=first: bool(router.registered))
    await first.stop()


async def test_a_router_that_is_never_up_disturbs_nobody() -> None:
    """Behaviour 55: the worker registers at the other one, and serves."""
    router = await RegisteringRouter().start()
    routers = ("127.0.0.1:1", f"127.0.0.1:{router.port}")
    async with sim_worker(engine=FakeEngine(), serving=False, routers=routers) as worker:
        await until(lambda: bool(router.registered))
        assert router.registered[0] == worker.address
        await until(lambda: worker.registration.trouble.startswith("not registered at 127.0.0.1:1: "))
        assert str(router.port) not in worker.registration.trouble
    assert router.removed == ["worker-0"], "it leaves in order"
    await router.stop()


async def test_where_it_is_not_registered_is_told_until_it_is() -> None:
    router = await RegisteringRouter().start()
    address = f"127.0.0.1:{router.port}"
    async with Registration([address], WorkerId("w"), 5, "10.0.0.9:5") as registration:
        await until(lambda: bool(router.registered))
        await router.stop()
        refused = f"not registered at {address}: nothing answers at {address}: Connection refused"
        await until(lambda: registration.trouble == refused)
        await router.start(router.port)
        await until(lambda: registration.trouble == "")
        await router.stop()
        await until(lambda: bool(registration.trouble))
        await registration.follow([])
        assert registration.trouble == "", "it shall not be"


async def test_a_router_that_is_away_for_a_moment_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever rolls new settings through a fleet would read of each router that is started again."""
    monkeypatch.setattr(registration, "_BRIEF_S", 3600.0)
    async with Registration(["127.0.0.1:1"], WorkerId("w"), 5, "10.0.0.9:5") as registering:
        await until(lambda: bool(registering._failures))
        assert registering.trouble == ""


async def test_the_address_is_the_one_that_the_router_can_reach() -> None:
    """A worker that listens on every interface tells each router its own address on the way there."""
    router = await RegisteringRouter().start()
    async with Registration([f"127.0.0.1:{router.port}"], WorkerId("w"), 1234, None):
        await until(lambda: bool(router.registered))
    assert router.registered[0] == "127.0.0.1:1234"
    await router.stop()


async def test_routers_may_change_while_it_runs() -> None:
    """It registers at the new one and takes itself off the list of the old one."""
    old, new = await RegisteringRouter().start(), await RegisteringRouter().start()
    async with Registration([f"127.0.0.1:{old.port}"], WorkerId("w"), 5, "10.0.0.9:5") as registration:
        await until(lambda: bool(old.registered))
        await registration.follow([f"127.0.0.1:{new.port}"])
        assert old.removed == ["w"]
        await until(lambda: bool(new.registered))
        told = len(old.registered)
        await until(lambda: len(new.registered) >= 3)
        assert len(old.registered) == told, "the old one hears no more of it"
        assert new.removed == []
    assert new.removed == ["w"]
    await old.stop()
    await new.stop()


async def test_a_certificate_that_cannot_be_read_now_may_be_read_later() -> None:
    """Behaviour 55: the worker goes on trying, and leaves in peace."""
    router = await RegisteringRouter().start()
    readable = False
    asked = 0

    def endpoint(address: str) -> Endpoint:
        nonlocal asked
        asked += 1
        if not readable:
            raise UnusableFile("cannot read ca.pem")
        return Endpoint(address)

    with capture_logs() as lines:
        async with Registration([f"127.0.0.1:{router.port}"], WorkerId("w"), 5, "10.0.0.9:5", endpoint) as registration:
            await until(lambda: asked >= 3)
            assert [line["log_level"] for line in lines] == ["error"], "told once"
            assert "cannot read ca.pem" in registration.trouble
            readable = True
            await until(lambda: bool(router.registered))
            readable = False
    assert router.removed == []
    await router.stop()

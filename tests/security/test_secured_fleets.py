"""Whole fleets in which every port and every connection is guarded: registration, state, link, requests, CLI."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from radixfleet import watched_file
from radixfleet.client import Client
from radixfleet.endpoint import Endpoint
from radixfleet.errors import PermissionDenied, Unauthenticated, Unavailable
from radixfleet.tls import ClientTls
from router.app import running_router
from tests.support.look_aside import asking_by, both_forms
from tests.support.router_fixture import NO_RETRY, settings
from tests.support.secured_fleet import KEY, TOKEN, WRONG, Certificates, access_settings, secured_fleet
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker

PROMPT = "a prompt that is longer than one block of sixty-four tokens of one byte each " * 3


@pytest.mark.parametrize("mutual", [False, True])
@pytest.mark.parametrize("link", [False, True])
async def test_a_fleet_with_tls_and_keys_works(tmp_path: Path, mutual: bool, link: bool) -> None:
    """The workers are registered and followed (entering shows it), reached by link or call, and the cache is known."""
    async with secured_fleet(tmp_path, num_workers=2, mutual=mutual, link=link) as fleet:
        async with Client(fleet.router_endpoint(KEY)) as client:
            first = await client.complete(PROMPT, max_new_tokens=4)
            second = await client.complete(PROMPT, max_new_tokens=4)
            assert first.started.worker_id == second.started.worker_id
            assert second.usage.cached_tokens > 128
            assert all(entry.connected and not entry.approximate for entry in await client.list_workers())
            with pytest.raises(PermissionDenied):
                await client.drain(first.started.worker_id)
        async with Client(fleet.router_endpoint(TOKEN)) as admin:
            await admin.drain(first.started.worker_id)
            third = await admin.complete(PROMPT, max_new_tokens=4)
            assert third.started.worker_id != first.started.worker_id


@both_forms
async def test_look_aside_routing_takes_the_clients_own_key_to_the_worker(tmp_path: Path, form: str) -> None:
    async with secured_fleet(tmp_path, mutual=True) as fleet, Client(fleet.router_endpoint(KEY)) as client:
        route = await asking_by(client, form).route("hello")
        async with Client(Endpoint(route.address, fleet.tls(), KEY)) as direct:
            answer = await direct.complete(route.token_ids, lease_id=route.lease_id, max_new_tokens=2, ignore_eos=True)
        assert answer.usage.completion_tokens == 2
        async with Client(Endpoint(route.address, fleet.tls(), WRONG), retry=NO_RETRY) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.complete(route.token_ids, lease_id=route.lease_id)


async def test_no_way_in_but_by_tls_and_a_certificate_of_the_right_ca(tmp_path: Path) -> None:
    async with secured_fleet(tmp_path, mutual=True) as fleet:
        files = fleet.certificates
        assert files is not None
        wrong = (
            None,
            ClientTls(files.ca),
            ClientTls(files.ca, files.stranger.cert, files.stranger.key),
            ClientTls(files.other_ca, files.client.cert, files.client.key),
        )
        for address in (fleet.router.address, fleet.workers[0].address):
            for tls in wrong:
                async with Client(Endpoint(address, tls, TOKEN), retry=NO_RETRY) as client:
                    with pytest.raises(Unavailable):
                        await client.model_info()


async def test_workers_of_another_fleet_cannot_join(tmp_path: Path) -> None:
    files = Certificates.make(tmp_path)
    access = access_settings(files, mutual=True)
    async with running_router(settings(**access)) as router:
        for wrong in ({"admin_token": "of-another-fleet-0123456789"}, {"tls_ca": files.other_ca}):
            with capture_logs() as lines:
                async with sim_worker(routers=(router.address,), **(access | wrong)):
                    await until(lambda: events(lines, "cannot register; trying on"), "it was refused")
        assert router.registry.workers == ()


async def test_a_router_of_another_fleet_learns_nothing_of_a_worker(tmp_path: Path) -> None:
    access = access_settings(Certificates.make(tmp_path), mutual=True)
    async with sim_worker(**access) as worker:
        wrong = access | {"admin_token": "of-another-fleet-0123456789", "workers": (worker.address,)}
        with capture_logs() as lines:
            async with running_router(settings(**wrong)) as router:
                await until(lambda: events(lines, "no connection to worker"), "it was refused")
                (state,) = router.registry.workers
                assert (state.connected, state.facts) == (False, None)
        assert events(lines, "no connection to worker")[0]["reason"] == "UNAUTHENTICATED"


async def test_a_new_token_goes_round_a_running_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the new token as a second line everywhere, then put it first, then take the old one away."""
    old, new = "old-token-0123456789", "new-token-0123456789"
    monkeypatch.setattr(watched_file, "_LOOK_EVERY_S", 0.0)
    files = [tmp_path / "router", tmp_path / "worker"]
    for file in files:
        file.write_text(f"{old}\n")
    router_token, worker_token = (f"@{file}" for file in files)
    async with (
        sim_worker(admin_token=worker_token) as worker,
        running_router(settings(admin_token=router_token, workers=(worker.address,))) as router,
    ):
        (state,) = router.registry.workers
        await until(lambda: not state.ineligible_reason, "the worker is followed")
        for content in (f"{old}\n{new}\n", f"{new}\n{old}\n", f"{new}\n"):
            for file in files:
                file.write_text(content)
            async with Client(Endpoint(router.address, key=new), retry=NO_RETRY) as client:
                await client.register(worker.address)
                await client.complete("hello", max_new_tokens=1)
        async with Client(Endpoint(worker.address, key=old), retry=NO_RETRY) as client:
            with pytest.raises(Unauthenticated):
                await client.worker_info()


def events(lines: list[EventDict], name: str) -> list[EventDict]:
    return [line for line in lines if line["event"] == name]

"""A router and simulated workers that guard all their doors, in this process: TLS or mutual TLS, keys, an admin token.

    async with secured_fleet(tmp_path, mutual=True) as fleet:
        async with Client(fleet.router_endpoint(KEY)) as client: ...

The workers register themselves, so that an entered block has shown registration, `GetInfo`, `WatchState` and the link.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixfleet.endpoint import Endpoint
from radixfleet.keys import key_line
from radixfleet.tls import ClientTls
from router.app import Router, running_router
from tests.support.certificates import Authority, Pair
from tests.support.router_fixture import settings
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.app import Worker

KEY = "rfk_a-client-of-the-tests"
TOKEN = "token-of-the-tests-0123456789"
WRONG = "rfk_not-known-to-anybody"


@dataclass(frozen=True, slots=True)
class Certificates:
    """Of a fleet, its client, and a stranger with a CA of their own."""

    ca: Path
    fleet: Pair
    client: Pair
    other_ca: Path
    stranger: Pair

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        """Into files of the directory."""
        ours, theirs = Authority("ours"), Authority("theirs")
        return cls(
            ours.write(directory, "ca"),
            ours.issue("fleet", directory),
            ours.issue("client", directory),
            theirs.write(directory, "other-ca"),
            theirs.issue("stranger", directory),
        )


@dataclass(frozen=True, slots=True)
class SecuredFleet:
    """What `secured_fleet` gives."""

    router: Router
    workers: list[Worker]
    certificates: Certificates | None

    def tls(self) -> ClientTls | None:
        """What a client of the fleet dials with."""
        if self.certificates is None:
            return None
        own = self.certificates.client
        return ClientTls(self.certificates.ca, own.cert, own.key)

    def router_endpoint(self, key: str | None = None) -> Endpoint:
        """The router's gRPC port."""
        return Endpoint(self.router.address, self.tls(), key)

    def worker_endpoint(self, key: str | None = None) -> Endpoint:
        """The first worker's gRPC port."""
        return Endpoint(self.workers[0].address, self.tls(), key)


def access_settings(certificates: Certificates | None, *, mutual: bool, keys: bool = True) -> dict[str, Any]:
    """Settings of router and worker alike."""
    values: dict[str, Any] = {}
    if keys:
        values |= {"api_keys": (key_line("alice", KEY),), "admin_token": TOKEN}
    if certificates is not None:
        pair = certificates.fleet
        values |= {"tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": certificates.ca}
        if mutual:
            values["tls_client_ca"] = certificates.ca
    return values


@asynccontextmanager
async def secured_fleet(
    directory: Path | None, *, num_workers: int = 1, mutual: bool = False, keys: bool = True, **values: Any
) -> AsyncIterator[SecuredFleet]:
    """TLS when there is a `directory` for the certificates.

    `values`: more settings of the router; keys and isolation hold for the workers too.
    """
    certificates = None if directory is None else Certificates.make(directory)
    access = access_settings(certificates, mutual=mutual, keys=keys)
    shared = {name: value for name, value in values.items() if name in ("api_keys", "isolate_clients")}
    async with AsyncExitStack() as stack:
        # On a busy machine a TLS handshake may take longer than the short waits that other tests have.
        patience = {"heartbeat_timeout_s": 5.0, "connect_timeout_s": 5.0}
        router = await stack.enter_async_context(
            running_router(settings(**{"http_port": 0} | patience | access | values))
        )
        workers = [
            await stack.enter_async_context(
                sim_worker(worker_id=f"worker-{index}", routers=(router.address,), **(access | shared))
            )
            for index in range(num_workers)
        ]
        await until(lambda: _num_eligible(router) == num_workers, "all workers get requests", timeout_s=30)
        yield SecuredFleet(router, workers, certificates)
        await until(lambda: not router.log.in_flight, "no request in flight")


def _num_eligible(router: Router) -> int:
    return sum(not state.ineligible_reason for state in router.registry.workers)

"""A fleet.yaml on one machine, on plain processes: the first router, and the least number of workers of each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from deploy.fleet.spec import FleetSpec
from deploy.local_access import LocalAccess
from deploy.local_fleet import LocalSpec
from deploy.machine import worker_share
from deploy.processes import ChildSpec
from radixfleet.keys import new_key
from radixfleet.settings import check
from router.config import RouterSettings
from worker.config import WorkerSettings


@dataclass(frozen=True, slots=True, repr=False)
class MachineSpec(LocalSpec):
    """Children have files of settings, where tokens may stand."""

    workers: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """(name, settings) of each."""

    def router(self) -> ChildSpec:
        """The router's process."""
        return ChildSpec("router", ("router",), {}, self.router_options)

    def worker(self, index: int, router_address: str) -> ChildSpec:
        """The process of worker `index`, which registers at `router_address`."""
        name, settings = self.workers[index]
        share, environment = worker_share(index, self.num_workers, settings.get("device"))
        identity = {"worker_id": name, "routers": [router_address], "port": 0, "metrics_port": 0}
        return ChildSpec(name, ("worker",), environment, {**share, **identity, **settings})


def on_one_machine(spec: FleetSpec, run_dir: Path) -> tuple[MachineSpec, LocalAccess]:
    """The processes, and how they are reached. Raises SettingsError and UnusableFile."""
    workers = tuple(
        (f"{model}-{number}", spec.worker_settings(model))
        for model, parts in spec.models.items()
        for number in range(parts.workers.min)
    )
    access = LocalAccess.from_settings(_as_dialled(spec), run_dir)
    token = access.options["admin_token"]
    shared = {"admin_token": token} if token is not None else {}
    fleet = MachineSpec(
        num_workers=len(workers),
        router_options={**shared, **spec.router_settings(0)},
        worker_options={},
        run_dir=run_dir,
        endpoint=access.endpoint,
        secrets=access.secrets,
        drain_grace_s=_longest_drain(spec),
        workers=tuple((name, {**shared, **settings}) for name, settings in workers),
    )
    return fleet, access


def _as_dialled(spec: FleetSpec) -> RouterSettings:
    """The router's settings, with what a worker has to dial it, and a token where keys need one and there is none."""
    router = check(RouterSettings, spec.router_settings(0), "routers")
    workers = [check(WorkerSettings, spec.worker_settings(model), model) for model in spec.models]
    changes: dict[str, Any] = dict.fromkeys(("tls_ca", "tls_peer_name"))
    if router.tls_cert is not None:
        shown = ("tls_cert", "tls_key") if router.tls_client_ca is not None else ()
        changes = {name: getattr(workers[0], name) for name in (*changes, *shown)}
    if router.admin_token is None and any(worker.api_keys for worker in workers):
        changes["admin_token"] = SecretStr(new_key())
    return router.model_copy(update=changes)


def _longest_drain(spec: FleetSpec) -> float:
    of_workers = [check(WorkerSettings, spec.worker_settings(model), model).drain_grace_s for model in spec.models]
    return max(check(RouterSettings, spec.router_settings(0), "routers").drain_grace_s, *of_workers)

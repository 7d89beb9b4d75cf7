"""A fleet.yaml on one machine, on plain processes: the first router, and the least number of workers of each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.fleet.spec import FleetSpec
from deploy.local_access import LocalAccess
from deploy.local_fleet import LocalSpec
from deploy.machine import worker_share
from deploy.processes import ChildSpec
from radixfleet.settings import check
from router.config import RouterSettings
from worker.config import WorkerSettings


@dataclass(frozen=True, slots=True)
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
    access = LocalAccess.from_settings(check(RouterSettings, spec.router_settings(0), "routers"), run_dir)
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


def _longest_drain(spec: FleetSpec) -> float:
    of_workers = [check(WorkerSettings, spec.worker_settings(model), model).drain_grace_s for model in spec.models]
    return max(check(RouterSettings, spec.router_settings(0), "routers").drain_grace_s, *of_workers)

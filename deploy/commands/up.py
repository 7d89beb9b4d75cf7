"""`radixfleet up`: a fleet on this machine, kept running."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from deploy.consoles import new_console
from deploy.fleet.one_machine import on_one_machine
from deploy.fleet.spec import read_spec
from deploy.local_access import LocalAccess
from deploy.local_fleet import LocalFleet, LocalSpec
from deploy.progress import Progress
from deploy.tables import print_whole, workers_table
from radixfleet.address import DEFAULT_PORT
from radixfleet.client import Client
from radixfleet.os_errors import why_not_bound
from radixfleet.settings import check, click_options, is_port, load, shared_port
from radixfleet.stop_signals import on_stop_signals
from router.config import RouterSettings
from router.own_folder import kept
from router.policies import POLICY_NAMES
from worker.config import WorkerSettings
from worker.model.sources import resolve_model

_DECIDED_HERE = frozenset(
    {"worker_id", "routers", "host", "port", "metrics_port", "address_file", "advertise_address", "max_message_bytes"}
)
"""Worker settings that `up` does not offer."""

_DIVIDED = ("device", "threads", "device_memory")
"""What decides how the workers share the machine: set in the environment or in a settings file, it counts as well."""

_BESIDE_A_FILE = frozenset({"fleet_file", "run_dir"})
"""Options that --fleet leaves to the command line."""


@click.command()
@click.option("--workers", "num_workers", type=click.IntRange(1, 64), default=1, show_default=True, help="How many.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that the router listens on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port of the router; 0 takes a free one. Workers take free ports.",
)
@click.option(
    "--router-metrics-port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT + 1,
    show_default=True,
    help="Prometheus port of the router; 0 takes a free one.",
)
@click.option(
    "--http-port",
    type=click.IntRange(-1, 65535),
    default=DEFAULT_PORT + 2,
    show_default=True,
    help="Port of the OpenAI-compatible HTTP API and of the console; 0 takes a free one, -1 serves neither.",
)
@click.option("--policy", type=click.Choice(POLICY_NAMES), help="How the router chooses; default: by cost.")
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where logs go; default: a new folder in /tmp, which stays.",
)
@click.option(
    "--fleet",
    "fleet_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run what this fleet.yaml says (`radixfleet fleet init` prints one); all else but --run-dir stands there.",
)
@click_options(WorkerSettings, without=_DECIDED_HERE)
def up(  # noqa: PLR0913, PLR0917  click hands over each option
    num_workers: int,
    host: str,
    port: int,
    router_metrics_port: int,
    http_port: int,
    policy: str | None,
    run_dir: Path | None,
    fleet_file: Path | None,
    config: Path | None,
    **worker_options: Any,
) -> int:
    """Run a router and workers on this machine until Ctrl-C.

    The workers share the machine: a GPU each, or equal parts of cores and memory. One that dies is started again.
    Options from --config on are those of `radixfleet worker`, and hold for every worker; --log-level, --log-json
    and --drain-grace-s hold for the router as well. On Ctrl-C running requests may end within --drain-grace-s.

    \b
    radixfleet up --workers 2 --model demo
    radixfleet up --workers 4 --model ./Qwen3-0.6B --max-running-requests 16
    radixfleet up --fleet fleet.yaml
    radixfleet up --model demo --host 0.0.0.0 --api-keys keys.txt --tls-cert a.pem --tls-key a.key --tls-ca ca.pem

    TLS and keys hold for router and workers alike. Without --admin-token, --api-keys makes one for this fleet.
    """
    console = new_console(stderr=True)
    if fleet_file is not None:
        _refuse_beside_a_file(click.get_current_context())
        return _up_file(fleet_file, run_dir, console)
    ports = {"--port": port, "--router-metrics-port": router_metrics_port, "--http-port": http_port}
    if fault := shared_port(ports) or _taken_port(host, ports):
        raise click.UsageError(fault)
    settings = load(WorkerSettings, worker_options, config)  # wrong ones are named here, not in N logs
    run_dir = _usable(run_dir)
    access = LocalAccess.from_settings(settings, run_dir)
    divided = {name: getattr(settings, name) for name in _DIVIDED if name in settings.model_fields_set}
    spec = LocalSpec(
        num_workers=num_workers,
        router_options={
            **access.options,
            "host": host,
            "port": port,
            "metrics_port": router_metrics_port,
            "http_port": http_port,
            "policy": policy,
            "drain_grace_s": settings.drain_grace_s,
        },
        worker_options={"config": config, **worker_options, **divided, **access.options},
        run_dir=run_dir,
        endpoint=access.endpoint,
        secrets=access.secrets,
        drain_grace_s=settings.drain_grace_s,
    )
    with Progress(console) as progress, kept(run_dir):
        resolve_model(settings.model, lambda text: progress(f"model: {text}"))
        return asyncio.run(_keep_up(spec, access, console, progress))


def _taken_port(host: str, ports: Mapping[str, int]) -> str:
    """Which of the router's ports (name: port) cannot be had, and what to do; empty: none. 0 and -1 are no ports."""
    for name, port in ports.items():
        if port > 0 and (reason := why_not_bound(host, port)):
            return f"nobody can listen on {host}, {name} {port} ({reason}): choose another one, or 0 for any free one"
    return ""


def _refuse_beside_a_file(context: click.Context) -> None:
    """Raises UsageError where an option was given that a fleet.yaml decides."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in _BESIDE_A_FILE
        and context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"{', '.join(given)} cannot be given with --fleet: write it in the file, under the settings of routers or "
            "of a model (number of workers: `workers`)"
        )


def _usable(run_dir: Path | None) -> Path:
    """The folder, made where it is missing. Raises UsageError where nothing can be written there."""
    if run_dir is None:
        return Path(tempfile.mkdtemp(prefix="radixfleet-"))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            return run_dir
    except OSError as error:
        raise click.UsageError(
            f"--run-dir {run_dir} cannot be written ({error.strerror}): choose another folder"
        ) from error


def _up_file(file: Path, run_dir: Path | None, console: Console) -> int:
    """Run the fleet of a file."""
    file_spec = read_spec(file)
    router = check(RouterSettings, file_spec.router_settings(0), "routers")
    ports = {f"routers.settings.{name}": getattr(router, name) for name in RouterSettings.model_fields if is_port(name)}
    if fault := _taken_port(router.host, ports):
        raise click.UsageError(fault)
    run_dir = _usable(run_dir)
    spec, access = on_one_machine(file_spec, run_dir)
    with Progress(console) as progress, kept(run_dir):
        for model in file_spec.models:
            path = file_spec.worker_settings(model)["model"]
            resolve_model(path, lambda text: progress(f"model: {text}"))
        return asyncio.run(_keep_up(spec, access, console, progress))


async def _keep_up(spec: LocalSpec, access: LocalAccess, console: Console, progress: Progress) -> int:
    """Until SIGINT or SIGTERM, which both arrive as a cancellation; Ctrl-C again is another one, which cuts."""
    task = asyncio.current_task()
    assert task is not None
    on_stop_signals(task.cancel, task.cancel)
    is_up = False
    try:
        async with LocalFleet(spec, progress) as fleet:
            async with Client(fleet.target) as client:
                print_whole(console, workers_table(await client.list_workers()))
            console.print(f"router  {fleet.endpoint}")
            if fleet.http_endpoint:
                scheme = "http" if access.options["tls_cert"] is None else "https"
                console.print(f"openai  {scheme}://{fleet.http_endpoint}/v1\nconsole {scheme}://{fleet.http_endpoint}/")
            console.print(f"logs    {spec.run_dir}")
            if access.token_file is not None:
                console.print(f"admin   --api-key @{access.token_file}", soft_wrap=True)
            console.print(f"try     radixfleet chat{access.flags(fleet.endpoint)}\nstop    Ctrl-C", soft_wrap=True)
            is_up = True
            progress("serving")
            await fleet.supervise()
    except asyncio.CancelledError:
        return 0 if is_up else 130
    return 0

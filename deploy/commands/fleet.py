"""`radixfleet fleet`: a fleet on a Ray cluster, from a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from deploy.consoles import new_console
from deploy.fleet.spec import EXAMPLE, check_for_ray, read_spec
from deploy.fleet.tables import departures, members_table, models_table, notes, some
from deploy.numbers import Number
from deploy.options import json_option
from deploy.progress import Progress
from deploy.tables import print_whole

_FAILED = 1
_POLL_S = 0.5
_SUPERVISOR = "supervisor"

Command = TypeVar("Command", bound=Callable[..., Any])
Settled = Callable[[dict[str, Any]], bool]


def _address_option(command: Command) -> Command:
    return click.option(
        "--address",
        default="auto",
        show_default="the cluster that this machine belongs to",
        envvar="RAY_ADDRESS",
        show_envvar=True,
        metavar="HOST:PORT",
        help="Head of the Ray cluster; this machine must be one of its nodes.",
    )(command)


def _wait_options(command: Command) -> Command:
    command = click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is done.")(command)
    return click.option(
        "--timeout", "timeout_s", type=Number(0), default=600.0, show_default=True, help="... so many s."
    )(command)


@click.group()
def fleet() -> None:
    """Run a fleet on a Ray cluster: routers, and workers for each model, as a file says.

    \b
    radixfleet fleet init > fleet.yaml                        # an example with all keys, to be changed
    ray start --head --resources='{"worker_slot": 2}'         # or `ray up`: see deploy/clusters
    radixfleet fleet apply fleet.yaml
    radixfleet fleet status
    radixfleet fleet scale demo 2
    radixfleet fleet down

    All commands run on a node of the cluster (`ray exec cluster.yaml 'radixfleet fleet status'`).
    """


@fleet.command()
def init() -> None:
    """Print an example of fleet.yaml, with a comment on every key."""
    click.echo(EXAMPLE, nl=False)


@fleet.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_wait_options
@_address_option
def apply(file: Path, address: str, timeout_s: float, *, wait: bool) -> int:
    """Make the fleet what FILE says: start, scale, or replace what differs, drained first.

    \b
    radixfleet fleet apply fleet.yaml
    radixfleet fleet apply fleet.yaml --no-wait       # return at once; the supervisor goes on
    """
    check_for_ray(read_spec(file), str(file))
    from deploy.fleet.cluster import Cluster, connected

    console = new_console(stderr=True)
    with Progress(console) as progress:
        progress("joining the Ray cluster")
        with connected(address):
            cluster = Cluster()
            cluster.start_supervisor()
            progress("telling the supervisor")
            cluster.order("apply", file.read_text(encoding="utf-8"))
            if not wait:
                console.print("the supervisor knows; watch it: radixfleet fleet status")
                return 0
            settled = _await(cluster, progress, timeout_s, lambda status: bool(status["settled"]))
            status = cluster.status()
        progress.pause()
        _print(status)
        if not settled:
            return _late(console, status, timeout_s)
        if status["routers"]:
            console.print(f"try     radixfleet chat --endpoint {status['routers'][0]}")
    return 0


@fleet.command()
@json_option
@_address_option
def status(address: str, *, as_json: bool) -> None:
    """Show models, routers and workers: what is wanted, and how each one is.

    \b
    radixfleet fleet status
    radixfleet fleet status --json | jq '.members[] | {name, phase, address}'
    """
    from deploy.fleet.cluster import Cluster, connected

    with connected(address):
        found = Cluster().status()
    if as_json:
        click.echo(json.dumps(found))
    else:
        _print(found)


@fleet.command()
@click.argument("model")
@click.argument("workers", metavar="N|MIN-MAX")
@_wait_options
@_address_option
def scale(model: str, workers: str, address: str, timeout_s: float, *, wait: bool) -> int:
    """Have N workers for MODEL, or between MIN and MAX as its load asks for. Holds until the next `apply`.

    \b
    radixfleet fleet scale demo 4
    radixfleet fleet scale demo 2-8
    """
    low, dash, high = workers.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()):
        raise click.UsageError(f"write a number of workers, or MIN-MAX; got {workers!r}")
    return _order(address, wait, timeout_s, "scale", model, int(low), int(high or low))


@fleet.command()
@click.argument("names", metavar="WORKER...", nargs=-1)
@click.option("--node", metavar="NODE", help="Every worker of this node (its address or id), and start none there.")
@click.option("--undo", is_flag=True, help="With --node: workers may start there again.")
@click.option("--now", is_flag=True, help="With WORKER: also the last that serves its model, before another does.")
@_wait_options
@_address_option
def drain(
    names: tuple[str, ...], node: str | None, address: str, timeout_s: float, *, undo: bool, now: bool, wait: bool
) -> int:
    """End workers without losing a request: nothing new goes there, and what runs may finish.

    Others take their place, as long as the fleet is to have as many: `scale` it down first if it is not. The last that
    serves a model goes on until another does, unless that one fails, or finds no place or has not loaded within half an
    hour; with --node for a minute at most, for machines that are taken away do not wait; with --now not at all: on a
    cluster without room for one more, it is what makes room. With --node it is done when the node has no worker, which
    may be before those that take their place serve.

    \b
    radixfleet fleet drain demo-1
    radixfleet fleet drain demo-0 --now               # nobody serves until its successor has loaded
    radixfleet fleet drain --node 10.0.0.7            # before the machine is taken away
    radixfleet fleet drain --node 10.0.0.7 --undo
    """
    if bool(names) == bool(node) or (undo and not node):
        raise click.UsageError("name workers, or one --node")
    if node is not None and now:
        raise click.UsageError("--now goes with workers: those of a --node wait for a minute at most anyway")
    if node is None:  # without --now as ever, for supervisors of an earlier version
        options: dict[str, Any] = {"now": True} if now else {}
        return _order(address, wait, timeout_s, "drain", list(names), **options)
    from deploy.fleet.cluster import Cluster, connected

    with connected(address):
        node_id = Cluster().node_id(node)
    is_done = _is_done if undo else partial(_is_empty, node_id)
    return _order(address, wait, timeout_s, "cordon", node_id, is_done=is_done, undo=undo)


@fleet.command()
@click.argument("names", metavar="MEMBER...", nargs=-1, required=True)
@_wait_options
@_address_option
def restart(names: tuple[str, ...], address: str, timeout_s: float, *, wait: bool) -> int:
    """Start workers or routers again, drained first; `supervisor` names the supervisor, which no request needs.

    \b
    radixfleet fleet restart demo-0 router-0
    radixfleet fleet restart supervisor               # after an upgrade
    """
    members = [name for name in names if name != _SUPERVISOR]
    if _SUPERVISOR in names:
        from deploy.fleet.cluster import Cluster, connected

        with connected(address):
            Cluster().restart_supervisor()
            if not members:
                return 0
    return _order(address, wait, timeout_s, "restart", members)


@fleet.command()
@click.option("--now", is_flag=True, help="Do not drain: what runs is cut.")
@click.option("--timeout", "timeout_s", type=Number(0), default=600.0, show_default=True, help="Wait so many s.")
@_address_option
def down(address: str, timeout_s: float, *, now: bool) -> int:
    """End the fleet: workers are drained, then routers; then the supervisor goes. The Ray cluster stays up."""
    from deploy.fleet.cluster import Cluster, NoFleet, connected

    console = new_console(stderr=True)
    with Progress(console) as progress:
        progress("joining the Ray cluster")
        with connected(address):
            cluster = Cluster()
            try:
                cluster.order("down", drain=not now)
                if not _await(cluster, progress, timeout_s, lambda status: not status["members"]):
                    return _late(console, cluster.status(), timeout_s)
            except NoFleet:  # or no longer: another took it down
                console.print("no fleet runs on this cluster")
                return 0
            cluster.stop_supervisor()
    console.print("the fleet is down")
    return 0


def _is_done(status: dict[str, Any]) -> bool:
    return bool(status["settled"]) and not any(each["leaving"] or each["restarting"] for each in status["members"])


def _is_empty(node_id: str, status: dict[str, Any]) -> bool:
    """No worker is there, or may be; routers stay, whose addresses clients know."""
    workers = [each for each in status["members"] if each["kind"] == "worker"]
    unseen = [each for each in workers if not each["node_id"] and (each["leaving"] or each["phase"] == "lost")]
    return not unseen and not any(each["node_id"] == node_id for each in workers)


def _order(
    address: str,
    wait: bool,  # noqa: FBT001  an option, passed on
    timeout_s: float,
    method: str,
    *arguments: object,
    is_done: Settled = _is_done,
    **options: object,
) -> int:
    """Give an order and wait until it is carried out: mostly, until the fleet is what is wanted again."""
    from deploy.fleet.cluster import Cluster, connected

    console = new_console(stderr=True)
    with Progress(console) as progress:
        progress("joining the Ray cluster")
        with connected(address):
            cluster = Cluster()
            cluster.order(method, *arguments, **options)
            if not wait:
                console.print("the supervisor knows; watch it: radixfleet fleet status")
                return 0
            done = _await(cluster, progress, timeout_s, is_done)
            status = cluster.status()
        progress.pause()
        if not done:
            return _late(console, status, timeout_s)
        console.print(f"done    {_summary(status)}")
        return 0


def _await(cluster: Any, progress: Progress, timeout_s: float, is_done: Settled) -> bool:
    """Show what the fleet is doing until it is done. False: not in time."""
    try:
        return _follow(cluster, progress, timeout_s, is_done)
    except KeyboardInterrupt:
        progress("interrupted; the supervisor goes on: radixfleet fleet status\n")
        raise


def _follow(cluster: Any, progress: Progress, timeout_s: float, is_done: Settled) -> bool:
    """See `_await`."""
    deadline_s = time.monotonic() + timeout_s
    told: set[str] = set()
    while True:
        status = cluster.status()
        if is_done(status):
            return True
        for note in notes(status):
            if note not in told:
                told.add(note)
                progress(f"{note}\n")
        if time.monotonic() >= deadline_s:
            return False
        progress(_summary(status))
        time.sleep(_POLL_S)


def _summary(status: dict[str, Any]) -> str:
    models = [f"{name}: {each['serving']} of {each['wanted']} serve" for name, each in status["models"].items()]
    busy: dict[str, list[str]] = {}
    for each in status["members"]:
        if each["phase"] != "serving":
            busy.setdefault(each["phase"], []).append(each["name"])
    told = ", ".join(f"{some(names)} {phase}" for phase, names in busy.items())
    return "; ".join([*models, told] if told else models) or "ending"


def _late(console: Console, status: dict[str, Any], timeout_s: float) -> int:
    console.print(f"not done after {timeout_s:.0f} s; the supervisor goes on: radixfleet fleet status", style="yellow")
    for note in (*notes(status), *departures(status)):
        console.print(note, soft_wrap=True)
    return _FAILED


def _print(status: dict[str, Any]) -> None:
    console = new_console()
    print_whole(console, models_table(status))
    console.print()
    print_whole(console, members_table(status))
    for note in (*notes(status), *departures(status)):
        console.print(f"\n{note}", style="yellow", soft_wrap=True)

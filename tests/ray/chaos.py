"""What a fleet on Ray loses when its parts die under load: `python -m tests.ray.chaos` prints the table, and JSON.

A head and three nodes (raylets) in namespaces of their own, three workers on simulated GPUs, one router (in one scene
two), a steady load in open loop without retries by the client (but of two routers it asks the other before the first
token). One thing is broken at a time, and then waited for:

lost      requests that ended with an error, from the break until all workers are eligible again (and how many of them
          were already streaming; the others had no token yet)
notice    from the break until the router leaves the victim out; "-" where no worker is lost
strength  from the break until as many workers as before are eligible; where none is lost, until the supervisor answers
          and calls the fleet settled
hit rate  cached share of the prompt tokens: in the window before, from the break to full strength, in the window after
orphans   processes of the victim that live 10 s later
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.ray_host import BIN, RayHost, eventually, why_not
from tests.support.tiny_model import tiny_model

NUM_NODES = 3
NUM_WORKERS = 3
NODE = '{"worker_slot": 2}'
ORPHAN_S = 10.0
RECOVERY_S = 180.0
_LAST_ENDS_S = 300.0
_POLL_S = 0.5
FLEET = """
routers:
  count: ROUTERS
  settings:
    {port: 7070, metrics_port: 7071, http_port: -1, log_level: warning, max_retries: 1, heartbeat_timeout_s: 3}
models:
  m:
    workers: 3
    settings: {model: MODEL, runner: sim, log_level: warning, max_total_tokens: 131072}
"""

Order = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    broken: str
    sent: int
    lost: int
    lost_streaming: int
    notice_s: float | None
    strength_s: float
    hit_rate: tuple[float, float, float]
    orphans: int


class Load:
    """The load process, and what it has told so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.requests: list[dict[str, Any]] = []
        self.eligible: list[tuple[float, list[str]]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if told["kind"] == "request":
                self.requests.append(told)
            else:
                self.eligible.append((told["at_s"], told["workers"]))

    def close(self) -> None:
        """Let what runs end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join(_LAST_ENDS_S)
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def eligible_now(self) -> list[str]:
        """Workers that get requests, as the router last said."""
        return self.eligible[-1][1] if self.eligible else []

    def first_change(self, since_s: float, holds: Callable[[list[str]], bool]) -> float | None:
        """When the eligible workers first were such, since a time."""
        return next((at_s for at_s, workers in self.eligible if at_s >= since_s and holds(workers)), None)

    def hit_rate(self, start_s: float, end_s: float) -> float:
        """Of the requests that began then and were answered."""
        rows = [row for row in self.requests if start_s <= row["began_s"] < end_s and row["worker"]]
        cached: int = sum(row["cached_tokens"] for row in rows)
        prompt: int = sum(row["prompt_tokens"] for row in rows)
        return cached / max(1, prompt)


@dataclass
class Stage:
    """A cluster with a fleet under load."""

    host: RayHost
    order: Order
    load: Load
    window_s: float

    def worker(self) -> dict[str, Any]:
        """One that serves."""
        members = self.order("status")["members"]
        return next(dict(each) for each in members if each["kind"] == "worker" and each["phase"] == "serving")

    def raylet_of(self, worker: dict[str, Any]) -> int:
        """The process id of the raylet that started it."""
        return self.host.parent(worker["pids"][0])

    def beside(self, worker: dict[str, Any]) -> list[dict[str, Any]]:
        """All workers of its node."""
        return [each for each in self.order("status")["members"] if each["node_id"] == worker["node_id"]]

    def break_and_wait(
        self,
        name: str,
        breaks: Callable[[], tuple[list[str], list[int]]],
        is_back: Callable[[dict[str, Any]], bool] = lambda status: True,
    ) -> Row:
        """`breaks` returns who is hit (workers that must leave the eligible ones), and which processes must be gone.

        `is_back`: what else belongs to full strength, by the fleet's status.
        """
        before = {each["name"] for each in self.order("status")["members"] if each["kind"] == "worker"}
        start_s = time.monotonic() - self.window_s
        at_s = time.monotonic()
        victims, pids = breaks()
        noticed = self._noticed(name, victims, at_s)
        notice_s = max(noticed) if noticed else None
        eventually(
            lambda: self._at_full_strength(notice_s or at_s, len(before), is_back), f"{name}: full strength", RECOVERY_S
        )
        whole = (
            None if notice_s is None else self.load.first_change(notice_s, lambda workers: len(workers) == len(before))
        )
        full_s = whole or time.monotonic()
        time.sleep(self.window_s)
        orphans = self._left_of(pids, at_s + ORPHAN_S)
        rows = [
            row for row in self.load.requests if at_s - 60 <= row["began_s"] and at_s <= row["ended_s"] <= full_s + 1
        ]
        lost = [row for row in rows if row["error"]]
        for row in lost:
            print(f"  {row['worker'] or '?'}: {row['error']}", file=sys.stderr)
        return Row(
            name,
            len(rows),
            len(lost),
            sum(row["first_s"] is not None for row in lost),
            None if notice_s is None else notice_s - at_s,
            full_s - at_s,
            (
                self.load.hit_rate(start_s, at_s),
                self.load.hit_rate(at_s, full_s),
                self.load.hit_rate(full_s, time.monotonic()),
            ),
            len(orphans),
        )

    def _left_of(self, pids: Sequence[int], until_s: float) -> set[int]:
        """Who lives then; earlier, when nobody does any more."""
        while (left := set(pids) & set(self.host.processes())) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return left

    def _noticed(self, name: str, victims: Sequence[str], at_s: float) -> list[float]:
        """When each of the victims was first left out."""

        def left_out(victim: str) -> float | None:
            return self.load.first_change(at_s, lambda workers: victim not in workers)

        try:
            return [eventually(partial(left_out, victim), f"{name}: {victim} is left out") for victim in victims]
        except AssertionError:
            print(f"{name}: {[change for change in self.load.eligible if change[0] > at_s - 5]}", file=sys.stderr)
            raise

    def _at_full_strength(self, since_s: float, count: int, is_back: Callable[[dict[str, Any]], bool]) -> bool:
        if len(self.load.eligible_now()) != count or time.monotonic() - since_s < 1.0:
            return False
        status = self.order("status")
        changing = any(member["leaving"] or member["restarting"] for member in status["members"])
        return bool(status["settled"]) and not changing and is_back(status)


# What is broken, each with the name of its line in the table.


def kill_engine(stage: Stage) -> Row:
    """kill -9 of a worker's engine: the worker starts another."""
    worker = stage.worker()

    def breaks() -> tuple[list[str], list[int]]:
        stage.host.kill(worker["pids"][1])
        return [worker["name"]], worker["pids"][1:]

    return stage.break_and_wait("a worker's engine", breaks)


def kill_actor(stage: Stage) -> Row:
    """kill -9 of a worker's actor, and with it of engine and runner: Ray starts another."""
    worker = stage.worker()

    def breaks() -> tuple[list[str], list[int]]:
        stage.host.kill(worker["pids"][0])
        return [worker["name"]], worker["pids"]

    return stage.break_and_wait("a worker's actor", breaks)


def kill_raylet(stage: Stage) -> Row:
    """kill -9 of a raylet: its workers end themselves, Ray places them elsewhere."""
    worker = stage.worker()
    hit, raylet = stage.beside(worker), stage.raylet_of(worker)

    def breaks() -> tuple[list[str], list[int]]:
        stage.host.kill(raylet)
        return [each["name"] for each in hit], [pid for each in hit for pid in each["pids"]]

    row = stage.break_and_wait("a raylet", breaks)
    stage.host.ray_node(NODE)
    return row


def kill_node(stage: Stage) -> Row:
    """kill -9 of all processes of a node at once."""
    worker = stage.worker()
    hit, everything = stage.beside(worker), stage.host.tree(stage.raylet_of(worker))

    def breaks() -> tuple[list[str], list[int]]:
        stage.host.kill(*everything)
        return [each["name"] for each in hit], everything

    row = stage.break_and_wait("a whole node", breaks)
    stage.host.ray_node(NODE)
    return row


def drain_node(stage: Stage) -> Row:
    """radixfleet fleet drain --node: workers move elsewhere without losing a request."""
    worker = stage.worker()
    hit = stage.beside(worker)

    def breaks() -> tuple[list[str], list[int]]:
        stage.order("cordon", worker["node_id"], undo=False)
        return [each["name"] for each in hit], []

    row = stage.break_and_wait("a node, drained", breaks)
    stage.order("cordon", worker["node_id"], undo=True)
    return row


def take_node_away(stage: Stage) -> Row:
    """Ray drains a node, as for a spot instance: the fleet has a minute."""
    worker = stage.worker()
    hit = stage.beside(worker)
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "chaos")
    command = ("drain-node", "--address", "127.0.0.1:6379", "--node-id", worker["node_id"], *reason)

    def breaks() -> tuple[list[str], list[int]]:
        stage.host.run(str(BIN / "ray"), *command, "--deadline-remaining-seconds", "60")
        return [each["name"] for each in hit], [pid for each in hit for pid in each["pids"]]

    row = stage.break_and_wait("a node, taken away", breaks)
    stage.host.ray_node(NODE)
    return row


def kill_router(stage: Stage) -> Row:
    """kill -9 of the only router: Ray starts it again on its port."""
    router = next(each for each in stage.order("status")["members"] if each["kind"] == "router")

    def breaks() -> tuple[list[str], list[int]]:
        stage.host.kill(router["pids"][0])
        return [each["name"] for each in stage.order("status")["members"] if each["kind"] == "worker"], router["pids"]

    return stage.break_and_wait("the only router", breaks)


def kill_one_router(stage: Stage) -> Row:
    """kill -9 of one of two routers: clients ask the other."""
    router = next(each for each in stage.order("status")["members"] if each["kind"] == "router")

    def breaks() -> tuple[list[str], list[int]]:
        stage.host.kill(router["pids"][0])
        return [], router["pids"]

    def is_back(status: dict[str, Any]) -> bool:
        return any(each["name"] == router["name"] and each["pids"] != router["pids"] for each in status["members"])

    return stage.break_and_wait("one of two routers", breaks, is_back)


def kill_supervisor(stage: Stage) -> Row:
    """kill -9 of the supervisor: another goes on from the books."""
    pid = stage.order("status")["supervisor"]["pid"]

    def breaks() -> tuple[list[str], list[int]]:
        stage.host.kill(pid)
        return [], [pid]

    return stage.break_and_wait("the supervisor", breaks)


SCENES: dict[str, Callable[[Stage], Row]] = {
    "engine": kill_engine,
    "actor": kill_actor,
    "raylet": kill_raylet,
    "node": kill_node,
    "drain": drain_node,
    "taken": take_node_away,
    "router": kill_router,
    "supervisor": kill_supervisor,
    "one-router": kill_one_router,
}
TWO_ROUTERS = ("one-router",)
ENDPOINTS = ("127.0.0.1:7070", "127.0.0.1:7080")


@contextmanager
def stage(requests_per_s: float, window_s: float, num_routers: int = 1) -> Iterator[Stage]:
    """Cluster, fleet and load, for as long as the block lasts."""
    files = Path(tempfile.mkdtemp(prefix="rf-", dir="/var/tmp"))
    try:
        shutil.copytree(tiny_model(), files / "model")
        text = FLEET.replace("MODEL", str(files / "model")).replace("ROUTERS", str(num_routers))
        (files / "fleet.yaml").write_text(text)
        with RayHost.start(files) as host:
            host.ray_head("{}")
            for _ in range(NUM_NODES):
                host.ray_node(NODE)
            host.radixfleet("fleet", "apply", "fleet.yaml", timeout_s=300)
            pace = ("--requests-per-s", str(requests_per_s))
            with host.console() as order, loading(host, *ENDPOINTS[:num_routers], *pace) as load:
                eventually(lambda: len(load.eligible_now()) == NUM_WORKERS, "all workers are eligible", RECOVERY_S)
                time.sleep(window_s)
                yield Stage(host, order, load, window_s)
    finally:
        shutil.rmtree(files, ignore_errors=True)


@contextmanager
def loading(host: RayHost, *options: str) -> Iterator[Load]:
    """`tests.ray.load` on the host for as long as the block lasts. `options`: endpoints of routers, and the rest."""
    with (host.files / "load.log").open("w") as log:
        process = host.popen(
            *(sys.executable, "-m", "tests.ray.load", *options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    load = Load(process)
    try:
        yield load
    finally:
        load.close()


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [
        "| broken under load | lost (streaming) of | noticed | full strength | hit rate before, during, after |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        notice = "-" if row.notice_s is None else f"{row.notice_s:.2f} s"
        rates = ", ".join(f"{rate:.2f}" for rate in row.hit_rate)
        lost = f"{row.lost} ({row.lost_streaming}) of {row.sent}"
        lines.append(f"| {row.broken} | {lost} | {notice} | {row.strength_s:.1f} s | {rates} |")
    return "\n".join(lines)


def run(names: Sequence[str], requests_per_s: float, window_s: float) -> list[Row]:
    """One scene after the other on one cluster, those with two routers on another."""
    rows = []
    for num_routers in (1, 2):
        scenes = [name for name in names if (name in TWO_ROUTERS) == (num_routers == 2)]
        if not scenes:
            continue
        with stage(requests_per_s, window_s, num_routers) as current:
            for name in scenes:
                rows.append(SCENES[name](current))
                print(f"{rows[-1]}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", choices=[*SCENES, []], default=[], help="default: all")
    parser.add_argument("--requests-per-s", type=float, default=6.0)
    parser.add_argument("--window-s", type=float, default=12.0, help="before and after, for the hit rates")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"chaos: {reason}", file=sys.stderr)
        return 1
    rows = run(arguments.scenes or list(SCENES), arguments.requests_per_s, arguments.window_s)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.orphans for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

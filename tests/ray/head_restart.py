"""What a fleet on Ray loses when its head dies and comes back: `python -m tests.ray.head_restart` prints it.

A Redis that keeps what Ray's GCS knows, a head, two nodes with two workers, a steady load in open loop without retries
by the client. All processes of the head are killed at once, and after a while a new head is started on the same Redis.
Twice: with the router on another node, and with the router at the head, as fleet.yaml has it unless it says otherwise.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ray.chaos import Load, loading
from tests.support.ray_host import RayHost, eventually, why_not
from tests.support.tiny_model import tiny_model

REDIS_PORT = 6390
AWAY_S = 10.0
"""For so long there is no head."""
REQUESTS_PER_S = 3.0
PATIENCE_S = 240.0
WORKERS = 2
FLEET = """
routers:
  resources: {ROUTER: 0.001}
  settings: {port: 7070, metrics_port: 7071, http_port: -1, log_level: warning, heartbeat_timeout_s: 20}
models:
  m:
    workers: {min: 2, max: 3}
    settings: {model: MODEL, runner: sim, inline: true, log_level: warning, max_total_tokens: 131072}
"""
AT_HEAD, ELSEWHERE = "node:__internal_head__", "router"


@dataclass(frozen=True)
class Outcome:
    """Of one time that the head was lost."""

    router: str
    """Where it was."""
    sent: int
    """While there was no head, and until the fleet was under control again."""
    lost: int
    same_workers: bool
    """They are the processes that they were."""
    head_s: float
    """From the start of the new head until it is up."""
    knows_s: float
    """... until a supervisor tells the fleet as it was."""
    routes_s: float
    """... until the router sends to all workers."""
    scaled_s: float
    """... until a worker that was ordered then serves."""


def why_not_here() -> str:
    """Why it cannot be run here; empty when it can."""
    return why_not() or ("" if shutil.which("redis-server") else "needs redis-server (Debian package redis-server)")


@contextmanager
def stage(router: str) -> Iterator[tuple[RayHost, list[int], Load]]:
    """The fleet under load, and the processes of the head that are not Ray's workers."""
    files = Path(tempfile.mkdtemp(prefix="rf-", dir="/var/tmp"))
    try:
        shutil.copytree(tiny_model(), files / "model")
        text = FLEET.replace("MODEL", str(files / "model")).replace("ROUTER", f'"{router}"')
        (files / "fleet.yaml").write_text(text)
        with RayHost.start(files) as host:
            host.redis(REDIS_PORT)
            # Nodes end themselves when there is no head for so long: by default 60 s, which a busy machine may need.
            host.more_environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "300"
            before = set(host.processes())
            host.ray_head("{}")
            head = sorted(set(host.processes()) - before)
            host.ray_node('{"worker_slot": 2, "router": 1}')
            host.ray_node('{"worker_slot": 2}')
            host.radixfleet("fleet", "apply", "fleet.yaml", timeout_s=PATIENCE_S)
            with loading(host, "127.0.0.1:7070", "--requests-per-s", str(REQUESTS_PER_S)) as load:
                eventually(lambda: len(load.eligible_now()) == WORKERS, "all workers are eligible", PATIENCE_S)
                yield host, head, load
    finally:
        shutil.rmtree(files, ignore_errors=True)


def run(router: str) -> Outcome:
    """Lose the head once."""
    with stage(router) as (host, head, load):
        with host.console() as order:
            before = order("status")
        running = host.processes()
        everything = {pid for root in head if root in running for pid in host.tree(root)}
        killed_s = time.monotonic()
        host.kill(*everything)
        time.sleep(AWAY_S)
        started_s = time.monotonic()
        host.ray_head_again("{}")
        head_s = time.monotonic() - started_s
        with host.console() as order:
            after = eventually(lambda: _settled(order), "a supervisor knows the fleet", PATIENCE_S)
            knows_s = time.monotonic() - started_s
            eventually(lambda: len(load.eligible_now()) == WORKERS, "the router sends to all workers", PATIENCE_S)
            routes_s = time.monotonic() - started_s
            order("scale", "m", WORKERS + 1, WORKERS + 1)
            eventually(lambda: len(load.eligible_now()) == WORKERS + 1, "another worker serves", PATIENCE_S)
            done_s = time.monotonic()
        eventually(lambda: any(row["began_s"] > done_s for row in load.requests), "the load goes on", PATIENCE_S)
        rows = [row for row in load.requests if killed_s <= row["ended_s"] <= done_s]
    lost = [row for row in rows if row["error"]]
    for error in sorted({row["error"] for row in lost}):
        print(f"  {error}", file=sys.stderr)
    where = "the head" if router == AT_HEAD else "another node"
    same = _workers(before) == _workers(after)
    return Outcome(where, len(rows), len(lost), same, head_s, knows_s, routes_s, done_s - started_s)


def _settled(order: Callable[..., Any]) -> dict[str, Any] | None:
    status: dict[str, Any] = order("status")
    return status if status["settled"] else None


def _workers(status: dict[str, Any]) -> dict[str, list[int]]:
    return {each["name"]: each["pids"] for each in status["members"] if each["kind"] == "worker"}


def table(outcomes: list[Outcome]) -> str:
    """In Markdown."""
    lines = [
        "| router on | lost of | workers | new head up | fleet known | all workers routed to | another worker serves |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        workers = "the same processes" if each.same_workers else "started again"
        times = " | ".join(f"{s:.1f} s" for s in (each.head_s, each.knows_s, each.routes_s, each.scaled_s))
        lines.append(f"| {each.router} | {each.lost} of {each.sent} | {workers} | {times} |")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "where", nargs="*", choices=["head", "node", []], default=[], help="of the router; default: both"
    )
    arguments = parser.parse_args()
    if reason := why_not_here():
        print(f"head_restart: {reason}", file=sys.stderr)
        return 1
    places = {"node": ELSEWHERE, "head": AT_HEAD}
    print(table([run(places[name]) for name in arguments.where or places]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A fleet that brings its machines: `python -m tests.ray.autoscaling` prints when workers and nodes came and went.

A head without room for workers, and Ray's autoscaler, which makes nodes of this machine (its own fake provider:
raylets in place of machines). A fleet of one to three workers is put on it, then a load that one worker cannot carry,
then none. The supervisor scales by the requests that wait; for an actor that finds no place Ray's autoscaler launches
a node, and a node on which no actor is left is ended after its idle time.
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

import yaml

from tests.ray.chaos import Load, loading
from tests.support.ray_host import RayHost, eventually, why_not
from tests.support.tiny_model import tiny_model

MAX_WORKERS = 3
CLIENTS = 8
"""Each has one request at a time, as has a worker: so some wait, and none for ever, however slow the machine is."""
IDLE_MINUTES = 0.1
PATIENCE_S = 400.0
FLEET = """
routers:
  settings: {port: 7070, metrics_port: 7071, http_port: -1, log_level: warning, heartbeat_timeout_s: 60}
models:
  m:
    workers: {min: 1, max: MAX}
    scaling: {up_after_s: 2, down_after_s: 4}
    settings: {model: MODEL, runner: sim, inline: true, log_level: warning, max_running_requests: 1}
"""
_EMPTY_LISTS = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")


@dataclass
class Story:
    """What happened, in seconds since the load began, or since it ended."""

    node_for_the_first_worker_s: float = 0.0
    """From `apply` until it served."""
    wanted_s: float = 0.0
    """More workers were wanted."""
    nodes_s: float = 0.0
    """As many nodes were there as there are workers at most."""
    serving_s: float = 0.0
    """And all of them served."""
    unwanted_s: float = 0.0
    """One worker was wanted again."""
    gone_s: float = 0.0
    """And only its node was left."""
    sent: int = 0
    lost: int = 0


def cluster_config() -> dict[str, Any]:
    """Nodes of one worker each, as many as there may be workers."""
    slots = {"CPU": 1, "worker_slot": 1, "object_store_memory": 80_000_000}
    return {
        "cluster_name": "autoscaling",
        "max_workers": MAX_WORKERS,
        "provider": {"type": "fake_multinode", "gcs_address": "127.0.0.1:6379", "use_node_id_as_ip": True},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": slots, "node_config": {}, "min_workers": 0, "max_workers": MAX_WORKERS},
        },
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": IDLE_MINUTES,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
        **{name: [] for name in _EMPTY_LISTS},
    }


@dataclass
class Stage:
    """The cluster and its fleet."""

    host: RayHost
    order: Callable[..., Any]

    def workers(self) -> tuple[int, int]:
        """Wanted, and serving."""
        model = self.order("status")["models"]["m"]
        return model["wanted"], model["serving"]

    def nodes(self) -> int:
        """That were launched for workers, and live."""
        return sum(node["alive"] and "worker_slot" in node["resources"] for node in self.order("status")["nodes"])

    def since(self, start_s: float, condition: Callable[[], bool], what: str) -> float:
        """Seconds from `start_s` until `condition`."""
        eventually(condition, what, PATIENCE_S)
        return time.monotonic() - start_s


@contextmanager
def stage() -> Iterator[tuple[Stage, float]]:
    """The fleet as it is without load; and how long its first worker took, for which a node had to be launched."""
    files = Path(tempfile.mkdtemp(prefix="rf-", dir="/var/tmp"))
    try:
        shutil.copytree(tiny_model(), files / "model")
        text = FLEET.replace("MODEL", str(files / "model")).replace("MAX", str(MAX_WORKERS))
        (files / "fleet.yaml").write_text(text)
        (files / "cluster.yaml").write_text(yaml.safe_dump(cluster_config()))
        with RayHost.start(files) as host:
            host.ray_head("{}", autoscaling_config=files / "cluster.yaml")
            start_s = time.monotonic()
            host.radixfleet("fleet", "apply", "fleet.yaml", timeout_s=PATIENCE_S)
            took_s = time.monotonic() - start_s
            with host.console() as order:
                yield Stage(host, order), took_s
    finally:
        shutil.rmtree(files, ignore_errors=True)


def run() -> Story:
    """Up, and down again."""
    with stage() as (current, first_s):
        story = Story(node_for_the_first_worker_s=first_s)
        assert (current.workers(), current.nodes()) == ((1, 1), 1)
        with loading(current.host, "127.0.0.1:7070", "--clients", str(CLIENTS)) as load:
            start_s = time.monotonic()
            story.wanted_s = current.since(start_s, lambda: current.workers()[0] > 1, "more workers are wanted")
            story.nodes_s = current.since(start_s, lambda: current.nodes() == MAX_WORKERS, "nodes are launched")
            story.serving_s = current.since(
                start_s, lambda: current.workers() == (MAX_WORKERS, MAX_WORKERS), "all workers serve"
            )
            eventually(lambda: len(load.eligible_now()) == MAX_WORKERS, "the router sends to all", PATIENCE_S)
        start_s = time.monotonic()
        story.unwanted_s = current.since(start_s, lambda: current.workers() == (1, 1), "one worker is left")
        story.gone_s = current.since(start_s, lambda: current.nodes() == 1, "idle nodes are gone")
        story.sent, story.lost = _outcomes(load)
        return story


def _outcomes(load: Load) -> tuple[int, int]:
    for row in load.requests:
        if row["error"]:
            print(f"  {row['worker'] or '?'}: {row['error']}", file=sys.stderr)
    return len(load.requests), sum(bool(row["error"]) for row in load.requests)


def main() -> int:
    """The command."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if reason := why_not():
        print(f"autoscaling: {reason}", file=sys.stderr)
        return 1
    story = run()
    print(f"apply, with a node launched for the first worker: {story.node_for_the_first_worker_s:.1f} s")
    print(
        f"load begins: more workers wanted after {story.wanted_s:.1f} s, {MAX_WORKERS} nodes after "
        f"{story.nodes_s:.1f} s, {MAX_WORKERS} workers serve after {story.serving_s:.1f} s"
    )
    print(
        f"load ends: one worker after {story.unwanted_s:.1f} s, one node after {story.gone_s:.1f} s "
        f"(idle for {IDLE_MINUTES * 60:.0f} s)"
    )
    print(f"requests: {story.sent} sent, {story.lost} lost")
    return 1 if story.lost else 0


if __name__ == "__main__":
    sys.exit(main())

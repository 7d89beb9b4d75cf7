"""`radixfleet fleet` as an operator uses it, on a Ray head in namespaces of its own. One head for the whole module."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.fleet.tables import notes
from tests.support.ray_host import RayHost, eventually, why_not
from tests.support.tiny_model import tiny_model

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]

FLEET = """
routers:
  settings: {port: 7070, metrics_port: 7071, log_level: warning}
models:
  m:
    workers: {min: 2, max: 3}
    settings: {model: MODEL, runner: sim, inline: true, log_level: warning, drain_grace_s: 5}
"""


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    """Not below /tmp, which hosts have of their own."""
    path = Path(tempfile.mkdtemp(prefix="rf-", dir="/var/tmp"))
    shutil.copytree(tiny_model(), path / "model")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def host(files: Path) -> Iterator[RayHost]:
    """A head with a fleet of two workers."""
    (files / "fleet.yaml").write_text(FLEET.replace("MODEL", str(files / "model")))
    with RayHost.start(files) as host:
        host.ray_head('{"worker_slot": 3}')
        host.radixfleet("fleet", "apply", "fleet.yaml", timeout_s=250)
        yield host


@pytest.fixture(scope="module")
def order(host: RayHost) -> Iterator[Callable[..., Any]]:
    """Orders and questions to the supervisor, without the start of a command each."""
    with host.console() as order:
        yield order


def ask(host: RayHost, prompt: str = "hello") -> dict[str, Any]:
    answer = host.radixfleet("generate", "--prompt", prompt, "--max-new-tokens", "4", "--json")
    return dict(json.loads(answer.stdout))


def num_serving(host: RayHost) -> int:
    """Workers as the router knows them."""
    answer = host.radixfleet("workers", "--json", check=False)
    workers = json.loads(answer.stdout)["workers"] if answer.returncode == 0 else []
    return sum(worker["status"] == "serving" for worker in workers)


def settled(order: Callable[..., Any], *names: str) -> dict[str, Any]:
    """The status in which exactly these members serve; without names, as many as shall."""

    def found() -> dict[str, Any] | None:
        status: dict[str, Any] = order("status")
        there = {member["name"] for member in status["members"]}
        return status if status["settled"] and (not names or there == set(names)) else None

    return dict(eventually(found, f"settled {names}", timeout_s=120))


def test_no_process_of_the_fleet_yields_to_others(host: RayHost, order: Callable[..., Any]) -> None:
    """Where something else kept the cores busy, Ray's own niceness silenced workers for seconds."""
    status = settled(order, "router-0", "m-0", "m-1")
    pids = [status["supervisor"]["pid"], *(pid for member in status["members"] for pid in member["pids"])]
    assert len(pids) >= 4
    found = host.run("ps", "-o", "ni=", "-p", ",".join(map(str, pids))).stdout.split()
    assert found == [str(os.getpriority(os.PRIO_PROCESS, 0))] * len(pids)


def test_an_applied_fleet_serves(host: RayHost, order: Callable[..., Any]) -> None:
    settled(order, "router-0", "m-0", "m-1")
    assert ask(host)["worker"] in ("m-0", "m-1")
    table = host.radixfleet("fleet", "status").stdout
    assert "router-0 serving" in table
    assert "127.0.0.1:7070" in table


def test_scale_and_drain(host: RayHost, order: Callable[..., Any]) -> None:
    host.radixfleet("fleet", "scale", "m", "3")
    assert order("status")["models"]["m"]["serving"] == 3
    order("drain", ["m-0"])
    settled(order, "router-0", "m-1", "m-2", "m-3")
    order("scale", "m", 2, 2)
    left = settled(order)
    assert ask(host)["worker"] in {member["name"] for member in left["members"]}


def test_a_killed_worker_comes_back_under_its_name_and_leaves_no_orphan(
    host: RayHost, order: Callable[..., Any]
) -> None:
    """Behaviour 61."""
    before = next(member for member in settled(order)["members"] if member["kind"] == "worker")
    host.kill(before["pids"][0])

    def back() -> bool:
        now = next((each for each in order("status")["members"] if each["name"] == before["name"]), None)
        return now is not None and now["phase"] == "serving" and now["pids"] != before["pids"]

    eventually(back, "the worker serves again", timeout_s=120)
    assert not set(before["pids"]) & set(host.processes())


def test_a_killed_supervisor_goes_on_and_no_request_needs_it(host: RayHost, order: Callable[..., Any]) -> None:
    before = settled(order)
    host.kill(before["supervisor"]["pid"])
    assert ask(host)["worker"]
    now = settled(order)
    assert now["supervisor"]["pid"] != before["supervisor"]["pid"]
    assert {each["name"]: each["pids"] for each in now["members"]} == {
        each["name"]: each["pids"] for each in before["members"]
    }, "the members are the same processes"


def test_a_restarted_router_keeps_its_port_and_hears_of_the_workers_again(
    host: RayHost, order: Callable[..., Any]
) -> None:
    before = settled(order)
    order("restart", ["router-0"])
    now = eventually(
        lambda: (status := order("status"))["settled"] and not status["members"][0]["restarting"] and status,
        "restarted",
    )
    assert now["routers"] == before["routers"]
    assert now["members"][0]["pids"] != before["members"][0]["pids"]
    eventually(lambda: num_serving(host) == 2, "two workers")


def test_other_settings_replace_the_workers_and_one_that_cannot_start_says_why(
    host: RayHost, order: Callable[..., Any], files: Path
) -> None:
    before = settled(order)
    text = (files / "fleet.yaml").read_text().replace("runner: sim", "runner: sim, max_running_requests: 7")
    bad = text + "  bad: {workers: 1, settings: {model: /nowhere, runner: sim}}\n"
    (files / "bad.yaml").write_text(bad)
    order("apply", bad)

    def failed() -> bool:
        return any(each["name"] == "bad-0" and each["message"] for each in order("status")["members"])

    eventually(failed, "it has failed")
    refused = host.radixfleet("fleet", "apply", "bad.yaml", "--timeout", "0", check=False)
    assert refused.returncode == 1
    assert "bad-0: no model at /nowhere" in refused.stderr
    order("apply", text)
    now = settled(order)
    pids = {pid for member in before["members"] if member["kind"] == "worker" for pid in member["pids"]}
    assert not pids & {pid for member in now["members"] for pid in member["pids"]}


def test_a_node_that_is_opened_again_takes_the_workers_that_waited_for_it(
    host: RayHost, order: Callable[..., Any]
) -> None:
    settled(order)
    host.radixfleet("fleet", "drain", "--node", "127.0.0.1", "--no-wait")

    def successors_wait() -> bool:
        members = [each for each in order("status")["members"] if each["kind"] == "worker" and not each["leaving"]]
        return len(members) == 2 and all(each["phase"] == "pending" for each in members)

    eventually(successors_wait, "both wait for a place", timeout_s=120)
    status = json.loads(host.radixfleet("fleet", "status", "--json").stdout)
    told = "\n".join(notes(status | {"members": [each | {"phase_s": 60.0} for each in status["members"]]}))
    assert "wait for a node that has worker_slot: 1 to spare; the cluster has CPU: " in told
    assert "node 127.0.0.1 is cordoned" in told
    host.radixfleet("fleet", "drain", "--node", "127.0.0.1", "--undo")
    settled(order)
    assert ask(host)["worker"]


def test_who_stops_waiting_hears_that_the_supervisor_goes_on(host: RayHost, order: Callable[..., Any]) -> None:
    settled(order)
    command = (sys.executable, "-m", "deploy.cli", "fleet", "scale", "m", "4")
    with host.popen(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as waiting:
        eventually(lambda: order("status")["models"]["m"]["wanted"] == 4, "the order is given", timeout_s=120)
        (pid,) = [pid for pid, line in host.processes().items() if line[-3:] == ["scale", "m", "4"]]
        host.kill(pid, number=signal.SIGINT)
        _, told = waiting.communicate(timeout=120)
    assert waiting.returncode == 130
    assert "interrupted; the supervisor goes on" in told
    assert order("status")["models"]["m"]["wanted"] == 4
    order("scale", "m", 2, 2)
    settled(order)


def test_down_leaves_nothing_of_ours(host: RayHost) -> None:
    """Behaviour 61. The last test of the module: it ends the fleet."""
    host.radixfleet("fleet", "down")

    def ours() -> list[str]:
        lines = [" ".join(line) for line in host.processes().values()]
        return [line for line in lines if "Actor" in line or "Supervisor" in line or "worker.engine" in line]

    eventually(lambda: not ours(), "no actor and no engine is left", timeout_s=60)
    again = host.radixfleet("fleet", "down")
    assert "no fleet runs on this cluster" in again.stderr
    gone = host.radixfleet("fleet", "status", check=False)
    assert (gone.returncode, "no fleet runs" in gone.stderr) == (3, True)

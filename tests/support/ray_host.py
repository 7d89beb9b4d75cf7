"""A machine of its own for Ray, made of Linux namespaces: own processes, own network, own /tmp.

    with RayHost.start(tmp_path) as host:
        host.ray_head('{"worker_slot": 2}')
        host.radixfleet("fleet", "apply", "fleet.yaml")

`ray stop`, and whatever kills processes, sees those of the host alone, and all of them end with the block. Needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
_HOLD = """
set -e
ip link set lo up
{own_tmp}
mkdir -p {home}
echo up
exec sleep infinity
"""
_POLL_S = 0.1
_STARTS, _START_S = 3, 240.0
_PARTS = ("gcs_server", "raylet")
"""Of a node of Ray; the others end with them."""
_CONSOLE = """
import json, sys
from deploy.fleet.cluster import Cluster, connected
answers = sys.stdout  # connected has it silent
with connected("auto"):
    cluster = Cluster()
    for line in sys.stdin:
        method, arguments, options = json.loads(line)
        found = cluster.status() if method == "status" else cluster.order(method, *arguments, **options)
        print("ANSWER", json.dumps(found), file=answers, flush=True)
"""


def own_tmp() -> str:
    """Shell commands for a mount namespace: a /tmp of its own, in which the checkout and its Python stay visible."""
    kept = list(enumerate((path for path in {ROOT, Path(sys.prefix)} if path.is_relative_to("/tmp")), start=10))
    open_folders = [f"exec {number}<{path}" for number, path in kept]
    bind = [f"mkdir -p {path} && mount -c --bind /proc/self/fd/{number} {path}" for number, path in kept]
    return "\n".join([*open_folders, "mount -t tmpfs tmpfs /tmp", *bind])


def why_not() -> str:
    """Why there can be no such host here; empty when there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, for namespaces"
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian packages util-linux and iproute2)"
    tried = subprocess.run(["unshare", "-n", "-p", "-m", "--fork", "true"], capture_output=True, text=True, check=False)
    return f"namespaces are forbidden here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class RayHost:
    """Made by `start`. Paths below /tmp are the host's own; `files` is shared with the test."""

    holder: subprocess.Popen[str]
    init_pid: int
    files: Path
    more_environment: dict[str, str] = field(default_factory=dict)
    """For all commands from now on."""

    @classmethod
    @contextmanager
    def start(cls, files: Path) -> Iterator[RayHost]:
        """The host while the block lasts. `files` must not lie below /tmp."""
        holder = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "unshare", "-n", "-p", "-m", "--fork", "--kill-child"),
                *("--mount-proc", "bash", "-c", _HOLD.format(home=files, own_tmp=own_tmp())),
            ],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "up\n"
            (child,) = psutil.Process(holder.pid).children()
            yield cls(holder, child.pid, files)
        finally:
            holder.kill()
            holder.communicate()

    def run(self, *command: str, timeout_s: float = 120.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command there, to its end."""
        done = subprocess.run(
            self._enter(command),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self.environment,
            stdin=subprocess.DEVNULL,
        )
        assert not check or done.returncode == 0, (
            f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command there."""
        defaults: dict[str, Any] = {"text": True, "env": self.environment, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(self._enter(command), **defaults | options)

    def radixfleet(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """The command, as a user of the host runs it."""
        return self.run(sys.executable, "-m", "deploy.cli", *arguments, **options)

    def ray_head(self, resources: str, *, autoscaling_config: Path | None = None) -> None:
        """Start Ray's head, without what a test does not need, and quick to notice what dies.

        `autoscaling_config`: a cluster file, by which Ray's autoscaler launches and ends nodes.
        """
        options = ["--head", "--include-dashboard=false", f"--temp-dir={self.files}/r", f"--resources={resources}"]
        if autoscaling_config is not None:
            options += ["--num-cpus=1", f"--autoscaling-config={autoscaling_config}"]
            # Its nodes are further raylets of this host. The head then has the same id each time that it starts.
            self.more_environment |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        else:
            options.append("--no-monitor")
        self._ray_start(*options)

    def ray_node(self, resources: str) -> None:
        """Start a further Ray node on the same host."""
        self._ray_start("--address=127.0.0.1:6379", f"--resources={resources}")

    def ray_head_again(self, resources: str) -> None:
        """Start a head in the place of one that was killed, beside the nodes that still run."""
        self._ray_start("--head", "--include-dashboard=false", f"--resources={resources}")

    def redis(self, port: int) -> None:
        """Start a Redis there, in which Ray's heads keep what they know from now on."""
        log = self.files / "redis.log"
        options = ("--port", str(port), "--dir", str(self.files), "--logfile", str(log), "--appendonly", "yes")
        self.run("redis-server", "--bind", "127.0.0.1", "--daemonize", "yes", *options)
        self.more_environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{port}"
        eventually(
            lambda: self.run("redis-cli", "-p", str(port), "ping", check=False).stdout.strip() == "PONG",
            "redis answers",
        )

    def _ray_start(self, *options: str) -> None:
        """Ray gives up after 30 s, whatever else the machine has to do, and no setting of its own changes that: so what
        it left is ended, and it tries again."""
        less = ("--object-store-memory=80000000", "--disable-usage-stats", "--include-log-monitor=false")
        command = (str(BIN / "ray"), "start", *less, *options)
        before = set(self.processes())
        for _ in range(_STARTS):
            # Ray's processes outlive the command and would hold its pipes open.
            with (self.files / "ray-start.log").open("w") as log:
                starting = self.popen(*command, stdout=log, stderr=log)
                with suppress(subprocess.TimeoutExpired):
                    if starting.wait(_START_S) == 0:
                        return
                starting.kill()
                starting.wait()
            running = self.processes().items()
            left = [pid for pid, line in running if pid not in before and Path(line[0] if line else "").name in _PARTS]
            if left:
                self.run("kill", "-9", *map(str, left), check=False)  # some end with others
        raise AssertionError((self.files / "ray-start.log").read_text())

    @contextmanager
    def console(self) -> Iterator[Callable[..., Any]]:
        """A process there that stays connected: a function that gives an order to the supervisor, or asks `status`."""
        with (self.files / "console.log").open("w") as log:
            process = self.popen(
                sys.executable, "-c", _CONSOLE, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.PIPE
            )
        assert process.stdin is not None
        assert process.stdout is not None

        answers = process.stdout

        def order(method: str, *arguments: object, **options: object) -> Any:
            print(json.dumps([method, arguments, options]), file=process.stdin, flush=True)
            for line in answers:
                word, _, answer = line.partition(" ")
                if word == "ANSWER":  # Ray has its own things to say
                    return json.loads(answer)
            raise AssertionError((self.files / "console.log").read_text())

        try:
            yield order
        finally:
            process.kill()
            process.communicate()

    def processes(self) -> dict[int, list[str]]:
        """Command lines of what runs there, by the host's own process ids; zombies have ended."""
        script = (
            "import json, psutil\n"
            "ps = psutil.process_iter(['pid', 'cmdline', 'status'])\n"
            "print(json.dumps({p.info['pid']: p.info['cmdline'] for p in ps if p.info['status'] != 'zombie'}))"
        )
        listed = json.loads(self.run(sys.executable, "-c", script).stdout)
        return {int(pid): cmdline or [] for pid, cmdline in listed.items()}

    def parent(self, pid: int) -> int:
        """Of a process, by the host's own ids."""
        return int(self.run("ps", "-o", "ppid=", "-p", str(pid)).stdout)

    def tree(self, pid: int) -> list[int]:
        """A process and all that descend from it, by the host's own ids."""
        script = (
            "import psutil, sys; p = psutil.Process(int(sys.argv[1])); print(p.pid, *(c.pid for c in p.children(True)))"
        )
        return [int(each) for each in self.run(sys.executable, "-c", script, str(pid)).stdout.split()]

    def kill(self, *pids: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to processes, by the host's own ids."""
        self.run("kill", f"-{number.value}", *map(str, pids))

    @property
    def environment(self) -> dict[str, str]:
        """Of all commands there."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RADIXFLEET_"))}
        return inherited | {
            "HOME": str(self.files),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'proto'}:{ROOT}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "RAY_prestart_worker_first_driver": "0",  # workers in advance, one a CPU of each node
            "RAY_gcs_server_port_wait_time_s": "120",  # a head may start while much else does
            # A raylet that is gone is noticed within two seconds, not ten.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
            **self.more_environment,
        }

    def _enter(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.init_pid), "-n", "-p", "-m", f"--wd={self.files}", "--", *command]


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 180.0) -> Any:
    """The first true value of `condition()`. AssertionError when there is none in time. Blocks."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        if found := condition():
            return found
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain: {what}"
        time.sleep(_POLL_S)

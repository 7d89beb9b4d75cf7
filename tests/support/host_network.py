"""Several "hosts" on this machine, joined by a bridge: namespaces, each with an address, a home and sshd.

    hosts (10.77.0.1, 10.77.0.2, ...) -- veth -- bridge -- the namespace in which `ray up` is run (10.77.0.254)

Everything lies in one outer pair of network and PID namespaces, so that the machine itself notices nothing, and all
of it ends with the block. Needs root, and the Debian packages openssh-server, rsync and iproute2.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support import ray_host

NETWORK = "10.77.0"
_OUTER = """
set -e
ip link set lo up
ip link add br0 type bridge
ip addr add {network}.254/24 dev br0
ip link set br0 up
echo up
exec sleep infinity
"""
_INNER = """
set -e
ip link set lo up
while ! ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip addr add {address}/24 dev eth0
ip link set eth0 up
ip route add default via {network}.254
hostname host{number}
{own_tmp}
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
chmod 700 {home}/.ssh
mount --bind {home}/passwd /etc/passwd
exec /usr/sbin/sshd -D -e -f {home}/sshd_config
"""
_SSHD = """
HostKey {home}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
"""


def why_not() -> str:
    """Why there can be no such hosts here; empty when there can."""
    missing = [name for name in ("ssh", "rsync", "ip") if shutil.which(name) is None]
    if not Path("/usr/sbin/sshd").exists():
        missing.append("sshd")
    if missing:
        return f"needs {', '.join(missing)} (Debian packages openssh-server, rsync, iproute2)"
    return ray_host.why_not()


@dataclass
class HostNetwork:
    """Made by `start`."""

    outer_pid: int
    files: Path
    addresses: list[str]
    hosts: list[subprocess.Popen[bytes]]

    @classmethod
    @contextmanager
    def start(cls, files: Path, count: int) -> Iterator[HostNetwork]:
        """The hosts while the block lasts. `files` must not lie below /tmp."""
        key = files / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        outer = _hold(
            ["unshare", "-n", "-p", "-m", "--fork", "--kill-child", "--mount-proc"], _OUTER.format(network=NETWORK)
        )
        network = cls(psutil.Process(outer.pid).children()[0].pid, files, [], [])
        try:
            for number in range(1, count + 1):
                network._add(number)
            yield network
        finally:
            outer.kill()
            outer.communicate()
            for host in network.hosts:
                host.wait()

    def run(self, command: str, timeout_s: float = 300.0, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a shell command where an operator sits, beside the hosts."""
        log = self.files / "command.log"
        with log.open("w") as output:  # a file: what Ray leaves running would hold a pipe open
            done = subprocess.run(
                ["nsenter", "-t", str(self.outer_pid), "-n", "-p", "-m", "--wd=/", "bash", "-c", command],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
                env=self.environment,
            )
        text = log.read_text()
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{text}"
        return subprocess.CompletedProcess(command, done.returncode, text, "")

    def ssh(self, address: str, command: str, **options: float) -> str:
        """Run a command on a host."""
        options_of_ssh = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        return self.run(
            f"ssh {options_of_ssh} -i {self.files}/key root@{address} {shlex.quote(command)}", **options
        ).stdout

    @property
    def environment(self) -> dict[str, str]:
        """Of the operator."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RADIXFLEET_"))}
        return inherited | {
            "HOME": str(self.files),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "COLUMNS": "200",
        }

    def _add(self, number: int) -> None:
        address = f"{NETWORK}.{number}"
        home = self.files / f"host{number}"
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh" / "authorized_keys").write_text((self.files / "key.pub").read_text())
        users = Path("/etc/passwd").read_text()
        (home / "passwd").write_text(users.replace(":/root:", f":{home}:", 1))
        (home / ".bashrc").touch()
        (home / "sshd_config").write_text(_SSHD.format(home=home))
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / "host_key")], check=True)
        script = home / "start.sh"
        script.write_text(
            _INNER.format(address=address, network=NETWORK, number=number, home=home, own_tmp=ray_host.own_tmp())
        )
        enter = ["nsenter", "-t", str(self.outer_pid), "-n", "-p", "-m", "--"]
        with (self.files / f"host{number}.log").open("w") as log:
            host = subprocess.Popen(
                [
                    *enter,
                    "unshare",
                    "-n",
                    "-p",
                    "-m",
                    "-u",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                    "bash",
                    str(script),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

        self.hosts.append(host)

        def inner_pid() -> int | None:
            for process in psutil.process_iter(["cmdline"]):
                line = process.info["cmdline"] or []
                if line[:1] == ["bash"] and line[-1] == str(script):
                    return int(process.pid)
            return None

        pid = ray_host.eventually(inner_pid, f"host {number} starts", 20)
        outer_ns = ["nsenter", "-t", str(self.outer_pid), "-n", "--", "ip", "link"]
        subprocess.run(
            [*outer_ns, "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid)], check=True
        )
        subprocess.run([*outer_ns, "set", f"v{number}", "master", "br0", "up"], check=True)
        self.addresses.append(address)
        ray_host.eventually(lambda: "up" in self.ssh(address, "echo up", timeout_s=20, check=False), "sshd answers", 30)


def _hold(command: list[str], script: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command, "bash", "-c", script],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process

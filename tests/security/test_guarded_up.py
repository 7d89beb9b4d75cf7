"""`radixfleet up` with mutual TLS and keys, as an operator runs it; and no key anywhere in what it writes or shows."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from radixfleet.keys import key_line, new_key
from tests.support.certificates import Authority, Pair
from tests.support.processes import survivors
from tests.support.tiny_model import tiny_model
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RADIXFLEET = (sys.executable, "-m", "deploy.cli")
NUM_WORKERS = 2
COMMAND_S = 150.0
"""For a command, on a machine that is busy with other things."""


@dataclass(frozen=True)
class Up:
    """A running `radixfleet up`."""

    process: subprocess.Popen[bytes]
    directory: Path
    ca: Path
    client: Pair
    key: str

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def token(self) -> str:
        return (self.run_dir / "admin-token").read_text().strip()

    @property
    def endpoint(self) -> str:
        return (self.run_dir / "router.address").read_text().strip()

    def command(self, *arguments: str, key: str | None, text: str = "") -> subprocess.CompletedProcess[str]:
        """A command of a client with a certificate; the key comes by the environment."""
        flags = ("--endpoint", self.endpoint, "--tls-ca", self.ca, "--tls-cert", self.client.cert)
        environment = {**os.environ, "RADIXFLEET_TLS_KEY": str(self.client.key)}
        if key is not None:
            environment["RADIXFLEET_API_KEY"] = key
        return subprocess.run(
            [*RADIXFLEET, *arguments, *map(str, flags)],
            capture_output=True,
            text=True,
            input=text,
            timeout=COMMAND_S,
            check=False,
            env=environment,
        )

    def plain_command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command as it is."""
        return subprocess.run([*RADIXFLEET, *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=False)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    directory, ours = tmp_path, Authority("ours")
    ca, fleet, client = ours.write(directory), ours.issue("fleet", directory), ours.issue("client", directory)
    key = new_key()
    keys = directory / "keys"
    keys.write_text(key_line("alice", key) + "\n")
    options = {
        "--model": tiny_model(),
        "--workers": NUM_WORKERS,
        "--run-dir": directory / "run",
        "--port": 0,
        "--router-metrics-port": 0,
        "--http-port": 0,
        "--runner": "sim",
        "--log-level": "debug",
        "--tls-cert": fleet.cert,
        "--tls-key": fleet.key,
        "--tls-ca": ca,
        "--tls-client-ca": ca,
        "--api-keys": keys,
    }
    with (directory / "up.out").open("wb") as output:
        process = subprocess.Popen(
            [*RADIXFLEET, "up", *(str(part) for option in options.items() for part in option)],
            stdout=output,
            stderr=output,
            env={**os.environ, "RADIXFLEET_ROUTER_LOG_LEVEL": "debug"},
        )
        try:
            yield Up(process, directory, ca, client, key)
        finally:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            process.send_signal(signal.SIGINT)
            process.wait(COMMAND_S)
            assert survivors(family) == []


async def test_a_guarded_fleet_serves_who_has_key_and_certificate_and_shows_no_secret(up: Up) -> None:
    """Looks for the secrets at the end: in all logs at debug, every command line, and what the commands printed."""
    output = up.directory / "up.out"
    await until(lambda: b"try     " in output.read_bytes() or up.process.poll() is not None, "up", timeout_s=200)
    assert stat.S_IMODE((up.run_dir / "admin-token").stat().st_mode) == 0o600
    unknown = "rfk_unknown-and-secret-all-the-same"
    shown: dict[str, str] = {}

    def command(*arguments: str, key: str | None, text: str = "") -> subprocess.CompletedProcess[str]:
        done = up.command(*arguments, key=key, text=text)
        shown[f"{arguments[0]} {len(shown)}"] = done.stdout + done.stderr
        return done

    done = command(
        "generate", "--raw", "--prompt", "hello", "--max-new-tokens", "3", "--ignore-eos", "--json", key=up.key
    )
    assert json.loads(done.stdout)["completion_tokens"] == 3, done.stderr
    chat = command("chat", "--max-new-tokens", "3", key=up.key, text="hello\n")
    assert (chat.returncode, "prompt tokens cached" in chat.stderr) == (0, True), chat.stderr
    listed = command("workers", "--json", key=up.token)
    assert len(json.loads(listed.stdout)["workers"]) == NUM_WORKERS, listed.stderr
    refused = command("workers", key=unknown)
    assert (refused.returncode, "key" in refused.stderr) == (4, True), refused.stderr
    bare = up.plain_command("workers", "--endpoint", up.endpoint, "--api-key", f"@{up.run_dir / 'admin-token'}")
    assert (bare.returncode, "--tls-ca" in bare.stderr) == (3, True), bare.stderr

    family = psutil.Process(up.process.pid).children(recursive=True)
    shown["arguments"] = " ".join(word for child in family for word in child.cmdline())
    shown["bare"] = bare.stdout + bare.stderr
    shown |= {path.name: path.read_text() for path in (*up.run_dir.glob("*.log"), output)}
    assert sum(name.endswith(".log") for name in shown) == NUM_WORKERS + 1
    assert "key=alice" in shown["router.log"]
    for name, text in shown.items():
        for secret in (up.key, up.token, unknown):
            assert secret not in text, f"a secret is in {name}"

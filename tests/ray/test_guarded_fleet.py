"""A fleet on Ray behind mutual TLS, keys and an admin token, with two routers, as an operator runs it.

One Ray head in namespaces of its own for the whole module; the last test ends the fleet.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from radixfleet.keys import key_line, new_key
from tests.support.ray_host import RayHost, eventually, why_not
from tests.support.secured_fleet import TOKEN, Certificates
from tests.support.tiny_model import tiny_model

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]

FLEET = """
routers:
  count: 2
  settings: {port: 7070, metrics_port: 7071, http_port: -1, GUARDS}
models:
  m:
    workers: 2
    settings: {model: DIR/model, runner: sim, inline: true, drain_grace_s: 5, GUARDS}
"""
GUARDS = """log_level: debug, api_keys: [DIR/keys.txt], admin_token: "@DIR/admin-token",
      tls_cert: DIR/fleet.pem, tls_key: DIR/fleet.key, tls_ca: DIR/ca.pem, tls_client_ca: DIR/ca.pem"""
ROUTERS = ("127.0.0.1:7070", "127.0.0.1:7080")
PROMPT = "A prompt that is longer than a few blocks of sixty-four tokens, so that routers have something to know. " * 6
UNREACHABLE, REFUSED = 3, 4
"""Exit codes."""
SETTLED_S = 200.0


@dataclass
class Guarded:
    """The fleet, and its client, who has a certificate."""

    host: RayHost
    certificates: Certificates
    key: str
    shown: list[str] = field(default_factory=list)
    """All that the client's and the operator's commands printed."""

    @property
    def files(self) -> Path:
        """What the host and the test share."""
        return self.host.files

    def client(self, *arguments: str, router: str, key: str | None, tls: bool = True) -> Any:
        """A command of the client, at one of the routers."""
        own = self.certificates.client
        wire = {"TLS_CA": self.certificates.ca, "TLS_CERT": own.cert, "TLS_KEY": own.key} if tls else {}
        values = wire | ({"API_KEY": key} if key else {})
        environment = [f"RADIXFLEET_{name}={value}" for name, value in values.items()]
        command = ("python", "-m", "deploy.cli", *arguments, "--endpoint", router)
        return self._noted(self.host.run("env", *environment, *command, check=False))

    def generate(self, router: str) -> dict[str, Any]:
        """A completion of PROMPT."""
        arguments = ("generate", "--raw", "--prompt", PROMPT, "--max-new-tokens", "4", "--ignore-eos", "--json")
        done = self.client(*arguments, router=router, key=self.key)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def explain(self, router: str) -> dict[str, Any]:
        """What a router knows of PROMPT; empty when no worker is eligible yet."""
        done = self.client("explain", "--raw", "--prompt", PROMPT, "--json", router=router, key=self.key)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    @contextmanager
    def asking(self) -> Iterator[list[dict[str, Any]]]:
        """A client that knows both routers asks all the time, see `tests.ray.asking`; what became of each request."""
        own = self.certificates.client
        process = self.host.popen(
            *(sys.executable, "-m", "tests.ray.asking", *ROUTERS),
            *map(str, (self.certificates.ca, own.cert, own.key)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.host.environment | {"RADIXFLEET_API_KEY": self.key},
        )
        outcomes: list[dict[str, Any]] = []
        assert process.stdin is not None
        assert process.stdout is not None
        lines = process.stdout
        reader = threading.Thread(target=lambda: outcomes.extend(map(json.loads, lines)), daemon=True)
        reader.start()
        try:
            yield outcomes
        finally:
            process.stdin.close()
            reader.join(SETTLED_S)
            process.wait(SETTLED_S)
            lines.close()

    def operator(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A `radixfleet fleet` command, which has neither key nor certificate."""
        return self._noted(self.host.radixfleet("fleet", *arguments, timeout_s=250))

    def _noted(self, done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
        self.shown.append(done.stdout + done.stderr)
        return done


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    files = Path(tempfile.mkdtemp(prefix="rf-", dir="/var/tmp"))  # not below /tmp, which hosts have of their own
    try:
        shutil.copytree(tiny_model(), files / "model")
        key = new_key()
        (files / "keys.txt").write_text(key_line("alice", key) + "\n")
        (files / "admin-token").write_text(TOKEN + "\n")
        (files / "fleet.yaml").write_text(FLEET.replace("GUARDS", GUARDS).replace("DIR", str(files)))
        with RayHost.start(files) as host:
            fleet = Guarded(host, Certificates.make(files), key)
            host.ray_head('{"worker_slot": 3}')
            fleet.operator("apply", "fleet.yaml")
            yield fleet
    finally:
        shutil.rmtree(files, ignore_errors=True)


@pytest.fixture(scope="module")
def order(guarded: Guarded) -> Iterator[Callable[..., Any]]:
    """Orders and questions to the supervisor, without the start of a command each."""
    with guarded.host.console() as order:
        yield order


@pytest.fixture
def settled(order: Callable[..., Any]) -> Callable[[], dict[str, Any]]:
    """Whatever a test before left: the status once everything wanted serves, and nothing else is there."""

    def status() -> dict[str, Any] | None:
        found = order("status")
        changing = any(each["leaving"] or each["restarting"] for each in found["members"])
        return found if found["settled"] and not changing else None

    return lambda: dict(eventually(status, "the fleet has settled", SETTLED_S))


def test_a_prefix_that_one_router_brought_to_a_worker_is_known_to_the_other(guarded: Guarded) -> None:
    first, second = ROUTERS
    eventually(
        lambda: guarded.explain(second).get("reason") == "load", "the second router has both workers, neither with it"
    )
    there = guarded.generate(first)
    known = eventually(
        lambda: (found := guarded.explain(second)).get("reason") == "prefix" and found, "the second router knows of it"
    )
    assert known["worker_id"] == there["worker"]
    assert max(each["matched_tokens"] for each in known["candidates"]) > 128
    again = guarded.generate(second)
    assert (again["worker"], again["reason"]) == (there["worker"], "prefix")
    assert again["cached_tokens"] > 128


@pytest.mark.parametrize("router", ROUTERS)
def test_nobody_comes_in_without_key_or_certificate(guarded: Guarded, router: str) -> None:
    unknown = guarded.client("workers", router=router, key=None)
    assert (unknown.returncode, "a key is needed here" in unknown.stderr) == (REFUSED, True), unknown.stderr
    plain = guarded.client("workers", router=router, key=guarded.key, tls=False)
    assert plain.returncode == UNREACHABLE, plain.stderr


def test_workers_are_guarded_as_well(guarded: Guarded) -> None:
    status = json.loads(guarded.operator("status", "--json").stdout)
    address = next(each["address"] for each in status["members"] if each["kind"] == "worker")
    arguments = ("generate", "--raw", "--prompt", "hello", "--max-new-tokens", "2", "--ignore-eos", "--json")
    assert guarded.client(*arguments, router=address, key=None).returncode == REFUSED
    assert guarded.client(*arguments, router=address, key=TOKEN, tls=False).returncode == UNREACHABLE
    assert guarded.client(*arguments, router=address, key=guarded.key).returncode == 0


def test_the_operator_drains_a_worker_and_both_routers_go_on(
    guarded: Guarded, settled: Callable[[], dict[str, Any]]
) -> None:
    names = [each["name"] for each in settled()["members"] if each["kind"] == "worker"]
    guarded.operator("drain", names[0])
    status = settled()
    assert status["routers"] == list(ROUTERS)
    left = [each["name"] for each in status["members"] if each["kind"] == "worker"]
    assert len(left) == 2
    assert names[0] not in left
    for router in ROUTERS:
        assert guarded.generate(router)["worker"] in left


def test_other_settings_for_all_never_leave_fewer_workers_or_no_router(
    guarded: Guarded, order: Callable[..., Any], settled: Callable[[], dict[str, Any]]
) -> None:
    """A client that knows both routers is served all the time, while both and all workers are replaced."""
    before = {pid for each in settled()["members"] for pid in each["pids"]}
    text = (guarded.files / "fleet.yaml").read_text().replace("drain_grace_s: 5", "drain_grace_s: 6")
    seen: list[dict[str, Any]] = []

    def replaced() -> bool:
        seen.append(order("status"))
        pids = {pid for each in seen[-1]["members"] for pid in each["pids"]}
        return bool(seen[-1]["settled"]) and not before & pids

    with guarded.asking() as outcomes:
        eventually(lambda: set(ROUTERS) <= {each["router"] for each in outcomes}, "both routers answer", SETTLED_S)
        order("apply", text.replace("http_port: -1", "http_port: -1, connect_timeout_s: 6"))
        eventually(replaced, "all have the new settings", SETTLED_S)
        num_before = len(outcomes)
        eventually(lambda: len(outcomes) > num_before + 4, "it goes on", SETTLED_S)
    assert [each for each in outcomes if not each["router"]] == [], "no router answered"
    assert min(status["models"]["m"]["serving"] for status in seen) == 2
    assert all(
        ("router", "serving") in {(each["kind"], each["phase"]) for each in status["members"]} for status in seen
    )
    assert {each["name"]: each["current"] for each in seen[-1]["members"] if not each["current"]} == {}


def test_down_works_and_no_secret_was_written_or_shown(guarded: Guarded, settled: Callable[[], dict[str, Any]]) -> None:
    """The last test of the module. Looks into all that Ray's session holds, at log level debug."""
    members = settled()["members"]
    words = [" ".join(words) for words in guarded.host.processes().values()]
    assert sum("Actor" in each for each in words) >= len(members), "the command lines of routers and workers"
    for router in ROUTERS:
        guarded.generate(router)
    guarded.operator("down")
    logs = {str(path): text_of(path) for path in (guarded.files / "r").rglob("*") if path.is_file()}
    ours = [name for name, text in logs.items() if re.search(r"^:actor_name:(Router|Worker)Actor\n(.*\n)+", text, re.M)]
    assert len(ours) >= len(members), f"logs of routers and workers are among {sorted(logs)}"
    assert any("key=alice" in logs[name] for name in ours), "at debug, routers log who asks"
    private = guarded.certificates.fleet.key.read_text().splitlines()[1]
    places = logs | {"command lines": "\n".join(words), "output": "\n".join(guarded.shown)}
    for name, text in places.items():
        for secret in (TOKEN, guarded.key, private):
            assert secret not in text, f"a secret is in {name}"


def text_of(path: Path) -> str:
    """Of any file."""
    return path.read_bytes().decode(errors="replace")

"""What the runs with other gateways and engines have in common: environments, processes, waiting, remarks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.bench.peers import environments
from deploy.bench.peers.servers import free_port
from tests.support.waiting import wait_until

ENVIRONMENTS = Path.home() / ".cache" / "radixfleet" / "interop"
WHEELS = {"smg": "smg==1.13.0", "sglang-router": "sglang-router==0.3.2"}
"""Other people's gateways, and the environments in which they are."""


def environment(folder: Path, *steps: Sequence[str]) -> Path:
    """The interpreter of an environment in `folder`, made once. `steps`: arguments of `pip install`, in order."""
    return environments.environment(folder, *steps, tell=say)


@contextmanager
def process(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and what it started too; what it prints goes to `log`.

    From the main thread: SIGTERM ends the block, as Ctrl-C does.
    """
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with _started(command, log, variables) as child:
            yield child
    finally:
        if signal.getsignal(signal.SIGTERM) is _leave:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _started(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
            start_new_session=True,
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _leave(number: int, _: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would break off what ends the processes
    sys.exit(128 + number)


def worker_command(model: str, port: int, worker_id: str, *options: str) -> list[str]:
    """One worker of ours."""
    fixed = ["--port", str(port), "--metrics-port", "0", "--worker-id", worker_id, "--served-model-name", "tiny"]
    return [sys.executable, "-m", "worker", "--model", model, *fixed, *options]


def router_command(port: int, workers: Sequence[str], *options: str) -> list[str]:
    """A router of ours."""
    fixed = ["--port", str(port), "--metrics-port", "0", "--http-port", "-1", "--workers", ",".join(workers)]
    return [sys.executable, "-m", "router", *fixed, *options]


def gateway_command(
    name: str, python: Path, port: int, worker_urls: Sequence[str], *, log_level: str = "warn"
) -> list[str]:
    """One of `WHEELS`, in the environment of `python`, with its cache-aware policy."""
    start = (
        [str(python.parent / "smg"), "launch"] if name == "smg" else [str(python), "-m", "sglang_router.launch_router"]
    )
    fixed = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return [*start, *fixed, "--policy", "cache_aware", "--log-level", log_level, "--worker-urls", *worker_urls]


def until(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    """Wait. AssertionError when it never comes true."""
    wait_until(condition, lambda: what, timeout_s=timeout_s)


def say(line: str) -> None:
    """To the terminal."""
    print(line, flush=True)

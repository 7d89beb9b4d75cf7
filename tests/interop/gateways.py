"""The same load through our router and through other people's, before the same workers.

    python -m tests.interop.gateways --sglang-router --rounds 2 --requests 400 --rate 12
    python -m tests.interop.gateways --kv-tokens 16384    what the prompts share is as much as all workers can hold

Three workers with simulated GPUs and the demonstration model's tokenizer. smg reaches them by SGLang's gRPC dialect and
follows their KV events; sglang-router (`--sglang-router`) speaks an older one, so before each worker it finds a router
of ours, which gives it OpenAI's HTTP and costs a step more. Then `radixfleet bench fleet --as-text` asks each in turn,
as often as `--rounds` says; other options are handed on to it. Wheels are installed under --environments once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from deploy.bench.peers.servers import free_port
from tests.interop.engines import (
    ENVIRONMENTS,
    WHEELS,
    environment,
    gateway_command,
    process,
    router_command,
    say,
    until,
)

NUM_WORKERS = 3
MODEL = "demo"


class Gateways:
    """Processes, started one after the other, that end with `stack`."""

    def __init__(self, stack: ExitStack, folder: Path, environments: Path, kv_tokens: int) -> None:
        self._stack = stack
        self._folder = folder
        self._environments = environments
        self.workers = [self._worker(number, kv_tokens) for number in range(NUM_WORKERS)]
        self.urls: dict[str, str] = {}

    def radixfleet(self) -> None:
        """Ours."""
        self.urls["radixfleet"] = self._router("radixfleet", self.workers)

    def smg(self) -> None:
        """By gRPC."""
        self._gateway("smg", [f"grpc://{worker}" for worker in self.workers])

    def sglang_router(self) -> None:
        """By HTTP."""
        doors = [self._router(f"door{number}", [worker]) for number, worker in enumerate(self.workers)]
        for door in doors:
            until(partial(_serves, door), f"a worker behind {door}")
        self._gateway("sglang-router", doors)

    def _worker(self, number: int, kv_tokens: int) -> str:
        address = f"127.0.0.1:{free_port()}"
        fixed = ["--port", address.rpartition(":")[2], "--metrics-port", "0", "--worker-id", f"w{number}"]
        sim = ["--model", MODEL, "--runner", "sim", "--max-total-tokens", str(kv_tokens), "--log-level", "warning"]
        self._start([sys.executable, "-m", "worker", *fixed, *sim], f"w{number}")
        return address

    def _router(self, name: str, workers: Sequence[str]) -> str:
        port = str(free_port())
        command = router_command(0, workers, "--log-level", "warning")
        command[command.index("--http-port") + 1] = port
        self._start(command, name)
        return f"http://127.0.0.1:{port}"

    def _gateway(self, name: str, worker_urls: Sequence[str]) -> None:
        port = free_port()
        python = environment(self._environments / name, (WHEELS[name],))
        self._start(gateway_command(name, python, port, worker_urls), name)
        self.urls[name] = f"http://127.0.0.1:{port}"

    def _start(self, command: list[str], name: str) -> None:
        self._stack.enter_context(process(command, self._folder / f"{name}.log"))


def _serves(url: str) -> bool:
    """Whether requests are answered there; a first one may be what tells."""
    body = f'{{"model": "{MODEL}", "prompt": "are you there", "max_tokens": 1}}'.encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help=f"[{ENVIRONMENTS}]")
    parser.add_argument("--sglang-router", action="store_true", help="also this one")
    parser.add_argument("--rounds", type=int, default=2, help="so often is each asked, in alternation")
    parser.add_argument("--kv-tokens", type=int, default=65_536, help="of each worker")
    arguments, options = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="radixfleet-gateways-"))
    say(f"logs: {folder}")
    with ExitStack() as stack:
        gateways = Gateways(stack, folder, arguments.environments, arguments.kv_tokens)
        gateways.radixfleet()
        gateways.smg()
        if arguments.sglang_router:
            gateways.sglang_router()
        for url in gateways.urls.values():
            until(partial(_serves, url), f"workers behind {url}")
        command = [sys.executable, "-m", "deploy.cli", "bench", "fleet", "--as-text", "--model", MODEL]
        command += ["--workers", str(NUM_WORKERS), "--kv-tokens", str(arguments.kv_tokens)]
        for turn in range(1, arguments.rounds + 1):
            for name, url in gateways.urls.items():
                command += ["--http", f"{name} {turn}={url}"]
        return subprocess.run([*command, *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""A live fleet for other people's clients: `radixfleet up` with two simulated workers, and two workers more.

Models: "tiny", whose tokens are invented at the speed of a GPU, with a context of a million tokens; "silent", which
answers "xxxx" and then says nothing for as many seconds as the client allows tokens, before it ends the stream; and
"computed", two random layers on the CPU, whose answers keep to schemas.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.interop.engines import process, until
from tests.support.tiny_model import tiny_model

CONTEXT_TOKENS = 1_200_000
_START_S = 240.0


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """Where it is."""

    grpc: str
    """host:port."""
    http: str
    """host:port."""
    model_dir: Path
    """Of "tiny": a Hugging Face directory, for tools that count tokens themselves."""

    @property
    def url(self) -> str:
        """What OpenAI's clients take as their base."""
        return f"http://{self.http}/v1"

    def metric(self, name: str) -> float:
        """A sample of the router's metrics page."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} "))


@contextmanager
def live_fleet(folder: Path) -> Iterator[LiveFleet]:
    """Until the block is left. Logs go to `folder`."""
    with ExitStack() as stack:
        model_dir = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny"
        shutil.copytree(tiny_model(max_context=CONTEXT_TOKENS), model_dir)
        up = [sys.executable, "-m", "deploy.cli", "up", "--workers", "2", "--model", str(model_dir), "--runner", "sim"]
        up += ["--context-length", str(CONTEXT_TOKENS), "--max-total-tokens", str(2 * CONTEXT_TOKENS)]
        up += ["--port", "0", "--router-metrics-port", "0", "--http-port", "0", "--run-dir", str(folder)]
        fleet = stack.enter_context(process(up, folder / "up.log"))
        address = folder / "router.address"
        until(lambda: address.exists() or fleet.poll() is not None, f"the router listens; see {folder}", _START_S)
        grpc, http = address.read_text().strip(), (folder / "router.address.http").read_text().strip()
        silent = [sys.executable, "-m", "tests.interop.silent_worker", grpc]
        stack.enter_context(process(silent, folder / "silent.log"))
        computed = [sys.executable, "-m", "worker", "--model", str(tiny_model()), "--served-model-name", "computed"]
        computed += ["--port", "0", "--metrics-port", "0", "--routers", grpc, "--device-memory", "256MiB"]
        stack.enter_context(process(computed, folder / "computed.log"))
        until(lambda: _serving(http) == 4, f"all workers serve; see {folder}", _START_S)
        yield LiveFleet(grpc, http, model_dir)


def _serving(http: str) -> int:
    """Workers that get requests."""
    try:
        with urllib.request.urlopen(f"http://{http}/health", timeout=10) as page:
            return int(json.load(page)["workers"])
    except urllib.error.HTTPError:
        return 0

"""A real Prometheus on a port that the system picks, for tests; and its promtool."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.waiting import wait_until

BINARY, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
WITHOUT = "no prometheus and promtool on this machine: apt-get install -y prometheus"
_READY_S = 60.0

needs_prometheus = pytest.mark.skipif(BINARY is None or PROMTOOL is None, reason=WITHOUT)


@dataclass(frozen=True, slots=True)
class Curve:
    """One series."""

    labels: Mapping[str, str]
    points: list[tuple[float, float]]
    """(Unix time, value)"""


class Prometheus:
    """One that runs."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **arguments: str) -> Any:
        """`data` of an answer of its API."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{url}: {error.read().decode()}") from None

    def page(self, path: str) -> str:
        """Text of one of its own pages."""
        with urllib.request.urlopen(f"http://{self.address}/{path}", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def query(self, expr: str, at_s: float | None = None) -> list[float]:
        """Values of an instant vector, those that are no numbers left out."""
        moment = {} if at_s is None else {"time": f"{at_s:.3f}"}
        result = self.get("query", query=expr, **moment)["result"]
        return [value for each in result if not math.isnan(value := float(each["value"][1]))]

    def curves(self, expr: str, began_s: float, ended_s: float, step_s: float) -> list[Curve]:
        """Values over time of each series of an expression."""
        span = {"start": f"{began_s:.3f}", "end": f"{ended_s:.3f}", "step": f"{step_s:g}"}
        result = self.get("query_range", query=expr, **span)["result"]
        return [Curve(each["metric"], [(at_s, float(value)) for at_s, value in each["values"]]) for each in result]


def promtool(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run it; both outputs in `stdout`."""
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        timeout=60,
        check=False,
    )


@contextmanager
def running_prometheus(config: Mapping[str, Any]) -> Iterator[Prometheus]:
    """One that scrapes by `config`, ready to be asked. Ended, and its data deleted, when the block is left."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(prefix="prometheus-") as folder:
        path = Path(folder) / "prometheus.yml"
        path.write_text(yaml.safe_dump(dict(config)))
        process = subprocess.Popen(
            [BINARY, f"--config.file={path}", f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        log: list[str] = []
        try:
            address = _address(process, log)
            reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
            reader.start()
            _wait_until_ready(address, log)
            yield Prometheus(address)
        finally:
            process.terminate()
            process.wait(60)
            process.stderr.close()


def _address(process: subprocess.Popen[str], log: list[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        found = re.search(r'"Listening on" address=(\S+)', line)
        if found:
            return found[1]
    raise AssertionError(f"prometheus did not start:\n{''.join(log)}")


def _wait_until_ready(address: str, log: list[str]) -> None:
    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    wait_until(is_ready, lambda: f"prometheus is not ready:\n{''.join(log)}", timeout_s=_READY_S)

"""Settings of the whole suite."""

import os
import signal
from pathlib import Path
from typing import Any

# A shell's background jobs ignore Ctrl-C and hand that on: what tests interrupt would never hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch and OpenMP start. Threads that wait for each other by spinning become ten times slower, and more, on a
# machine that has other work; what the suite checks does not depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Before Triton is imported: without a GPU, its interpreter computes the kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

# Time limits belong to the suite's timeout: a busy machine must not fail an example that is right. Continuous
# integration judges a commit, not its luck: the same examples each time there, new ones each time elsewhere.
settings.register_profile("radixfleet", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("radixfleet")

_LONGEST = ("ray", "integration")
"""Folders whose tests wait for clusters and processes: they come first, that no process ends long after the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders by folder; within one, what is there stays in order."""
    root = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        return _LONGEST.index(folder) if folder in _LONGEST else len(_LONGEST)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In the place of `--dist loadfile`, which `make test` asks for."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.support.one_cluster import OneClusterAtATime  # a machine with GPUs may lack pytest-xdist

    return OneClusterAtATime(config, log)

"""Which processes are still there, in tests."""

from __future__ import annotations

from collections.abc import Sequence

import psutil


def survivors(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. A zombie has ended: only its parent (in a container often nobody) has not asked how."""
    running = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
        except psutil.NoSuchProcess:
            continue
    return running

"""What this machine has to share among workers. Cheap: imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import psutil

_CPU_MEMORY_SHARE = 0.5
"""Of the free memory, for all workers together: the rest is for the system and for what else runs."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def num_gpus() -> int:
    """NVIDIA GPUs that this process may use, by their device files and CUDA_VISIBLE_DEVICES."""
    present = sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len([name for name in visible.split(",") if name.strip()]))


def worker_share(index: int, num_workers: int, device: str | None) -> tuple[dict[str, object], dict[str, str]]:
    """Settings and environment of worker `index` of `num_workers` on this machine, so that together they use it once.

    On GPUs: one each. On the CPU: equal parts of the cores and of the memory. What the operator sets himself goes
    before these. Raises UsageError when there are fewer GPUs than workers.
    """
    gpus = 0 if device == "cpu" else num_gpus()
    if gpus and num_workers > gpus:
        raise click.UsageError(f"{num_workers} workers, but {gpus} GPUs: use --workers {gpus}, or --device cpu")
    if gpus:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(number) for number in range(gpus))).split(",")
        return {}, {"CUDA_VISIBLE_DEVICES": names[index]}
    settings: dict[str, object] = {}
    if "RADIXFLEET_WORKER_THREADS" not in os.environ:
        settings["threads"] = max(1, num_cores() // num_workers)
    if "RADIXFLEET_WORKER_DEVICE_MEMORY" not in os.environ:
        settings["device_memory"] = int(psutil.virtual_memory().available * _CPU_MEMORY_SHARE / num_workers)
    return settings, {}

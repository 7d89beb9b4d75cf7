"""What this machine has to share among workers. Cheap: imports no torch."""

from __future__ import annotations

import os
import re
from itertools import takewhile
from pathlib import Path

import click
import psutil

_DEVICE_FILES = Path("/dev")
_CPU_MEMORY_SHARE = 0.5
"""Of the free memory, for all workers together: the rest is for the system and for what else runs."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def load_of_others() -> float | None:
    """How many processes of the last minute wanted a core at once, where there are fewer cores; else None."""
    load = psutil.getloadavg()[0]
    return load if load > num_cores() else None


def gpu_names() -> list[str]:
    """NVIDIA GPUs that this process may use, named as CUDA_VISIBLE_DEVICES names them: by number, UUID or MIG slice.

    By their device files, and by what the variable lets through already: as for CUDA, its list ends at the first entry
    that is no device (-1).
    """
    present = sum(1 for path in _DEVICE_FILES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(present)]
    names = list(takewhile(_is_device, (name.strip() for name in visible.split(","))))
    has_slices = any(name.startswith("MIG-") for name in names)  # several of one card
    return names if has_slices and present else names[:present]


def _is_device(name: str) -> bool:
    return bool(name) and not name.startswith("-") and name != "NoDevFiles"


def worker_share(index: int, num_workers: int, device: str | None) -> tuple[dict[str, object], dict[str, str]]:
    """Settings and environment of worker `index` of `num_workers` on this machine, so that together they use it once.

    On GPUs: one each. On the CPU: equal parts of the cores and of the memory. What the operator sets himself goes
    before these. Raises UsageError when there are fewer GPUs than workers.
    """
    gpus = [] if device == "cpu" else gpu_names()
    if gpus and num_workers > len(gpus):
        raise click.UsageError(
            f"{num_workers} workers, but {len(gpus)} GPUs: use --workers {len(gpus)}, or --device cpu"
        )
    if gpus and device is not None and device.startswith("cuda:"):
        if num_workers > 1:
            raise click.UsageError(f"{num_workers} workers would share {device}: use --device cuda for a GPU each")
        return {}, {}
    if gpus:
        return {}, {"CUDA_VISIBLE_DEVICES": gpus[index]}
    settings: dict[str, object] = {}
    if "RADIXFLEET_WORKER_THREADS" not in os.environ:
        settings["threads"] = max(1, num_cores() // num_workers)
    if "RADIXFLEET_WORKER_DEVICE_MEMORY" not in os.environ:
        settings["device_memory"] = int(psutil.virtual_memory().available * _CPU_MEMORY_SHARE / num_workers)
    return settings, {}

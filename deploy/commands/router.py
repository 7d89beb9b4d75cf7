"""`radixfleet router`: one router, in this process or in several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from radixfleet.settings import click_options, load
from router.config import RouterSettings
from router.supervisor import run


@click.command()
@click_options(RouterSettings)
def router(config: Path | None, **options: Any) -> int:
    """Run a router: it sends each request to the worker where the least work is left to do.

    Workers are named by --workers, or register themselves. They may come and go while the router runs.

    A router is one process on one core. When that core is busy (`process_cpu_seconds_total`, or `top`), --processes N
    runs N of them behind the same ports: the kernel deals connections among them, each follows every worker, and what
    one is told about the fleet all know. It pays when cores idle beside a busy router, with several clients: all that
    comes over one connection stays with one process. Each has metrics of its own, listed at the first one's /sd; limits
    for clients, and the queue, count in each by itself.

    \b
    radixfleet router
    radixfleet router --workers 10.0.0.2:7080,10.0.0.3:7080 --host 0.0.0.0
    radixfleet router --host 0.0.0.0 --processes 4
    """
    return run(load(RouterSettings, options, config))

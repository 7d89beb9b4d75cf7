"""`radixfleet router`: one router, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from radixfleet.settings import click_options, load
from router.app import run
from router.config import RouterSettings


@click.command()
@click_options(RouterSettings)
def router(config: Path | None, **options: Any) -> int:
    """Run one router: it sends each request to the worker where the least work is left to do.

    Workers are named by --workers, or register themselves. They may come and go while the router runs.

    \b
    radixfleet router
    radixfleet router --workers 10.0.0.2:7080,10.0.0.3:7080 --host 0.0.0.0
    """
    return run(load(RouterSettings, options, config))

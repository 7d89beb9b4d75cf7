"""`radixfleet worker`: one worker, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from radixfleet.settings import click_options, load
from worker.__main__ import run
from worker.config import WorkerSettings


@click.command()
@click_options(WorkerSettings)
def worker(config: Path | None, **options: Any) -> int:
    """Run one worker: one model on one device, behind gRPC.

    It answers clients by itself; with --routers it joins a fleet. It loads the model, measures what a step needs,
    prints how it divides the memory, and serves until SIGTERM or Ctrl-C, upon which it drains.

    \b
    radixfleet worker --model demo
    radixfleet worker --model ./Qwen3-0.6B --routers 10.0.0.1:7070 --host 0.0.0.0
    """
    return run(load(WorkerSettings, options, config))

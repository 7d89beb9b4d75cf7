"""`python -m router`: runs one router until it is told to stop.

SIGTERM or Ctrl-C drains it: no new requests, running ones may finish within --drain-grace-s; a second one ends it at
once. Exit codes: 0 stopped as asked, 1 a port is taken, 2 wrong settings.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from radixfleet.settings import click_options, load
from router.config import RouterSettings
from router.supervisor import run


@click.command()
@click_options(RouterSettings)
def main(config: Path | None, **options: Any) -> None:
    """Run one router: it sends each request to the worker where the least work is left to do."""
    sys.exit(run(load(RouterSettings, options, config)))


if __name__ == "__main__":
    main()

"""`radixfleet monitoring`: what Prometheus and Grafana need, written to a folder."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.monitoring.bundle import DEFAULT_ROUTER, write_bundle
from radixfleet.address import is_host_port


def _check_routers(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not is_host_port(value):
            raise click.BadParameter(f"must be host:port of a router's metrics, got {value!r}")
    return values


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--router",
    "routers",
    metavar="HOST:PORT",
    multiple=True,
    default=(DEFAULT_ROUTER,),
    show_default=True,
    callback=_check_routers,
    help="Metrics port of a router, which tells Prometheus where all workers are. May be given several times.",
)
@click.option("--force", is_flag=True, help="Write into a folder that is not empty, over files of the same names.")
def monitoring(folder: Path, routers: tuple[str, ...], *, force: bool) -> None:
    """Write Prometheus' and Grafana's files to FOLDER: scrape configuration, rules, alerts, dashboards, compose file.

    \b
    radixfleet monitoring mon && (cd mon && docker compose up -d)       # then open http://localhost:3000
    radixfleet monitoring mon --router 10.0.0.1:7071 --router 10.0.0.2:7071
    """
    if not force and folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"{folder} is not empty; --force writes over files of the same names")
    written = write_bundle(folder, routers)
    click.echo(f"{len(written)} files in {folder}: Prometheus asks {', '.join(routers)} for the fleet's metrics.")
    click.echo(f"With Docker:      cd {folder} && docker compose up -d, then http://localhost:3000")
    click.echo(f"Without:          prometheus --config.file={folder / 'prometheus.yml'}, then http://localhost:9090")
    click.echo(f"Grafana you have: import {folder / 'grafana/dashboards'}/*.json")

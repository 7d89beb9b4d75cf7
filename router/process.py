"""One router as a process: from its settings to its exit code.

`python -m router.process` is one of several that share ports: `router.supervisor` starts it and sends it its settings.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
from pydantic import SecretStr

from radixfleet.address import local_address, publish, withdraw
from radixfleet.garbage import settle_in
from radixfleet.lifeline import die_with_parent
from radixfleet.os_errors import reason_of
from radixfleet.stop_signals import on_stop_signals
from radixfleet.telemetry import setup_logging
from radixfleet.tracing import setup_tracing
from radixfleet.watched_file import UnusableFile
from router.app import Router, drain, running_router
from router.config import RouterSettings
from router.other_processes import Place

_log = structlog.get_logger("radixfleet.router")


def run_process(settings: RouterSettings, place: Place | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C, then drain; Ctrl-C cuts the drain short. Returns the exit code.

    For the main thread of a process; `place`: its own among those that share its ports.
    """
    setup_logging(settings.log_level, json=settings.log_json)
    try:
        setup_tracing("radixfleet-router")
        asyncio.run(_serve(settings, place))
    except OSError as error:
        return complain(error)
    return 0


def complain(error: OSError) -> int:
    """One line for the operator, whatever the log level; returns the exit code."""
    print(f"radixfleet router: {reason_of(error)}", file=sys.stderr)  # noqa: T201
    return 2 if isinstance(error, UnusableFile) else 1


async def _serve(settings: RouterSettings, place: Place | None) -> None:
    asked, insisted = asyncio.Event(), asyncio.Event()
    on_stop_signals(asked.set, insisted.set)
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(settings, place=place))
        settle_in()
        await _announce(router, settings, place)
        stack.push_async_callback(asyncio.to_thread, withdraw_addresses, settings, router.address, router.http_port)
        await asked.wait()
        _log.info("draining", running_requests=router.log.in_flight, grace_s=settings.drain_grace_s)
        drained = asyncio.create_task(drain(router, settings.drain_grace_s))
        hurried = asyncio.create_task(insisted.wait())
        await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not drained.done():
            router.log.cut()
        await drained


async def _announce(router: Router, settings: RouterSettings, place: Place | None) -> None:
    """Tell the supervisor, or scripts, and the log where it listens."""
    if place is not None:
        await asyncio.to_thread(place.announce, router.metrics_port)
    elif settings.address_file is not None:
        await asyncio.to_thread(publish_addresses, settings, router.address, router.http_port)
    ports = {"http_port": router.http_port, "metrics_port": router.metrics_port}
    _log.info("router listens", address=router.address, **ports, policy=settings.policy)


def publish_addresses(settings: RouterSettings, address: str, http_port: int) -> None:
    """Write the address files that the settings ask for. Blocks."""
    if settings.address_file is None:
        return
    if http_port >= 0:  # first, as the other file is the one that scripts wait for
        publish(_http_file(settings.address_file), local_address(settings.host, http_port))
    publish(settings.address_file, address)


def withdraw_addresses(settings: RouterSettings, address: str, http_port: int) -> None:
    """Remove what `publish_addresses` has written. Blocks."""
    if settings.address_file is not None:
        withdraw(settings.address_file, address)
        withdraw(_http_file(settings.address_file), local_address(settings.host, http_port))


def _http_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.http")


def packed(settings: RouterSettings, place: Place) -> bytes:
    """What a supervisor tells a process, secrets included, as JSON."""
    values = settings.model_dump(mode="json")
    secrets = {name: value for name in values if isinstance(value := getattr(settings, name), SecretStr)}
    values |= {name: secret.get_secret_value() for name, secret in secrets.items()}
    return json.dumps({"settings": values, "folder": str(place.folder), "index": place.index}).encode()


def unpacked(message: bytes) -> tuple[RouterSettings, Place]:
    """What `packed` made a message of."""
    told = json.loads(message)
    return RouterSettings(**told["settings"]), Place(Path(told["folder"]), told["index"])


def _main() -> int:
    """Its supervisor's pid comes as an argument, all else through stdin, where no other user sees it."""
    die_with_parent(int(sys.argv[1]))
    settings, place = unpacked(sys.stdin.buffer.read())
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    return run_process(settings, place)


if __name__ == "__main__":
    sys.exit(_main())

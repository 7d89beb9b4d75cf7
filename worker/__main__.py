"""`python -m worker`: runs one worker until it is told to stop.

SIGTERM or Ctrl-C drains it: no new requests, running ones may finish within --drain-grace-s; a second one ends it at
once. Exit codes: 0 stopped as asked, 1 failed (stderr says what to do), 2 wrong settings.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import click
import structlog
from rich.console import Console
from rich.table import Table

from radixfleet.counts import counted
from radixfleet.errors import RadixfleetError
from radixfleet.os_errors import reason_of
from radixfleet.settings import click_options, format_bytes, load
from radixfleet.stop_signals import on_stop_signals
from radixfleet.telemetry import setup_logging
from radixfleet.text import TokenizerSpec
from radixfleet.tracing import setup_tracing
from radixfleet.watched_file import UnusableFile
from worker.app import Worker, make_engine, running_worker
from worker.config import WorkerSettings
from worker.core.messages import Ready
from worker.engine.handle import EngineHandle, EngineLoadError
from worker.model.errors import ModelError, ModelNotGiven
from worker.model.sources import resolve_model
from worker.model.tokenizer_files import load_tokenizer_spec

OK, FAILED, UNUSABLE = 0, 1, 2
_QUIET_S = 2.0
_PROGRESS_S = 5.0

_log = structlog.get_logger("worker")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click_options(WorkerSettings)
def main(config: Path | None, **options: Any) -> None:
    """Serve one model on one device over gRPC.

    \b
    A small model on this machine:   python -m worker --model demo
    In a fleet:                      python -m worker --model DIR --routers 10.0.0.1:7070 --host 0.0.0.0
    """
    sys.exit(run(load(WorkerSettings, options, config)))


def run(settings: WorkerSettings) -> int:
    """Serve until told to stop; returns the exit code. Only on the main thread are signals listened to."""
    setup_logging(settings.log_level, json=settings.log_json)
    try:
        setup_tracing("radixfleet-worker")
        path = resolve_model(settings.model, lambda text: _log.info(text))
        spec = load_tokenizer_spec(path)
        return asyncio.run(serve(settings, spec, make_engine(settings, path, spec), Console(markup=False)))
    except (EngineLoadError, ModelError, RadixfleetError, OSError) as error:
        click.echo(f"worker: {reason_of(error) if isinstance(error, OSError) else error}", err=True)
        return UNUSABLE if isinstance(error, UnusableFile | ModelNotGiven) else FAILED


async def serve(settings: WorkerSettings, spec: TokenizerSpec, engine: EngineHandle, console: Console) -> int:
    """One worker's life on this event loop. Raises EngineLoadError, and OSError when a port is taken."""
    stop = _stop_event()
    async with running_worker(settings, spec, engine) as worker:
        name = f"worker {worker.description.worker_id}"
        metrics_address = f"{worker.address.rpartition(':')[0]}:{worker.metrics_port}"
        scheme = "http" if settings.tls_cert is None else "https"
        page = f"{scheme}://{metrics_address}/metrics"
        console.print(f"{name}: listens on {worker.address}; metrics: {page}", soft_wrap=True)
        if await _loaded(worker, stop):
            ready = await engine.ready()
            console.print(memory_table(ready))
            console.print(f"{name}: serves {worker.description.model}", soft_wrap=True)
            gave_up = asyncio.ensure_future(worker.feed.gave_up())
            await _first(asyncio.ensure_future(stop.wait()), gave_up)
            if not gave_up.cancelled():
                click.echo(f"{name}: the engine cannot be kept running: {gave_up.result()}", err=True)
                return FAILED
        drained = await worker.requests.drain(settings.drain_grace_s)
        ended = f"{counted(drained.finished, 'request')} finished, {drained.aborted} aborted"
        console.print(f"{name}: drained; {ended}", soft_wrap=True)
    return OK


def memory_table(ready: Ready) -> Table:
    """The three pools of device memory, and what they hold."""
    memory, capacity = ready.memory, ready.capacity
    context = f"context {ready.max_context_tokens:,} tokens"
    table = Table(
        title=f"Memory of {memory.device}: {format_bytes(memory.total_bytes)}",
        caption=f"KV pool bounded by: {memory.bounded_by}",
        title_justify="left",
        caption_justify="left",
    )
    for column, justify in (("pool", "left"), ("size", "right"), ("share", "right"), ("holds", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]  # a literal, through the loop
    for pool, size, holds in (
        ("weights", memory.weights_bytes, f"{ready.num_parameters:,} parameters in {ready.dtype}"),
        ("KV cache", memory.kv_bytes, f"{capacity.kv_tokens:,} tokens in pages of {capacity.page_size}; {context}"),
        (
            "activations",
            memory.activations_bytes,
            f"steps of {capacity.chunked_prefill_size:,} prompt tokens, {capacity.max_running_requests} requests",
        ),
    ):
        table.add_row(pool, format_bytes(size), f"{size / max(1, memory.total_bytes):.0%}", holds)
    return table


async def _loaded(worker: Worker, stop: asyncio.Event) -> bool:
    """Wait for the engine, with a sign of life now and then. False when told to stop meanwhile."""
    ready = asyncio.ensure_future(worker.engine.ready())
    progress = asyncio.create_task(_tell_progress(), name="progress")
    try:
        await _first(ready, asyncio.ensure_future(stop.wait()))
    finally:
        progress.cancel()
    if ready.cancelled():
        return False
    ready.result()
    return True


async def _tell_progress() -> None:
    elapsed_s = _QUIET_S
    await asyncio.sleep(elapsed_s)
    while True:
        _log.info("loading the model", seconds=round(elapsed_s))
        await asyncio.sleep(_PROGRESS_S)
        elapsed_s += _PROGRESS_S


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one is done, and cancel the others."""
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


def _stop_event() -> asyncio.Event:
    """Set by SIGTERM or Ctrl-C; another Ctrl-C ends the process, and with it its children, at once."""
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        return stop

    def ask() -> None:
        _log.info("stopping: running requests may finish; Ctrl-C ends them at once")
        stop.set()

    on_stop_signals(ask, lambda: os._exit(FAILED))
    return stop


if __name__ == "__main__":
    main()

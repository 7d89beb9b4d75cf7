"""`radixfleet bench engine --peers`: our engine against others on this machine."""

from __future__ import annotations

import dataclasses
import json
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from deploy.bench.peers.catalog import PEERS, Task
from deploy.bench.peers.clients import WrongAnswer
from deploy.bench.peers.comparison import OURS, figures
from deploy.bench.peers.environments import peers_directory
from deploy.bench.peers.installation import install, install_command, missing
from deploy.bench.peers.questions import QUESTIONS, longest
from deploy.bench.peers.run import Outcome, compare_with_peers
from deploy.bench.peers.tables import contestants_table, workload_table
from deploy.consoles import new_console
from deploy.interruptible import run_interruptible
from deploy.machine import num_cores
from deploy.progress import Progress, Tell
from deploy.tables import print_whole
from worker.model.configuration import load_config
from worker.model.sources import resolve_model
from worker.runner.devices import choose_dtype, open_device
from worker.runner.kernels.compiler import KernelsUnavailable
from worker.runner.kernels.layers import are_fast_for
from worker.runner.kernels.library import Kernels

ALL = "all"

_IDLE_SHARE = 0.05


def run(names: str, model: str, threads: int, rounds: int, *, install_missing: bool, as_json: bool) -> None:
    """Compare, and print. Raises UsageError for a name that is none, or when no peer is installed."""
    chosen, cache = peer_names(names), peers_directory()
    console = new_console(stderr=True)
    with Progress(console) as progress:
        failures = _install(missing(chosen, cache), cache, progress) if install_missing else {}
        absent = [name for name in missing(chosen, cache) if name not in failures]
        present = [name for name in chosen if name not in failures and name not in absent]
        if absent:
            progress(f"not installed: {', '.join(absent)}. This installs:\n    {install_command(absent)}")
        if not present:
            raise click.ClickException("there is nobody to compare with" + "".join(f"\n{f}" for f in failures.values()))
        path = resolve_model(model, progress)
        task = Task(
            model=path,
            dtype=_dtype(path),
            threads=threads,
            concurrency=max(each.concurrency for each in QUESTIONS),
            context_tokens=longest(QUESTIONS),
            cache=cache,
        )
        run_dir = Path(tempfile.mkdtemp(prefix="radixfleet-peers-"))
        progress(f"logs: {run_dir}\n")
        peers = {name: PEERS[name] for name in present}
        try:
            outcome = run_interruptible(compare_with_peers(peers, task, QUESTIONS, rounds, run_dir, progress))
        except WrongAnswer as error:
            raise click.ClickException(f"{OURS} failed: {error}; its log is in {run_dir}") from error
    failures |= {each.name: each.failure for each in outcome.contestants if each.failure}
    if as_json:
        click.echo(json.dumps(_as_object(outcome, task, failures, absent), indent=2))
    else:
        _print(new_console(), outcome, task, failures)


def _dtype(model: Path) -> torch.dtype:
    """As `radixfleet up` would choose on this CPU."""
    try:
        by_kernels = are_fast_for(Kernels(1), load_config(model))
    except KernelsUnavailable:
        by_kernels = False
    return choose_dtype(open_device("cpu"), "auto", by_kernels=by_kernels)


def _install(names: Sequence[str], cache: Path, tell: Tell) -> dict[str, str]:
    """Those that failed, and why. SIGTERM breaks off in order, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return install(names, cache, tell)
    finally:
        signal.signal(signal.SIGTERM, before)


def peer_names(text: str) -> list[str]:
    """Of `--peers`. Raises BadParameter."""
    names = list(PEERS) if text == ALL else text.split(",")
    for name in names:
        if name not in PEERS:
            raise click.BadParameter(f"no peer is called {name!r}; there are {', '.join(PEERS)}", param_hint="--peers")
    return list(dict.fromkeys(names))


def _print(console: Console, outcome: Outcome, task: Task, failures: Mapping[str, str]) -> None:
    console.print(
        f"{task.model.name}, {task.threads} threads each, on {num_cores()} cores, client on the same machine\n"
    )
    running = [each for each in outcome.contestants if each.name not in failures]
    print_whole(console, contestants_table(running))
    for questions in QUESTIONS:
        console.print()
        print_whole(console, workload_table(questions, figures(running, questions)))
    for name, why in failures.items():
        console.print(f"\n{name} failed:", style="red", end=" ")
        console.print(why, soft_wrap=True)
    if outcome.idle_share > _IDLE_SHARE:
        console.print(f"{OURS} took {outcome.idle_share:.0%} of a core with nothing to do", style="yellow")


def _as_object(outcome: Outcome, task: Task, failures: Mapping[str, str], absent: Sequence[str]) -> dict[str, Any]:
    running = [each for each in outcome.contestants if each.name not in failures]
    return {
        "model": task.model.name,
        "threads": task.threads,
        "cores": num_cores(),
        "engines": [{"name": each.name, "version": each.title, "weights": each.dtype} for each in running],
        "workloads": [
            {
                **dataclasses.asdict(questions),
                "figures": [each.as_object() for each in figures(running, questions)],
            }
            for questions in QUESTIONS
        ],
        "failed": dict(failures),
        "not_installed": list(absent),
        "idle_share_of_a_core": outcome.idle_share,
    }

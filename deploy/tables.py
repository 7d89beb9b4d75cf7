"""Tables for people, for a console of `deploy.consoles`: workers, memory pools, finished requests, candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from radixfleet.answers import Completion, Explanation, WorkerEntry
from radixfleet.settings import format_bytes
from radixfleet.types import MemoryPools

_WIDEST = 1000
_NAMES = frozenset({"worker", "address", "state", "request"})
"""Columns that are never broken: people copy from them."""
_WORDS = frozenset({"", "worker", "address", "state", "model", "request", "why", "device", "KV pool bounded by"})
"""Columns that hold words; the others hold numbers."""


def workers_table(workers: Sequence[WorkerEntry]) -> Table:
    """A row a worker: state, model, load, KV pool."""
    table = _table("worker", "address", "state", "model", "run", "wait", "KV used", "KV cached", "KV pool")
    for worker in sorted(workers, key=lambda entry: entry.worker_id):
        table.add_row(
            worker.worker_id or "?",
            worker.address,
            state_of(worker),
            worker.info.model.model,
            str(worker.load.running_requests),
            str(worker.load.waiting_requests),
            str(worker.load.kv_protected_tokens),
            str(worker.load.kv_evictable_tokens),
            str(worker.info.capacity.kv_tokens),
        )
    return table


def state_of(worker: WorkerEntry) -> str:
    """In words, with the reason why it gets no requests, where the state does not say it."""
    state = str(worker.status) if worker.connected else "disconnected"
    if worker.ineligible_reason and worker.ineligible_reason != state:
        state = f"{state} ({worker.ineligible_reason})"
    return state


def pools_table(workers: Sequence[WorkerEntry]) -> Table:
    """A row a worker that has told them: its three memory pools."""
    table = _table("worker", "device", "weights", "KV cache", "activations", "total", "KV pool bounded by")
    for worker in sorted(workers, key=lambda entry: entry.worker_id):
        if worker.info.memory.total_bytes:
            table.add_row(worker.worker_id, *pools_row(worker.info.memory))
    return table


def pools_row(memory: MemoryPools) -> tuple[str, ...]:
    """Device, weights, KV cache, activations, total, and what bounds the KV pool."""
    sizes = (memory.weights_bytes, memory.kv_bytes, memory.activations_bytes, memory.total_bytes)
    return memory.device, *(format_bytes(size) for size in sizes), memory.bounded_by


def completions_table(completions: Sequence[tuple[str, Completion]]) -> Table:
    """A row a request, named by the caller: where it went and why, what was cached, how fast it was."""
    table = _table("request", "worker", "why", "prompt", "cached", "hit", "TTFT ms", "tokens/s")
    for name, completion in completions:
        started, usage = completion.started, completion.usage
        table.add_row(
            name,
            started.worker_id,
            started.route.reason if started.route else "direct",
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            f"{100 * usage.cached_tokens / max(1, usage.prompt_tokens):.0f} %",
            f"{1000 * completion.ttft_s:.0f}",
            f"{tokens_per_second(completion):.1f}",
        )
    return table


def tokens_per_second(completion: Completion) -> float:
    """Rate after the first token; 0 when there was no second one."""
    generating_s = completion.total_s - completion.ttft_s
    following = len(completion.token_ids) - 1
    return following / generating_s if following > 0 and generating_s > 0 else 0.0


def candidates_table(explanation: Explanation) -> Table:
    """A row a worker: what the prompt would cost there."""
    table = _table(
        "", "worker", "matched blocks", "matched tokens", "to compute", "queued tokens", "running", "cost", ""
    )
    for candidate in sorted(explanation.candidates, key=lambda candidate: candidate.worker_id):
        table.add_row(
            "->" if candidate.worker_id == explanation.worker_id else "",
            candidate.worker_id,
            str(candidate.matched_blocks),
            str(candidate.matched_tokens),
            str(candidate.uncached_tokens),
            str(candidate.outstanding_prompt_tokens),
            str(candidate.running_requests),
            f"{candidate.cost:.0f}" if candidate.eligible else "-",
            candidate.ineligible_reason or ("approximate" if candidate.approximate else ""),
        )
    return table


def print_facts(console: Console, facts: Mapping[str, str]) -> None:
    """What was run, a line a fact."""
    for name, value in facts.items():
        console.print(Text.assemble((f"{name:12s} ", "bold"), value), soft_wrap=True)


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as it is: a narrow terminal breaks its lines, but no number is cut to dots."""
    width = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    usual_width, console.width = console.width, max(width, console.width)
    console.print(table, crop=False)
    console.width = usual_width


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right", no_wrap=column in _NAMES)
    return table

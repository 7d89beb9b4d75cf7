"""A memory plan as text for people and as one object for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.doctor.plan_warning import context_warning
from deploy.doctor.planning import Wanted, alternatives, capacity, explanation, fits
from radixfleet.settings import format_bytes
from worker.memory.plan import MemoryPlan, MemoryPlanError


def planned(wanted: Wanted) -> tuple[MemoryPlan | None, str]:
    """The plan, or None and the advice."""
    try:
        return wanted.plan(), ""
    except MemoryPlanError as error:
        return None, str(error)


def as_object(wanted: Wanted) -> dict[str, Any]:
    """Everything that the text says, in bytes and tokens. `fits`: the model runs, with a useful KV pool.

    `warning`: empty, or why requests of the model's own limit are refused, and what helps.
    """
    plan, advice = planned(wanted)
    return {
        "model": wanted.model,
        "source": wanted.source,
        "parameters": wanted.config.num_parameters,
        "dtype": wanted.weights.name,
        "device": wanted.device.name,
        "device_bytes": wanted.device.usable_bytes,
        "weights_bytes": wanted.weights_bytes,
        "kv_bytes_per_token": wanted.kv_bytes_per_token,
        "activation_estimate_bytes": wanted.activations.total,
        "graphs_estimate_bytes": wanted.graphs_bytes,
        "chunked_prefill_size": wanted.chunk,
        "max_running_requests": wanted.rows,
        "fits": fits(wanted) is not None,
        "advice": advice,
        "pools": dataclasses.asdict(plan.pools()) if plan is not None else None,
        "kv_tokens": plan.kv_tokens if plan is not None else 0,
        "explanation": explanation(wanted),
        "warning": context_warning(wanted),
        "alternatives": list(alternatives(wanted)) if fits(wanted) is None else [],
    }


def print_report(console: Console, wanted: Wanted) -> None:
    """The three pools, how each number comes about, what bounds the KV pool; or why it does not fit, and what does."""
    title = f" in {wanted.weights.name} on {wanted.device}   ({wanted.source})"
    console.print(Text.assemble((wanted.model, "bold"), title))
    plan, advice = planned(wanted)
    if plan is not None:
        console.print(_pools(plan))
    else:
        console.print(Text.assemble(("does not fit: ", "bold red"), advice))
    for line in explanation(wanted):
        console.print(f"  {line}")
    if plan is not None:
        for limit in plan.kv_limits:
            bound = f"  KV pool at most {format_bytes(limit.num_bytes)}: {limit.reason}"
            console.print(Text.assemble(bound, ("  <- binds" if limit.binds else "", "bold")))
        console.print(f"  {capacity(wanted, plan)}")
    if fits(wanted) is None:
        _print_alternatives(console, wanted, is_tight=plan is not None)
    for number, text in enumerate(context_warning(wanted)):
        console.print(f"  {text}" if number else Text.assemble(("warning: ", "bold yellow"), text))


def _print_alternatives(console: Console, wanted: Wanted, *, is_tight: bool) -> None:
    if is_tight:
        console.print("it starts, but its KV pool is too small to be of use", style="yellow")
    lines = list(alternatives(wanted))
    console.print("what fits:" if lines else "nothing known here fits; choose a smaller model")
    for line in lines:
        console.print(f"  {line}")


def _pools(plan: MemoryPlan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (("pool", "left"), ("size", "right"), ("share", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]  # a literal, through the loop
    for row in plan.table():
        table.add_row(*row)
    return table

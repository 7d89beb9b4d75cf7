"""Routers from inside: choices, what they know of the workers' caches, and how they deal with failures."""

from __future__ import annotations

from deploy.monitoring.board import OF_WORKER, ROUTER, Board, Panel, Query, Row, quantiles, rate, ratio, total

_ASKED, _PREDICTED, _ACTUAL = (
    rate(f"radixfleet_router_prompt_tokens_{name}_total", ROUTER) for name in ("asked", "predicted", "actual")
)
_INDEX_ERROR = ratio(f"({_PREDICTED} - {_ACTUAL})", _ASKED)

_CHOICE = Row(
    "Choices",
    [
        Panel("Time to choose and book", quantiles("radixfleet_router_decision_seconds", ROUTER), "s"),
        Panel(
            "Choices by reason",
            [Query(rate("radixfleet_router_decisions_total", ROUTER, by="reason"), "{{reason}}")],
            "reqps",
            "spill: another worker holds more of the prompt, but is so busy that this one is cheaper.",
            stacked=True,
        ),
        Panel(
            "Time to tokenize and hash",
            quantiles("radixfleet_router_tokenize_seconds", ROUTER),
            "s",
            "The wait for one of --tokenizer-threads included.",
        ),
        Panel(
            "Requests in flight",
            [Query(total("radixfleet_router_requests_in_flight", ROUTER, by="instance"), "{{instance}}")],
        ),
        Panel(
            "Requests booked on workers",
            [Query(total("radixfleet_router_worker_booked_requests", OF_WORKER, by="worker"), "{{worker}}")],
            stacked=True,
        ),
        Panel(
            "Prompt tokens to be computed",
            [
                Query(
                    f"max by (worker) (radixfleet_router_worker_outstanding_prompt_tokens{{{OF_WORKER}}})", "{{worker}}"
                )
            ],
            help="What the choice weighs: reported by the worker, and booked since.",
        ),
    ],
)

_INDEX = Row(
    "Index",
    [
        Panel(
            "Blocks known of each worker",
            [
                Query(f"max by (worker) (radixfleet_router_worker_sketch_blocks{{{OF_WORKER}}})", "{{worker}}"),
                Query(f"max(radixfleet_router_sketch_blocks{{{ROUTER}}})", "distinct"),
            ],
            help="64 tokens each.",
        ),
        Panel(
            "Time between a worker's reports",
            quantiles("radixfleet_router_state_gap_seconds", ROUTER),
            "s",
            "0.1 s under load, 1 s when idle. More: what the router knows of caches and load is late.",
        ),
        Panel(
            "Age of the last report",
            [Query(f"max by (worker) (radixfleet_router_worker_update_age_seconds{{{OF_WORKER}}})", "{{worker}}")],
            "s",
        ),
        Panel(
            "Approximate workers",
            [Query(f"max by (worker) (radixfleet_router_worker_approximate{{{OF_WORKER}}})", "{{worker}}")],
            help="1: the worker tells nothing of its cache; the router goes by its own record.",
        ),
        Panel(
            "Index error",
            [Query(_INDEX_ERROR, "predicted - actual")],
            "percentunit",
        ),
        Panel("Reports begun anew", [Query(rate("radixfleet_router_resyncs_total", ROUTER), "resyncs")], "ops"),
    ],
)

_FAILURES = Row(
    "Queue and failures",
    [
        Panel(
            "Waiting for a worker",
            [Query(total("radixfleet_router_queued_requests", ROUTER, by="instance"), "{{instance}}")],
        ),
        Panel(
            "Time in the router's queue",
            quantiles("radixfleet_router_queue_seconds", ROUTER),
            "s",
            "Of requests that waited.",
        ),
        Panel(
            "Refused by the queue",
            [Query(rate("radixfleet_router_queue_refusals_total", ROUTER, by="cause"), "{{cause}}")],
            "reqps",
        ),
        Panel("Retries", [Query(rate("radixfleet_router_retries_total", ROUTER, by="result"), "{{result}}")], "reqps"),
        Panel(
            "Circuit breakers",
            [
                Query(
                    f'max by (worker) (radixfleet_router_worker_breaker{{{OF_WORKER}, state=~"open|half_open"}})',
                    "{{worker}}",
                ),
                Query(rate("radixfleet_router_worker_breaker_opened_total", OF_WORKER), "opened, a second"),
            ],
            help="1 while a worker's breaker is not closed.",
        ),
        Panel(
            "Workers by status",
            [Query(total("radixfleet_router_workers", ROUTER, by="status"), "{{status}}")],
            stacked=True,
        ),
    ],
)

_PROCESS = Row(
    "Process",
    [
        Panel(
            "CPU cores",
            [Query(rate("process_cpu_seconds_total", f'{ROUTER}, role="router"', by="instance"), "{{instance}}")],
            help="A router is one thread but for tokenizing: near 1, start another router.",
        ),
        Panel(
            "Memory",
            [Query(total("process_resident_memory_bytes", f'{ROUTER}, role="router"', by="instance"), "{{instance}}")],
            "bytes",
        ),
        Panel(
            "Leases of Fleet.Route",
            [Query(rate("radixfleet_router_leases_total", ROUTER, by="outcome"), "{{outcome}}")],
            "reqps",
        ),
    ],
)

ROUTERS = Board(
    "radixfleet-router",
    "Radixfleet: routers",
    "Choices, what the router knows of the workers' caches, and how it deals with failures.",
    ("worker", "router"),
    (_CHOICE, _INDEX, _FAILURES, _PROCESS),
)

"""The fleet at a glance: what clients get, what the caches save, and where a lost hit was lost."""

from __future__ import annotations

from deploy.monitoring.board import ROUTER, WORKER, Board, Panel, Query, Row, quantile, quantiles, rate, ratio, total

_ASKED, _REACHABLE, _PREDICTED, _ACTUAL = (
    rate(f"radixfleet_router_prompt_tokens_{name}_total", ROUTER)
    for name in ("asked", "reachable", "predicted", "actual")
)
_HIT_RATE, _WORKER_HIT_RATE = (
    ratio(
        rate("radixfleet_worker_cached_tokens_total", WORKER, by=by),
        rate("radixfleet_worker_prompt_tokens_total", WORKER, by=by),
    )
    for by in ("", "worker_id")
)
_ERRORS = f'{ROUTER}, outcome!~"ok|cancelled"'
_ERROR_SHARE = ratio(
    rate("radixfleet_router_requests_total", _ERRORS), rate("radixfleet_router_requests_total", ROUTER)
)

_NOW = Row(
    "Now",
    [
        Panel(
            "Workers that serve",
            [Query(total("radixfleet_worker_status", f'{WORKER}, status="serving"'), "")],
            is_stat=True,
            width=4,
        ),
        Panel("Hit rate", [Query(_HIT_RATE, "")], "percentunit", is_stat=True, width=4),
        Panel(
            "Tokens generated",
            [Query(rate("radixfleet_worker_generated_tokens_total", WORKER), "")],
            "ops",
            is_stat=True,
            width=4,
        ),
        Panel(
            "Time to first token, p50",
            [Query(quantile(0.5, "radixfleet_router_ttft_seconds", ROUTER), "")],
            "s",
            is_stat=True,
            width=4,
        ),
        Panel(
            "Waiting for a worker",
            [Query(total("radixfleet_router_queued_requests", ROUTER), "")],
            is_stat=True,
            width=4,
        ),
        Panel(
            "Requests that failed",
            [Query(_ERROR_SHARE, "")],
            "percentunit",
            is_stat=True,
            width=4,
        ),
    ],
)

_CACHE = Row(
    "Cache",
    [
        Panel(
            "Hit rate against what was reachable",
            [
                Query(f"{_REACHABLE} / {_ASKED}", "reachable: best worker"),
                Query(f"{_PREDICTED} / {_ASKED}", "predicted: chosen worker"),
                Query(f"{_ACTUAL} / {_ASKED}", "actual: found there"),
            ],
            "percentunit",
            "Shares of all prompt tokens. Below reachable, the requests have little in common; between reachable and "
            "predicted, prefixes were left for less loaded workers; below predicted, the router was wrong.",
        ),
        Panel(
            "Where hits were lost",
            [
                Query(f"({_ASKED} - {_REACHABLE}) / {_ASKED}", "workload: nobody had it"),
                Query(f"({_REACHABLE} - {_PREDICTED}) / {_ASKED}", "routing: another worker had it"),
                Query(f"({_PREDICTED} - {_ACTUAL}) / {_ASKED}", "index: it was gone"),
            ],
            "percentunit",
            "The three gaps of the picture beside it. Index may be below zero: more was found than expected.",
        ),
        Panel(
            "Hit rate of each worker",
            [Query(_WORKER_HIT_RATE, "{{worker_id}}")],
            "percentunit",
        ),
    ],
)

_THROUGHPUT = Row(
    "Throughput",
    [
        Panel(
            "Tokens generated, by worker",
            [Query(rate("radixfleet_worker_generated_tokens_total", WORKER, by="worker_id"), "{{worker_id}}")],
            "ops",
            stacked=True,
        ),
        Panel(
            "Prompt tokens",
            [
                Query(rate("radixfleet_worker_cached_tokens_total", WORKER), "from the cache"),
                Query(rate("radixfleet_worker_computed_tokens_total", f'{WORKER}, kind="prompt"'), "computed"),
            ],
            "ops",
            stacked=True,
        ),
        Panel(
            "Choices by reason",
            [Query(rate("radixfleet_router_decisions_total", ROUTER, by="reason"), "{{reason}}")],
            "reqps",
            "spill: another worker holds more of the prompt, but is so busy that this one is cheaper.",
            stacked=True,
        ),
    ],
)

_LATENCY = Row(
    "Latency",
    [
        Panel(
            "Time to first token",
            quantiles("radixfleet_router_ttft_seconds", ROUTER),
            "s",
            "From the router's side, its queue included.",
        ),
        Panel("Time between tokens", quantiles("radixfleet_worker_inter_token_seconds", WORKER), "s"),
        Panel("Whole request", quantiles("radixfleet_router_request_seconds", ROUTER), "s"),
    ],
)

_QUEUE = Row(
    "Queue and errors",
    [
        Panel(
            "Requests",
            [
                Query(total("radixfleet_worker_running_requests", WORKER), "running"),
                Query(total("radixfleet_worker_waiting_requests", WORKER), "waiting in workers"),
                Query(total("radixfleet_router_queued_requests", ROUTER), "waiting in routers"),
            ],
            help="Requests wait in the routers while all workers are full. That lasting means too few workers.",
            stacked=True,
        ),
        Panel(
            "Requests by outcome",
            [Query(rate("radixfleet_router_requests_total", ROUTER, by="outcome"), "{{outcome}}")],
            "reqps",
            stacked=True,
        ),
        Panel(
            "Failures",
            [
                Query(rate("radixfleet_router_requests_total", _ERRORS, by="outcome"), "{{outcome}}"),
                Query(rate("radixfleet_router_retries_total", ROUTER, by="result"), "{{result}}"),
                Query(rate("radixfleet_router_queue_refusals_total", ROUTER, by="cause"), "queue: {{cause}}"),
            ],
            "reqps",
        ),
    ],
)

FLEET = Board(
    "radixfleet-fleet",
    "Radixfleet: fleet",
    "What clients get, what the caches save, and where a lost hit was lost.",
    ("model", "worker", "router"),
    (_NOW, _CACHE, _THROUGHPUT, _LATENCY, _QUEUE),
)

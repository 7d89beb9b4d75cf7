"""Workers from inside: memory, steps, and the time that the device waits for the CPU."""

from __future__ import annotations

from deploy.monitoring.board import WORKER, Board, Panel, Query, Row, quantiles, rate, ratio, total

_BUBBLE_S = rate("radixfleet_worker_bubble_seconds_sum", WORKER, by="worker_id")
_STEP_S = rate("radixfleet_worker_step_seconds_sum", WORKER, by="worker_id")
_USED, _EVICTABLE, _TOTAL = (
    total(f"radixfleet_worker_kv_{name}_tokens", WORKER) for name in ("used", "evictable", "total")
)
_KV_SHARE = ratio(
    total("radixfleet_worker_kv_used_tokens", WORKER, by="worker_id"),
    total("radixfleet_worker_kv_total_tokens", WORKER, by="worker_id"),
)
_STEP_TOKENS = ratio(
    rate("radixfleet_worker_computed_tokens_total", WORKER, by="kind"),
    f"on () group_left () {rate('radixfleet_worker_steps_total', WORKER)}",
)

_MEMORY = Row(
    "Memory",
    [
        Panel(
            "Device memory, the three pools",
            [Query(total("radixfleet_worker_memory_bytes", WORKER, by="pool"), "{{pool}}")],
            "bytes",
            "As planned at start: KV gets what weights and the measured peak of activations leave.",
            stacked=True,
        ),
        Panel(
            "KV tokens",
            [
                Query(_USED, "in use"),
                Query(_EVICTABLE, "cached, evictable"),
                Query(f"{_TOTAL} - {_USED} - {_EVICTABLE}", "free"),
            ],
            help="Cached prefixes are no load: they go when their place is needed.",
            stacked=True,
        ),
        Panel(
            "KV in use",
            [Query(_KV_SHARE, "{{worker_id}}")],
            "percentunit",
        ),
        Panel(
            "Blocks evicted",
            [Query(rate("radixfleet_worker_evicted_blocks_total", WORKER, by="worker_id"), "{{worker_id}}")],
            "ops",
            "64 tokens each. Much of it beside a low hit rate: the prefixes in use do not fit the fleet's KV pools.",
        ),
        Panel(
            "Memory short",
            [Query(f"max by (stage) (radixfleet_worker_memory_short{{{WORKER}}})", "{{stage}}")],
            help="1 while a stage is short of memory, or was so lately. `radixfleet workers` says what to change.",
        ),
        Panel(
            "Steps that ran out of memory",
            [Query(rate("radixfleet_worker_out_of_memory_total", WORKER, by="stage"), "{{stage}}")],
            "ops",
            "They are taken back and tried again smaller.",
        ),
    ],
)

_BATCH = Row(
    "Batch",
    [
        Panel(
            "Running requests",
            [Query(total("radixfleet_worker_running_requests", WORKER, by="worker_id"), "{{worker_id}}")],
        ),
        Panel(
            "Waiting requests",
            [Query(total("radixfleet_worker_waiting_requests", WORKER, by="worker_id"), "{{worker_id}}")],
        ),
        Panel(
            "Tokens in a step",
            [Query(_STEP_TOKENS, "{{kind}}")],
            help="Mean over all steps: decodes (one a running request) and chunks of prompts.",
            stacked=True,
        ),
        Panel(
            "Steps by kind",
            [Query(rate("radixfleet_worker_planned_steps_total", WORKER, by="kind"), "{{kind}}")],
            "ops",
            "mixed: decodes and chunks of prompts in one step, so that long prompts stall no answer.",
            stacked=True,
        ),
        Panel(
            "Retracted, preempted, thrown away",
            [
                Query(rate("radixfleet_worker_retractions_total", WORKER), "retractions"),
                Query(rate("radixfleet_worker_preemptions_total", WORKER), "of these, preemptions"),
                Query(rate("radixfleet_worker_discarded_tokens_total", WORKER), "tokens of ended requests"),
            ],
            "ops",
            "Retractions: more was admitted than the KV pool could carry to its end.",
        ),
        Panel(
            "Requests by outcome",
            [Query(rate("radixfleet_worker_requests_total", WORKER, by="outcome"), "{{outcome}}")],
            "reqps",
            stacked=True,
        ),
    ],
)

_DEVICE = Row(
    "Device",
    [
        Panel(
            "Bubble",
            [Query(f"{_BUBBLE_S} / ({_BUBBLE_S} + {_STEP_S})", "{{worker_id}}")],
            "percentunit",
            "Share of the time in which the device waited for the CPU. Over 5 %: too few or too busy cores.",
        ),
        Panel("Duration of a step", quantiles("radixfleet_worker_step_seconds", WORKER), "s"),
        Panel(
            "Scheduling, share of the engine's thread",
            [Query(rate("radixfleet_worker_scheduling_seconds_total", WORKER, by="worker_id"), "{{worker_id}}")],
            "percentunit",
        ),
        Panel(
            "Largest step allowed now",
            [
                Query(
                    f"min by (worker_id) (radixfleet_worker_step_prompt_tokens_limit{{{WORKER}}})",
                    "{{worker_id}}: prompt tokens",
                ),
                Query(
                    f"min by (worker_id) (radixfleet_worker_step_sequences_limit{{{WORKER}}})",
                    "{{worker_id}}: requests",
                ),
            ],
            help="Less than configured for a while after a step ran out of memory.",
        ),
        Panel(
            "Failed steps, engine restarts",
            [
                Query(rate("radixfleet_worker_failed_steps_total", WORKER), "failed steps"),
                Query(rate("radixfleet_worker_engine_restarts_total", WORKER), "restarts"),
            ],
            "ops",
        ),
        Panel(
            "Memory of the front process",
            [Query(total("process_resident_memory_bytes", WORKER, by="worker_id"), "{{worker_id}}")],
            "bytes",
        ),
    ],
)

_REQUESTS = Row(
    "Requests",
    [
        Panel(
            "Time to first token",
            quantiles("radixfleet_worker_ttft_seconds", WORKER),
            "s",
            "From the arrival at the worker.",
        ),
        Panel("Time between tokens", quantiles("radixfleet_worker_inter_token_seconds", WORKER), "s"),
        Panel("Time in the worker's queue", quantiles("radixfleet_worker_queue_seconds", WORKER), "s"),
        Panel("Prompt length", quantiles("radixfleet_worker_request_prompt_tokens", WORKER), help="Tokens."),
        Panel("Answer length", quantiles("radixfleet_worker_request_generated_tokens", WORKER), help="Tokens."),
        Panel(
            "Prompt tokens to be computed",
            [Query(total("radixfleet_worker_outstanding_prompt_tokens", WORKER, by="worker_id"), "{{worker_id}}")],
        ),
    ],
)

WORKERS = Board(
    "radixfleet-worker",
    "Radixfleet: workers",
    "Memory pools, steps, and the time that the device waits for the CPU.",
    ("model", "worker"),
    (_MEMORY, _BATCH, _DEVICE, _REQUESTS),
)

from __future__ import annotations

import asyncio
import threading

from router.metrics import LEASE_OUTCOMES, OUTCOMES, REASONS, FleetSample, RouterMetrics, WorkerSample

SAMPLE = WorkerSample(
    worker="w0",
    status="serving",
    eligible=True,
    approximate=False,
    breaker="half_open",
    breaker_opened=4,
    running_requests=3,
    waiting_requests=2,
    outstanding_prompt_tokens=700,
    booked_requests=1,
    booked_prompt_tokens=60,
    kv_protected_tokens=900,
    sketch_blocks=11,
    update_age_s=0.25,
)


async def test_the_fleet_is_sampled_on_the_event_loop_by_a_scrape_from_another_thread() -> None:
    metrics = RouterMetrics()
    threads: list[str] = []

    def sample() -> FleetSample:
        threads.append(threading.current_thread().name)
        return FleetSample([SAMPLE], sketch_blocks=40)

    metrics.watch_fleet(sample, asyncio.get_running_loop())
    assert threads == []

    def scrape() -> dict[str, float]:
        return {
            f"{item.name}{sorted(item.labels.items())}": item.value
            for family in metrics.registry.collect()
            for item in family.samples
        }

    values = await asyncio.to_thread(scrape)
    assert threads == [threading.current_thread().name]
    assert values["radixfleet_router_sketch_blocks[]"] == 40
    assert values["radixfleet_router_workers[('status', 'serving')]"] == 1
    assert values["radixfleet_router_workers[('status', 'loading')]"] == 0
    assert values["radixfleet_router_worker_waiting_requests[('worker', 'w0')]"] == 2
    assert values["radixfleet_router_worker_outstanding_prompt_tokens[('worker', 'w0')]"] == 700
    assert values["radixfleet_router_worker_breaker[('state', 'half_open'), ('worker', 'w0')]"] == 1
    assert values["radixfleet_router_worker_breaker[('state', 'closed'), ('worker', 'w0')]"] == 0
    assert values["radixfleet_router_worker_breaker_opened_total[('worker', 'w0')]"] == 4


def test_a_scrape_after_the_loop_has_ended_has_everything_but_the_fleet() -> None:
    metrics = RouterMetrics()

    async def watch() -> None:
        metrics.watch_fleet(lambda: FleetSample([], 0), asyncio.get_running_loop())

    asyncio.run(watch())
    names = {family.name for family in metrics.registry.collect()}
    assert "radixfleet_router_requests" in names
    assert "radixfleet_router_workers" not in names


def test_every_label_value_is_exported_before_it_is_first_counted() -> None:
    registry = RouterMetrics().registry
    for name, label, values in (
        ("requests", "outcome", OUTCOMES),
        ("decisions", "reason", REASONS),
        ("leases", "outcome", LEASE_OUTCOMES),
    ):
        for value in values:
            assert registry.get_sample_value(f"radixfleet_router_{name}_total", {label: value}) == 0


def test_choices_are_counted_by_their_reason_and_by_what_they_took() -> None:
    metrics = RouterMetrics()
    for reason, seconds in (("load", 1e-6), ("load", 3e-6), ("prefix", 1.0)):
        metrics.decisions.count(reason, seconds)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"radixfleet_router_{name}", labels)

    assert (value("decisions_total", reason="load"), value("decisions_total", reason="prefix")) == (2, 1)
    within = [value("decision_seconds_bucket", le=bound) for bound in ("1e-06", "2.5e-06", "5e-06", "0.005", "+Inf")]
    assert within == [1, 1, 2, 2, 3], "a bucket has what took no longer than its bound"
    assert value("decision_seconds_count") == 3
    assert value("decision_seconds_sum") == 1.000004

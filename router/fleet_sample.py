"""What the metrics tell of the fleet at the moment of a scrape."""

from __future__ import annotations

from radixfleet.clock import Clock
from router.index import Sketch
from router.metrics import FleetSample, WorkerSample
from router.workers.registry import WorkerRegistry
from router.workers.state import WorkerState


def fleet_sample(registry: WorkerRegistry, sketch: Sketch, clock: Clock) -> FleetSample:
    """All workers now. On the event loop."""
    samples: dict[str, WorkerSample] = {}
    for worker in registry.workers:
        # Two addresses of one worker must not export one name twice.
        name = worker.address if worker.name in samples else worker.name
        samples[name] = _worker_sample(worker, name, clock)
    return FleetSample(tuple(samples.values()), sketch.num_blocks)


def _worker_sample(worker: WorkerState, name: str, clock: Clock) -> WorkerSample:
    status = worker.effective_status.value if worker.connected else "disconnected"
    view = worker.view
    return WorkerSample(
        worker=name,
        status=status if worker.facts else "unknown",
        eligible=not worker.ineligible_reason,
        approximate=worker.approximate,
        breaker=worker.breaker.state.value,
        breaker_opened=worker.breaker.num_opened,
        running_requests=view.running_requests,
        waiting_requests=view.waiting_requests,
        outstanding_prompt_tokens=view.outstanding_prompt_tokens,
        booked_requests=worker.books.own_requests,
        booked_prompt_tokens=worker.books.own_tokens,
        kv_protected_tokens=worker.books.reported.kv_protected_tokens,
        sketch_blocks=view.sketch_blocks,
        update_age_s=clock.now() - worker.updated_at_s if worker.updated_at_s is not None else float("inf"),
    )

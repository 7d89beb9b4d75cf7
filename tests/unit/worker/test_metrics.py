"""The worker's series, fed by hand and by a real run."""

from __future__ import annotations

import asyncio
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixfleet.channel import open_channel
from radixfleet.types import Load, WorkerStatus
from radixfleet.v1 import inference_pb2_grpc
from tests.support.answers import generate
from tests.support.fake_engine import READY
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.engine.counters import LoopCounters
from worker.memory.advisor import Stage
from worker.metrics import ENGINE_TOTALS, SHORT_STAGES, STEP_KINDS, STEP_STAGES, BuildInfo, Outcome, WorkerMetrics
from worker.scheduling.counters import Counters


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics(BuildInfo(version="1.2.3", worker_id="w", model="m", runner="sim"))


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"radixfleet_worker_{name}", labels)


def report(metrics: WorkerMetrics, **counters: float) -> None:
    metrics.report(Load(), counters, [], [])


def test_totals_of_the_engine_become_counters_that_never_fall(metrics: WorkerMetrics) -> None:
    """A restarted engine counts from 0 again; the worker's counters go on."""
    report(metrics, generated_tokens=10, retractions=1)
    report(metrics, generated_tokens=15, retractions=1)
    metrics.engine_lost()
    report(metrics, generated_tokens=4, retractions=0)
    assert value(metrics, "generated_tokens_total") == 19
    assert value(metrics, "retractions_total") == 1
    assert value(metrics, "engine_restarts_total") == 1


def test_every_total_that_is_shown_is_one_that_the_engine_counts() -> None:
    """Behaviour 63: a series fed by a name that the engine does not send would stay 0 for ever."""
    counted = {*Counters().as_dict(), *LoopCounters().as_dict()}
    assert {*ENGINE_TOTALS, *(f"{kind}_steps" for kind in STEP_KINDS)} <= counted


def test_steps_and_their_tokens_are_counted_by_kind(metrics: WorkerMetrics) -> None:
    counters = Counters()
    counters.launched(0, 100)
    counters.launched(3, 50)
    counters.launched(4, 0, steps=2)
    report(metrics, **counters.as_dict())
    assert [value(metrics, "planned_steps_total", kind=kind) for kind in ("prefill", "decode", "mixed")] == [1, 2, 1]
    assert value(metrics, "computed_tokens_total", kind="prompt") == 150
    assert value(metrics, "computed_tokens_total", kind="decode") == 11


def test_shortages_of_memory_are_counted_by_stage_and_shown_while_they_last(metrics: WorkerMetrics) -> None:
    """Behaviour 62."""
    assert set(SHORT_STAGES) == {stage.value for stage in Stage} - {"load", "start"}
    assert value(metrics, "out_of_memory_total", stage="sampling") == 0
    report(metrics, out_of_memory_prefill=2, out_of_memory_decode=1)
    report(metrics, out_of_memory_prefill=5, out_of_memory_decode=1)
    metrics.memory((512, 16), {"prefill": "lower it", "kv_full": "fewer"})
    assert [value(metrics, "out_of_memory_total", stage=stage) for stage in STEP_STAGES] == [5, 1, 0]
    assert [value(metrics, "memory_short", stage=stage) for stage in SHORT_STAGES] == [1, 0, 0, 1]
    assert value(metrics, "step_prompt_tokens_limit") == 512
    assert value(metrics, "step_sequences_limit") == 16
    metrics.engine_lost()
    assert [value(metrics, "memory_short", stage=stage) for stage in SHORT_STAGES] == [0, 0, 0, 0]


def test_load_and_pools_are_shown(metrics: WorkerMetrics) -> None:
    load = Load(2, 3, outstanding_prompt_tokens=40, kv_protected_tokens=50, kv_evictable_tokens=60)
    metrics.engine_started(READY.capacity, READY.memory)
    metrics.report(load, {}, [0.01, 0.03], [0.001])
    shown = (
        "running_requests",
        "waiting_requests",
        "outstanding_prompt_tokens",
        "kv_used_tokens",
        "kv_evictable_tokens",
    )
    assert [value(metrics, name) for name in shown] == [2, 3, 40, 50, 60]
    assert value(metrics, "kv_total_tokens") == READY.capacity.kv_tokens
    assert [value(metrics, "memory_bytes", pool=pool) for pool in ("weights", "kv", "activations")] == [500, 300, 200]
    assert value(metrics, "device_memory_bytes") == 1000
    assert (value(metrics, "step_seconds_count"), value(metrics, "bubble_seconds_count")) == (2, 1)
    metrics.engine_lost()
    assert {value(metrics, name) for name in shown} == {0}


def test_the_status_is_one_of_all(metrics: WorkerMetrics) -> None:
    metrics.status_changed(WorkerStatus.SERVING)
    assert {status: value(metrics, "status", status=status) for status in WorkerStatus} == {
        WorkerStatus.LOADING: 0,
        WorkerStatus.SERVING: 1,
        WorkerStatus.DRAINING: 0,
        WorkerStatus.FAILED: 0,
    }


def test_outcomes_are_counted_apart(metrics: WorkerMetrics) -> None:
    """Behaviour 58: each outcome has its own series, which is there before the first."""
    assert {value(metrics, "requests_total", outcome=outcome) for outcome in Outcome} == {0.0}
    metrics.ended(Outcome.CANCELLED, 0.5)
    metrics.ended(Outcome.STOP, 0.5)
    counted = {outcome for outcome in Outcome if value(metrics, "requests_total", outcome=outcome)}
    assert counted == {Outcome.CANCELLED, Outcome.STOP}
    assert value(metrics, "request_seconds_count") == 2


def test_the_build_is_told(metrics: WorkerMetrics) -> None:
    assert value(metrics, "build_info", version="1.2.3", worker_id="w", model="m", runner="sim") == 1


async def test_a_run_shows_on_the_endpoint() -> None:
    """Behaviour 63: the series have values on a live endpoint after real requests."""
    async with sim_worker() as worker, open_channel(worker.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(2):
            await generate(stub, list(range(100)), max_new_tokens=10, ignore_eos=True)
        await until(lambda: value(worker.metrics, "generated_tokens_total") == 20)
        url = f"http://127.0.0.1:{worker.metrics_port}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
    samples = {
        sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples
    }
    assert samples["process_resident_memory_bytes"] > 0
    assert samples["radixfleet_worker_ttft_seconds_count"] == 2
    assert samples["radixfleet_worker_queue_seconds_count"] == 2
    assert samples["radixfleet_worker_inter_token_seconds_count"] == 18
    assert samples["radixfleet_worker_prompt_tokens_total"] == 200
    assert samples["radixfleet_worker_cached_tokens_total"] == 96
    assert samples["radixfleet_worker_steps_total"] >= 20
    assert samples["radixfleet_worker_step_seconds_count"] == samples["radixfleet_worker_steps_total"]
    assert samples["radixfleet_worker_kv_total_tokens"] == 65_536
    assert samples["radixfleet_worker_request_prompt_tokens_sum"] == 200
    assert samples["radixfleet_worker_request_generated_tokens_sum"] == 20

"""Requests that end because somebody wants them to: clients that go away, and aborts by execution id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from radixfleet.channel import open_channel
from radixfleet.clock import MonotonicClock
from radixfleet.text import Tokenizer
from radixfleet.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.answers import collect, generate, request
from tests.support.byte_tokenizer import byte_spec
from tests.support.cuttable_wire import CuttableWire
from tests.support.fake_engine import FakeEngine
from tests.support.gated_executor import GatedExecutor
from tests.support.waiting import until
from tests.support.worker_fixture import at_rest, sim_runner, sim_worker
from worker.app import Worker
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult
from worker.metrics import Outcome
from worker.servicer.grammars import Grammars
from worker.servicer.inference import InferenceServicer
from worker.servicer.intake import Intake

ENDLESS = {"max_new_tokens": 50_000, "ignore_eos": True}


class CountedRunner:
    """A simulated runner that counts its steps and keeps the newest plan."""

    def __init__(self, **config: object) -> None:
        self._runner = sim_runner(verify=False, **config)
        self.num_steps = 0

    def load(self) -> Ready:
        return self._runner.load()

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        return self._runner.run(plan)

    def close(self) -> None:
        self._runner.close()


@pytest.fixture
def runner() -> CountedRunner:
    return CountedRunner(max_running_requests=1)


@pytest.fixture
async def worker(runner: CountedRunner) -> AsyncIterator[Worker]:
    """Runs one request at a time, so that a second one waits in the queue."""
    async with sim_worker(runner) as running:
        yield running


def outcomes(worker: Worker, outcome: Outcome) -> float:
    value = worker.metrics.registry.get_sample_value("radixfleet_worker_requests_total", {"outcome": outcome.value})
    assert value is not None
    return value


async def first_delta(call: AsyncIterator[inference_pb2.GenerateResponse]) -> None:
    async for response in call:
        if response.WhichOneof("event") == "delta":
            return


async def execution_id(call: grpc.aio.UnaryStreamCall) -> str:
    return dict(await call.initial_metadata())["radixfleet-execution-id"]


async def test_a_cancelled_stream_stops_within_a_step(
    worker: Worker, runner: CountedRunner, stub: inference_pb2_grpc.InferenceStub
) -> None:
    """Behaviour 6: after the first token. Once the server knows, no step is planned for it."""
    call = stub.Generate(request("endless", **ENDLESS))
    await first_delta(call)
    call.cancel()
    await until(lambda: len(worker.requests) == 0)
    steps = runner.num_steps
    await at_rest(worker)
    assert runner.num_steps <= steps + 2
    assert outcomes(worker, Outcome.CANCELLED) == 1


async def test_a_client_that_goes_away_in_the_queue_leaves_it(
    worker: Worker, stub: inference_pb2_grpc.InferenceStub
) -> None:
    """Behaviour 6: before the first token, while another request runs on undisturbed."""
    running = stub.Generate(request("endless", **ENDLESS))
    await first_delta(running)
    queued = stub.Generate(request("queued", **ENDLESS))
    await queued.initial_metadata()
    assert worker.engine.num_open == 2
    queued.cancel()
    await until(lambda: worker.engine.num_open == 1)
    assert outcomes(worker, Outcome.CANCELLED) == 1
    await first_delta(running)
    running.cancel()


@pytest.mark.parametrize("reads", [True, False], ids=["streaming", "reading nothing"])
async def test_a_connection_that_breaks_stops_its_generations(worker: Worker, reads: bool) -> None:
    """Behaviour 6: the client's machine vanishes, whether or not it was reading."""
    async with CuttableWire(worker.address) as wire, open_channel(wire.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request("endless", **ENDLESS))
        await call.initial_metadata()
        if reads:
            await first_delta(call)
        wire.cut()
        await at_rest(worker)
        call.cancel()
    assert outcomes(worker, Outcome.CANCELLED) == 1


async def test_a_deadline_stops_the_generation(
    worker: Worker, stub: inference_pb2_grpc.InferenceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.servicer.inference._DEADLINE_SLACK_S", 5.0)  # requests may travel for long
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await collect(stub.Generate(request("endless", **ENDLESS), timeout=1.0))
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await at_rest(worker)
    assert outcomes(worker, Outcome.DEADLINE) == 1


async def test_cancelling_while_the_prompt_is_tokenized_submits_nothing() -> None:
    """Behaviour 6: also before the request reached the engine."""
    engine, threads = FakeEngine(), GatedExecutor()
    async with sim_worker(engine=engine, serving=False) as worker:
        engine.become_ready()
        intake = Intake("sim-model", Tokenizer(byte_spec()), threads, Grammars(engine, None), default_max_new_tokens=16)
        servicer = InferenceServicer(worker.description, intake, worker.requests, worker.metrics, MonotonicClock())
        call = asyncio.create_task(servicer.running(request("some text"), lambda: None).__aenter__())
        await until(lambda: len(threads.waiting) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        threads.release()
        assert engine.heard == []
        assert outcomes(worker, Outcome.CANCELLED) == 1


async def test_a_deadline_that_passes_while_the_prompt_is_tokenized_is_counted_as_one() -> None:
    """Behaviour 58."""
    engine, threads = FakeEngine(), GatedExecutor()
    async with sim_worker(engine=engine, serving=False) as worker:
        engine.become_ready()
        intake = Intake("sim-model", Tokenizer(byte_spec()), threads, Grammars(engine, None), default_max_new_tokens=16)
        servicer = InferenceServicer(worker.description, intake, worker.requests, worker.metrics, MonotonicClock())
        call = asyncio.create_task(servicer.running(request("some text"), lambda: 0.0).__aenter__())
        await until(lambda: len(threads.waiting) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (outcomes(worker, Outcome.DEADLINE), outcomes(worker, Outcome.CANCELLED)) == (1, 0)


async def test_abort_ends_a_queued_request_at_once_and_its_id_can_be_sent_again(
    worker: Worker, channel: grpc.aio.Channel, stub: inference_pb2_grpc.InferenceStub
) -> None:
    """Behaviour 5: while the request in front of it still runs."""
    running = stub.Generate(request("endless", **ENDLESS))
    await first_delta(running)
    queued = stub.Generate(request("queued", request_id="same", max_new_tokens=5, ignore_eos=True))
    abort = worker_pb2.AbortRequest(execution_id=await execution_id(queued))
    assert (await worker_pb2_grpc.WorkerStub(channel).Abort(abort)).found
    answer = await collect(queued)
    assert (answer.reason, answer.token_ids, answer.text) == ("ABORT", [], "")
    assert answer.finished.usage.queue_s > 0
    assert worker.engine.num_open == 1

    again = stub.Generate(request("queued", request_id="same", max_new_tokens=5, ignore_eos=True))
    await again.initial_metadata()
    running.cancel()
    assert len((await collect(again)).token_ids) == 5


async def test_ids_match_exactly() -> None:
    """Behaviour 7: two clients use one request id; an abort hits its own execution alone."""
    async with sim_worker() as worker, open_channel(worker.address) as channel:
        stub, workers = inference_pb2_grpc.InferenceStub(channel), worker_pb2_grpc.WorkerStub(channel)
        calls = [stub.Generate(request(f"prompt {i}", request_id="a-1", **ENDLESS)) for i in range(2)]
        ids = [await execution_id(call) for call in calls]
        assert ids[0] != ids[1]

        async def found(identifier: str) -> bool:
            return (await workers.Abort(worker_pb2.AbortRequest(execution_id=identifier))).found

        for stranger in ("a-1", ids[0][:-1], ids[0] + "0", ""):
            assert not await found(stranger)
        assert await found(ids[0])
        assert (await collect(calls[0])).reason == "ABORT"
        assert not await found(ids[0]), "late"
        newer = await generate(stub, "newer", request_id="a-1", max_new_tokens=5, ignore_eos=True)
        assert (newer.reason, len(newer.token_ids)) == ("LENGTH", 5)
        assert await found(ids[1]), "still running"
        assert (await collect(calls[1])).reason == "ABORT"


async def test_a_request_that_has_ended_is_not_found_although_its_client_has_not_read_on() -> None:
    """Behaviour 7: a late abort hits nobody."""
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker:
        engine.become_ready()
        intake = Intake(
            "sim-model", Tokenizer(byte_spec()), GatedExecutor(), Grammars(engine, None), default_max_new_tokens=16
        )
        prepared = await intake.prepare(request([1]), worker.requests.require_serving())
        generation = worker.requests.start(request([1]), prepared, arrived_s=0.0)
        assert worker.requests.abort(generation.identity.execution_id)
        await until(lambda: generation.outcome is Outcome.ABORTED)
        assert not worker.requests.abort(generation.identity.execution_id)
        worker.requests.end(generation, Outcome.CANCELLED)
        assert generation.outcome is Outcome.ABORTED, "the first outcome stands"
        assert outcomes(worker, Outcome.CANCELLED) == 0

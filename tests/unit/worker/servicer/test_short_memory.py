"""A worker whose device is too small for its steps, seen from outside: answers, metrics, advice, errors."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from radixfleet.channel import open_channel
from radixfleet.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.answers import generate
from tests.support.memory_faults import over
from tests.support.waiting import until
from tests.support.worker_fixture import sim_runner, sim_worker

PROMPTS = [[prompt] * 3 + list(range(40)) for prompt in range(8)]


async def test_all_requests_are_served_and_the_operator_is_told() -> None:
    """Behaviour 62: the worker keeps serving, and metric and info say what to change."""
    async with sim_worker(sim_runner()) as worker, open_channel(worker.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        expected = [await generate(stub, prompt, max_new_tokens=20, ignore_eos=True) for prompt in PROMPTS]
    async with sim_worker(sim_runner(memory_tokens=16)) as worker, open_channel(worker.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answers = await asyncio.gather(
            *(generate(stub, prompt, max_new_tokens=20, ignore_eos=True) for prompt in PROMPTS)
        )
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        counted = "radixfleet_worker_out_of_memory_total"
        registry = worker.metrics.registry
        await until(lambda: registry.get_sample_value(counted, {"stage": "prefill"}) > 0)
        assert 1 <= registry.get_sample_value("radixfleet_worker_step_prompt_tokens_limit") <= 32
        info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest())
        (advice,) = info.advice
        assert "Lower --chunked-prefill-size" in advice
        assert "it asked for" in advice


async def test_a_request_that_cannot_run_at_all_is_told_why() -> None:
    runner = sim_runner()
    runner.faults.out_of_memory = over(tokens=0)
    async with sim_worker(runner) as worker, open_channel(worker.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await generate(stub, PROMPTS[0], max_new_tokens=4)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "does not run even alone" in failed.value.details()
        assert "300.00 MiB" in failed.value.details()
        runner.faults.out_of_memory = lambda plan: None
        assert len((await generate(stub, PROMPTS[0], max_new_tokens=4, ignore_eos=True)).token_ids) == 4

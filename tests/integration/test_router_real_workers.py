"""A router before real workers (real scheduler and cache, simulated device): both sides of the contract together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.client import Client
from radixfleet.types import ChatMessage
from router.app import Router, running_router
from tests.support.look_aside import asking_by, both_forms
from tests.support.router_fixture import settings
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.app import Worker


@asynccontextmanager
async def fleet(num_workers: int) -> AsyncIterator[tuple[Router, Client, list[Worker]]]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(sim_worker(worker_id=f"w{n}")) for n in range(num_workers)]
        addresses = tuple(worker.address for worker in workers)
        router = await stack.enter_async_context(running_router(settings(workers=addresses)))
        client = await stack.enter_async_context(Client(router.address, timeout_s=60.0))
        await until(lambda: sum(not state.ineligible_reason for state in router.registry.workers) == num_workers)
        yield router, client, workers


def total(router: Router, name: str) -> float:
    value = router.metrics.registry.get_sample_value(f"radixfleet_router_prompt_tokens_{name}_total")
    assert value is not None
    return value


async def test_a_chat_stays_where_its_answers_were_generated_and_the_prediction_is_true() -> None:
    """Behaviour 26: the second turn's cached tokens include the first answer; the router foretells them to a block."""
    async with fleet(3) as (router, client, _):
        messages = [ChatMessage("system", "You are brief. " * 30), ChatMessage("user", "hello")]
        worker_ids = set()
        cached_before = 0
        for turn in range(4):
            done = await client.complete(messages, max_new_tokens=130, ignore_eos=True)
            started = done.started
            worker_ids.add(started.worker_id)
            assert started.route is not None
            predicted = started.route.predicted_cached_tokens
            assert predicted <= started.cached_tokens < predicted + BLOCK_TOKENS
            if turn:
                assert started.route.reason == "prefix"
                assert started.cached_tokens >= cached_before + 100
            cached_before = started.cached_tokens
            messages += [ChatMessage("assistant", done.text), ChatMessage("user", "go on")]
        assert len(worker_ids) == 1
        assert total(router, "reachable") == total(router, "predicted")
        assert 0 <= total(router, "actual") - total(router, "predicted") < 4 * BLOCK_TOKENS


async def test_the_router_and_the_workers_agree_on_what_is_cached() -> None:
    async with fleet(2) as (router, client, _):
        for group in range(4):
            for n in range(3):
                await client.complete(f"group {group} " * 40 + f"question {n}", max_new_tokens=8)
        states = router.registry.workers

        def agreed() -> bool:
            return all(
                state.books.reported.kv_evictable_tokens - router.sketch.blocks(state.slot) * BLOCK_TOKENS >= 0
                for state in states
            ) and not any(state.approximate for state in states)

        await until(agreed)
        assert sum(router.sketch.blocks(state.slot) for state in states) >= 4 * 5
        assert total(router, "actual") >= 8 * 5 * BLOCK_TOKENS
        router.sketch.check()


@both_forms
async def test_a_look_aside_request_is_accounted_for_from_booking_to_end(form: str) -> None:
    async with fleet(2) as (router, client, _):
        route = await asking_by(client, form).route("look aside " * 60)
        state = router.registry.get(route.worker_id)
        assert state.books.own_requests == 1
        async with Client(route.address, timeout_s=60.0) as direct:
            done = await direct.complete(route.token_ids, lease_id=route.lease_id, max_new_tokens=20)
        assert done.started.worker_id == route.worker_id
        await until(lambda: not len(router.look_aside))
        ended = router.metrics.registry.get_sample_value("radixfleet_router_leases_total", {"outcome": "ended"})
        assert ended == 1
        assert (state.books.own_requests, state.books.own_tokens) == (0, 0)
        again = await client.complete("look aside " * 60)
        assert again.started.worker_id == route.worker_id
        assert again.started.cached_tokens >= 576

from __future__ import annotations

import asyncio

from router.dispatch.lookaside import LookAside
from router.workers.listener import LeasePhase
from tests.support.router_parts import Parts, prepared, tokens
from tests.support.waiting import until


def outcomes(parts: Parts) -> dict[str, float | None]:
    return {
        outcome: parts.metrics.registry.get_sample_value("radixfleet_router_leases_total", {"outcome": outcome})
        for outcome in ("ended", "released", "expired", "interrupted", "closed")
    }


async def test_a_lease_goes_on_as_the_worker_reports() -> None:
    parts = Parts(1)
    look_aside = LookAside(60.0, parts.metrics)
    lease = parts.chooser.choose(prepared(300))
    lease_id = look_aside.hold(lease)
    worker = lease.worker
    assert worker.view.outstanding_prompt_tokens == 300
    look_aside.lease_event(worker, lease_id, LeasePhase.STARTED, 64)
    assert worker.view.outstanding_prompt_tokens == 236
    look_aside.lease_event(worker, lease_id, LeasePhase.FIRST_TOKEN, 0)
    assert worker.view.outstanding_prompt_tokens == 0
    assert worker.view.running_requests == 1
    look_aside.lease_event(worker, lease_id, LeasePhase.ENDED, 0)
    assert outcomes(parts) == {"ended": 1, "released": 0, "expired": 0, "interrupted": 0, "closed": 0}
    parts.check_settled()
    look_aside.lease_event(worker, lease_id, LeasePhase.ENDED, 0)


async def test_no_two_leases_have_the_same_id_and_none_tells_of_another() -> None:
    parts = Parts(1)
    look_asides = [LookAside(60.0, parts.metrics) for _ in range(2)]
    ids = [each.hold(parts.chooser.choose(prepared(300))) for each in look_asides for _ in range(200)]
    assert len({half for lease_id in ids for half in (lease_id[:12], lease_id[12:])}) == 2 * len(ids)
    for look_aside in look_asides:
        look_aside.close()
    parts.check_settled()


async def test_a_lease_that_nobody_uses_expires() -> None:
    parts = Parts(1)
    look_aside = LookAside(0.01, parts.metrics)
    look_aside.hold(parts.chooser.choose(prepared(300)))
    await until(lambda: not len(look_aside))
    assert outcomes(parts)["expired"] == 1
    assert parts.sketch.num_blocks == 0
    parts.check_settled()


async def test_a_lease_that_started_does_not_expire() -> None:
    parts = Parts(1)
    look_aside = LookAside(0.01, parts.metrics)
    lease = parts.chooser.choose(prepared(300))
    lease_id = look_aside.hold(lease)
    look_aside.lease_event(lease.worker, lease_id, LeasePhase.STARTED, 0)
    await asyncio.sleep(0.05)
    assert lease.is_open
    look_aside.lease_event(lease.worker, lease_id, LeasePhase.ENDED, 0)
    parts.check_settled()


async def test_a_worker_speaks_for_its_own_leases_alone() -> None:
    parts = Parts(2)
    look_aside = LookAside(60.0, parts.metrics)
    lease = parts.chooser.choose(prepared(300))
    lease_id = look_aside.hold(lease)
    other = next(worker for worker in parts.workers if worker is not lease.worker)
    look_aside.lease_event(other, lease_id, LeasePhase.ENDED, 0)
    look_aside.lease_event(lease.worker, "unknown", LeasePhase.ENDED, 0)
    assert lease.is_open
    look_aside.close()
    assert outcomes(parts)["closed"] == 1
    parts.check_settled()


async def test_leases_of_a_worker_that_is_gone_are_settled() -> None:
    parts = Parts(2)
    look_aside = LookAside(60.0, parts.metrics)
    leases = [parts.chooser.choose(prepared(tokens(300, first=50 * n))) for n in range(6)]
    for lease in leases:
        look_aside.hold(lease)
    look_aside.worker_gone(parts.workers[0])
    assert {lease.worker.worker_id for lease in leases if lease.is_open} == {"w1"}
    look_aside.close()
    parts.check_settled()


async def test_after_an_interruption_only_leases_that_have_not_started_go_on() -> None:
    parts = Parts(1)
    look_aside = LookAside(60.0, parts.metrics)
    started, waiting = parts.chooser.choose(prepared(300)), parts.chooser.choose(prepared(400))
    started_id = look_aside.hold(started)
    look_aside.hold(waiting)
    look_aside.lease_event(started.worker, started_id, LeasePhase.STARTED, 0)
    look_aside.events_lost(parts.workers[0])
    assert not started.is_open
    assert waiting.is_open
    look_aside.close()
    parts.check_settled()


async def test_what_a_client_tells_of_its_leases() -> None:
    parts = Parts(1)
    look_aside = LookAside(60.0, parts.metrics)
    owner: set[str] = set()
    leases = [parts.chooser.choose(prepared(tokens(300, first=50 * n))) for n in range(3)]
    unsent, done, started = [look_aside.hold(lease, owner) for lease in leases]
    assert owner == {unsent, done, started}
    look_aside.end(unsent, None)
    assert not leases[0].is_started
    look_aside.end(done, 500)
    assert leases[1].is_started
    assert parts.metrics.prompt_tokens.actual == 300, "never more than the prompt has"
    look_aside.lease_event(parts.workers[0], started, LeasePhase.STARTED, 0)
    look_aside.end(started, 64)
    assert parts.metrics.prompt_tokens.actual == 300, "the worker's word stands"
    assert not owner
    assert outcomes(parts) == {"ended": 2, "released": 1, "expired": 0, "interrupted": 0, "closed": 0}
    look_aside.lease_event(parts.workers[0], done, LeasePhase.ENDED, 0)
    parts.check_settled()


async def test_an_owner_that_leaves_leaves_what_has_begun() -> None:
    parts = Parts(1)
    look_aside = LookAside(60.0, parts.metrics)
    owner: set[str] = set()
    leases = [parts.chooser.choose(prepared(tokens(300, first=50 * n))) for n in range(3)]
    ids = [look_aside.hold(lease, owner) for lease in leases[:2]]
    look_aside.hold(leases[2])
    look_aside.lease_event(parts.workers[0], ids[0], LeasePhase.STARTED, 0)
    look_aside.leave(owner)
    assert [lease.is_open for lease in leases] == [True, False, True]
    look_aside.lease_event(parts.workers[0], ids[0], LeasePhase.ENDED, 0)
    assert not owner
    look_aside.close()
    parts.check_settled()

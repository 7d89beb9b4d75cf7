"""What became different in a fleet, a line for each change: for people who watch it, and for logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from deploy.tables import state_of
from radixfleet.answers import WorkerEntry

SETTLED_S = 15.0
"""A router that runs for so long knows its workers: they register every 5 s, and it dials for 8 s."""


def heard(before: Sequence[WorkerEntry], told: Sequence[WorkerEntry], *, is_settling: bool) -> list[WorkerEntry]:
    """The workers that `told` is about, as far as the router knows them; `before` is what was heard until then.

    Nothing is heard of an address that has never answered, nor is a name or an incarnation forgotten that an earlier
    router knew. `is_settling`: the router was started a moment ago, and workers that it does not see yet are as before.
    """
    was = {worker.address: worker for worker in before}
    seen = [worker for worker in told if worker.worker_id and (worker.connected or not is_settling)]
    moved = {worker.worker_id for worker in seen if worker.address not in was}
    now = {worker.address: worker for worker in seen}
    unseen = {worker.address: worker for worker in told if worker.address not in now}
    for address, old in was.items():
        if address in now or old.worker_id in moved:
            continue
        if is_settling:
            now[address] = old
        elif address in unseen:
            now[address] = replace(unseen[address], worker_id=old.worker_id, info=old.info)
    return list(now.values())


def changes(before: Sequence[WorkerEntry], after: Sequence[WorkerEntry]) -> Iterator[str]:
    """Workers that went, came, are in another state, started their engine anew, or advise something else.

    One that is at another address than before was started again. Load changes all the time and is no change here.
    """
    known = {worker.address: worker for worker in before}
    here = {worker.address for worker in after}
    gone = [_name(worker) for worker in before if worker.address not in here]
    named = [worker for worker in after if worker.address not in known or _name(known[worker.address]) != _name(worker)]
    again = {_name(worker) for worker in named}.intersection(gone)
    for name in gone:
        if name not in again:
            yield f"{name}: left the fleet"
    for worker in after:
        if _name(worker) in again and worker in named:
            yield f"{_name(worker)}: was started again, {state_of(worker)}"
            continue
        for text in _changes_of(known.get(worker.address), worker):
            yield f"{_name(worker)}: {text}"


def _changes_of(was: WorkerEntry | None, worker: WorkerEntry) -> Iterator[str]:
    state = state_of(worker)
    if was is None:
        yield f"new, {state}"
        return
    if state != state_of(was):
        yield f"{state}, was {state_of(was)}"
    if was.info.incarnation and worker.info.incarnation not in (0, was.info.incarnation):
        yield "its engine was started again, with an empty cache"
    for advice in worker.info.advice:
        if advice not in was.info.advice:
            yield advice


def _name(worker: WorkerEntry) -> str:
    return worker.worker_id or worker.address

"""What became different in a fleet, a line for each change: for people who watch it, and for logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.tables import state_of
from radixfleet.answers import WorkerEntry


def changes(before: Sequence[WorkerEntry], after: Sequence[WorkerEntry]) -> Iterator[str]:
    """Workers that came, went, are in another state, started their engine anew, or advise something else.

    Load changes all the time and is no change here.
    """
    known = {worker.address: worker for worker in before}
    for worker in after:
        was = known.pop(worker.address, None)
        for text in _changes_of(was, worker):
            yield f"{_name(worker)}: {text}"
    for worker in known.values():
        yield f"{_name(worker)}: left the fleet"


def _changes_of(was: WorkerEntry | None, worker: WorkerEntry) -> Iterator[str]:
    state = state_of(worker)
    if was is None:
        yield f"new, {state}"
        return
    if state != state_of(was):
        yield f"{state}, was {state_of(was)}"
    if was.info.incarnation and worker.info.incarnation != was.info.incarnation:
        yield "its engine was started again, with an empty cache"
    for advice in worker.info.advice:
        if advice not in was.info.advice:
            yield advice


def _name(worker: WorkerEntry) -> str:
    return worker.worker_id or worker.address

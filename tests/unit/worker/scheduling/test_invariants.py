"""`check` must notice when the books are wrong; else the tests that lean on it prove nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.sim_worker import SimWorker, make_submit
from worker.memory.page_allocator import PageError
from worker.scheduling.request import Request, State
from worker.scheduling.scheduler import Scheduler


def busy_worker() -> tuple[Scheduler, Request]:
    """One request prefilling, one decoding with two steps in flight, one in the queue."""
    worker = SimWorker(num_pages=40, page_size=4, max_running=2, chunk=16)
    worker.submit(make_submit(1, np.arange(6), 20))
    worker.step()
    worker.submit(make_submit(2, np.arange(60) + 3, 20))
    worker.submit(make_submit(3, [1], 5))
    worker.launch()
    worker.launch()
    worker.scheduler.check()
    return worker.scheduler, worker.scheduler._lifecycle.requests[1]


def leak_a_page(scheduler: Scheduler, request: Request) -> None:
    scheduler.holdings.allocator.allocate(1)


def free_a_page_in_use(scheduler: Scheduler, request: Request) -> None:
    scheduler.holdings.allocator.free(scheduler.holdings.own_pages(request.held)[-1:])


def own_a_page_twice(scheduler: Scheduler, request: Request) -> None:
    request.held.duplicates.append(scheduler.holdings.own_pages(request.held)[:1])


def lose_a_row(scheduler: Scheduler, request: Request) -> None:
    scheduler.holdings.table.take_row()
    scheduler.holdings.table.release_row(request.held.row)


def share_a_row(scheduler: Scheduler, request: Request) -> None:
    request.held.row = scheduler._lifecycle.requests[2].held.row


def unlock_a_prefix(scheduler: Scheduler, request: Request) -> None:
    request.held.handle.node.locks -= 1


def change_a_row_in_flight(scheduler: Scheduler, request: Request) -> None:
    table = scheduler.holdings.table
    last = (request.planned - 1) // table.page_size
    table.pages[request.held.row, last] = table.pages[scheduler._lifecycle.requests[2].held.row, 0]


def settle_more_than_planned(scheduler: Scheduler, request: Request) -> None:
    request.settled = request.planned + 1


def miscount_steps(scheduler: Scheduler, request: Request) -> None:
    request.in_flight -= 1


def miscount_samples(scheduler: Scheduler, request: Request) -> None:
    request.samples_in_flight += 1


def wait_while_running(scheduler: Scheduler, request: Request) -> None:
    request.state = State.WAITING


def finish_without_leaving(scheduler: Scheduler, request: Request) -> None:
    request.state = State.FINISHED


def miscount_what_waits(scheduler: Scheduler, request: Request) -> None:
    scheduler._admission.queue.prompt_tokens += 1


def forget_a_request(scheduler: Scheduler, request: Request) -> None:
    del scheduler._lifecycle.requests[request.uid]


def drop_a_launched_step(scheduler: Scheduler, request: Request) -> None:
    scheduler._launched.popleft()


@pytest.mark.parametrize(
    "corrupt",
    [
        leak_a_page,
        free_a_page_in_use,
        own_a_page_twice,
        lose_a_row,
        share_a_row,
        unlock_a_prefix,
        change_a_row_in_flight,
        settle_more_than_planned,
        miscount_steps,
        miscount_samples,
        wait_while_running,
        finish_without_leaving,
        miscount_what_waits,
        forget_a_request,
        drop_a_launched_step,
    ],
)
def test_a_corruption_is_noticed(corrupt: Callable[[Scheduler, Request], None]) -> None:
    """Behaviour 10, the other way round."""
    scheduler, request = busy_worker()
    corrupt(scheduler, request)
    with pytest.raises((AssertionError, PageError)):
        scheduler.check()

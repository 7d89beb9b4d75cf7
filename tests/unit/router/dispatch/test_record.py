from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from radixfleet.clock import ManualClock
from radixfleet.errors import BY_REASON, RadixfleetError, Unavailable
from router.dispatch.record import RequestLog
from router.metrics import OUTCOMES, RouterMetrics


class Logging:
    def __init__(self) -> None:
        self.metrics = RouterMetrics()
        self.clock = ManualClock()
        self.log = RequestLog(self.metrics, self.clock)

    def outcomes(self) -> dict[str, float]:
        counted = {
            name: self.metrics.registry.get_sample_value("radixfleet_router_requests_total", {"outcome": name})
            for name in OUTCOMES
        }
        return {name: value for name, value in counted.items() if value}

    async def fail(self, error: BaseException, *, left_s: float | None = None, total_s: float | None = None) -> None:
        answers = iter([total_s, left_s])
        with pytest.raises(type(error)), self.log.follow("r", lambda: next(answers)):
            raise error


async def test_every_error_has_an_outcome_that_is_exported() -> None:
    logging = Logging()
    for kind in BY_REASON.values():
        if kind.code not in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            await logging.fail(kind("no"))
    assert set(logging.outcomes()) <= set(OUTCOMES)
    assert sum(logging.outcomes().values()) == len(BY_REASON) - 2
    assert logging.log.in_flight == 0


@pytest.mark.parametrize(
    ("total_s", "left_s", "outcome"),
    [
        (None, None, "cancelled"),
        (60.0, 30.0, "cancelled"),
        (60.0, 0.5, "deadline_exceeded"),
        (2.0, 0.05, "deadline_exceeded"),
        (2.0, -0.1, "deadline_exceeded"),
        (2.0, 0.5, "cancelled"),
    ],
)
async def test_a_client_that_hangs_up_when_its_time_is_over_did_not_cancel(
    total_s: float | None, left_s: float | None, outcome: str
) -> None:
    """Behaviour 58: cancelled requests are counted apart; a deadline is not a cancellation."""
    logging = Logging()
    await logging.fail(asyncio.CancelledError(), total_s=total_s, left_s=left_s)
    assert logging.outcomes() == {outcome: 1}


async def test_a_client_that_hangs_up_after_the_last_message_was_served() -> None:
    logging = Logging()

    async def request() -> None:
        with logging.log.follow("r", lambda: None) as record:
            record.is_complete = True
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await request()
    assert logging.outcomes() == {"ok": 1}


async def test_requests_that_are_cut_end_with_unavailable_in_a_task_that_goes_on() -> None:
    logging = Logging()
    went_on = False

    async def request() -> None:
        nonlocal went_on
        try:
            with logging.log.follow("r", lambda: None) as record:
                record.output_tokens = 7
                await asyncio.Event().wait()
        except RadixfleetError:
            await asyncio.sleep(0)
            went_on = True
            raise

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    assert not await logging.log.wait_until_idle(0.0)
    logging.log.cut()
    with pytest.raises(Unavailable, match="the router stops after 7 tokens:"):
        await task
    assert went_on
    assert await logging.log.wait_until_idle(0.0)
    assert logging.outcomes() == {"unavailable": 1}


async def test_a_request_is_one_line_in_the_log() -> None:
    logging = Logging()
    with capture_logs() as lines, logging.log.follow("mine", lambda: None) as record:
        record.worker, record.reason, record.prompt_tokens, record.output_tokens = "w0", "prefix", 300, 5
        record.predicted_tokens, record.cached_tokens = 256, 192
        logging.clock.advance(0.25)
        logging.log.first_token(record)
        logging.clock.advance(0.5)
        logging.log.first_token(record)
    assert len(lines) == 1
    expected = {
        "log_level": "info",
        "request_id": "mine",
        "worker": "w0",
        "reason": "prefix",
        "predicted_tokens": 256,
        "cached_tokens": 192,
        "outcome": "ok",
        "ttft_s": 0.25,
        "duration_s": 0.75,
    }
    assert expected.items() <= lines[0].items()


async def test_an_endless_request_id_is_cut_in_the_log() -> None:
    """It is refused, and refusals are logged."""
    with capture_logs() as lines, Logging().log.follow("r" * 1_000_000, lambda: None):
        pass
    assert lines[0]["request_id"] == "r" * 1024

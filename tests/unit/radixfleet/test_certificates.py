"""When certificates expire, and that it is said in time."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from radixfleet.certificates import SOON_S, expiry_s, expiry_told, warning
from radixfleet.clock import ManualClock
from radixfleet.tls import ServerTls
from tests.support.certificates import Authority
from tests.support.waiting import until

DAY_S = 86400.0
NOW_S = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC).timestamp()


@dataclass
class Certificate:
    cert_file: Path
    expires_s: float


def test_the_first_of_a_chain_to_expire_counts(tmp_path: Path) -> None:
    authority = Authority()
    short, long = (authority.issue(name, tmp_path, days=days).cert.read_bytes() for name, days in (("a", 3), ("b", 90)))
    assert expiry_s(long) - expiry_s(short) == pytest.approx(87 * DAY_S, abs=3600)
    assert expiry_s(long + short) == expiry_s(short)


@pytest.mark.parametrize(
    ("left_s", "words"),
    [
        (SOON_S + 60, None),
        (SOON_S - 60, "fleet.pem expires in 13 days (2030-01-14 23:59 UTC)"),
        (86400 + 60, "expires in 1 day ("),
        (60, "expires in 0 days"),
        (0, "has expired (2030-01-01 00:00 UTC)"),
    ],
)
def test_what_the_operator_is_told(left_s: float, words: str | None) -> None:
    told = warning(Path("fleet.pem"), NOW_S + left_s, NOW_S)
    assert told is None if words is None else words in (told or "")


async def test_it_is_told_again_and_again_until_there_is_a_new_one() -> None:
    certificate = Certificate(Path("fleet.pem"), NOW_S + DAY_S)
    shown: list[Callable[[], float]] = []
    looks = 0

    def now() -> float:
        nonlocal looks
        looks += 1
        return NOW_S

    with capture_logs() as lines:
        async with expiry_told(certificate, shown.append, now=now, look_every_s=0.001):
            await until(lambda: len(lines) >= 2)
            certificate.expires_s = NOW_S + 90 * DAY_S
            told, seen = len(lines), looks
            await until(lambda: looks >= seen + 3)
            assert len(lines) == told
        async with expiry_told(None, shown.append):
            pass
    (read,) = shown
    assert read() == certificate.expires_s
    assert {line["log_level"] for line in lines} == {"warning"}


def test_a_server_tells_of_the_certificate_that_it_has_now(tmp_path: Path) -> None:
    authority, clock = Authority(), ManualClock()
    pair = authority.issue("fleet", tmp_path, days=3)
    tls = ServerTls(pair.cert, pair.key, clock=clock)
    assert tls.expires_s == expiry_s(pair.cert.read_bytes())
    first = tls.expires_s
    authority.issue("fleet", tmp_path, days=90)
    clock.advance(1.0)
    assert tls.expires_s - first == pytest.approx(87 * DAY_S, abs=3600)

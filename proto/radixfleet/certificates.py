"""When certificates expire, and a word in the log before they do."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import structlog
from cryptography import x509

from radixfleet.background import beside
from radixfleet.counts import counted

SOON_S = 14 * 86400.0
"""Two weeks: enough for whoever has to ask somebody else for another one."""
_LOOK_EVERY_S = 6 * 3600.0

_log = structlog.get_logger("radixfleet.certificates")


class Expiring(Protocol):
    """Something whose certificate expires."""

    @property
    def cert_file(self) -> Path:
        """PEM file of the certificate."""
        ...

    @property
    def expires_s(self) -> float:
        """Unix time from which it is no longer good."""
        ...


def expiry_s(pem: bytes) -> float:
    """Unix time at which the first certificate of a PEM text (one and its chain) expires. Raises ValueError."""
    return min(each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(pem))


def warning(cert_file: Path, expires_s: float, now_s: float) -> str | None:
    """A warning for the operator of a certificate that expires soon; None of another. Times are Unix times."""
    if expires_s - now_s > SOON_S:
        return None
    date = datetime.datetime.fromtimestamp(expires_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    days = int((expires_s - now_s) // 86400)
    when = f"has expired ({date})" if expires_s <= now_s else f"expires in {counted(days, 'day')} ({date})"
    return f"the certificate {cert_file} {when}: put a new one in its place, which is taken up without a restart"


@asynccontextmanager
async def expiry_told(
    certificate: Expiring | None,
    show: Callable[[Callable[[], float]], None],
    *,
    now: Callable[[], float] = time.time,
    look_every_s: float = _LOOK_EVERY_S,
) -> AsyncIterator[None]:
    """While the block lasts, the log is told every few hours that a certificate expires soon. None: no TLS.

    `show` is given what reads the time of expiry, for a metric.
    """
    if certificate is None:
        yield
        return
    show(lambda: certificate.expires_s)

    async def look() -> None:
        while True:
            if text := warning(certificate.cert_file, certificate.expires_s, now()):
                _log.warning(text)
            await asyncio.sleep(look_every_s)

    async with beside(look(), "certificate"):
        yield

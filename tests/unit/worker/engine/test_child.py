"""How an engine's processes begin and wait."""

from __future__ import annotations

import fcntl
import resource
from collections.abc import Iterator

import pytest

from worker.engine.child import inherited, wait_for_any
from worker.engine.wire import FrameSocket

HIGH = 1500


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """As in a front with many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * HIGH), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_child_waits_for_sockets_whose_numbers_were_high_in_the_front() -> None:
    ours, theirs = FrameSocket.pair()
    with theirs:
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, HIGH)
    assert high >= HIGH
    child = inherited(high)
    assert child.fileno() < 1024
    ours.send(b"hello")
    wait_for_any([child], 60.0)
    assert child.receive() == [b"hello"]
    child.close()
    ours.close()

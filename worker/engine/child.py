"""What the engine process and the runner process have in common: how they begin, and how they wait."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import msgspec
import structlog

from radixfleet.lifeline import die_with_parent
from radixfleet.telemetry import setup_logging
from worker.engine.config import EngineConfig
from worker.engine.wire import FrameSocket

log = structlog.get_logger(__name__)

EXIT_LOAD_FAILED = 3
EXIT_RUNNER_GONE = 4


class Start(NamedTuple):
    """What a child is given."""

    config: EngineConfig
    sockets: list[FrameSocket]


def begin(role: str) -> Start:
    """First act of a child's main: tie its life to the front's, and take what the front hands over.

    `sys.argv` holds the front's process id and the inherited socket descriptors; the configuration comes as JSON on
    stdin. SIGINT and SIGTERM are ignored: a terminal or a service manager sends them to the whole group, but the front
    alone decides when its children end, after it has drained.
    """
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    setup_logging(config.log_level, json=config.log_json)
    structlog.contextvars.bind_contextvars(process=role)
    return Start(config, [inherited(int(argument)) for argument in sys.argv[2:]])


def inherited(descriptor: int) -> FrameSocket:
    """A socket of the front's, under the lowest free number.

    It has the number that it had there, which is high where the front has many connections, and `select` takes none
    from 1024 on.
    """
    lowest = os.dup(descriptor)
    os.close(descriptor)
    return FrameSocket(socket.socket(fileno=lowest))


def run(role: str, serve: Callable[[Start], int]) -> NoReturn:
    """The whole main of a child: begin, serve, and end with the exit code that `serve` returns, or 1 after a crash."""
    try:
        code = serve(begin(role))
    except Exception:
        log.critical("crashed", exc_info=True)
        code = 1
    sys.exit(code)


def wait_for_any(sockets: list[FrameSocket], timeout_s: float | None) -> None:
    """Block until one of the sockets can be read or the time is over, sending what is queued meanwhile.

    By select and not poll, which counts in milliseconds: too coarse for the time at which a step is to be planned.
    """
    writers = [each for each in sockets if each.wants_write]
    _, writable, _ = select.select(sockets, writers, [], timeout_s)
    for each in writable:
        each.flush()

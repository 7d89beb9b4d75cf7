"""Frames between two processes of a worker, over one connected stream socket (a socketpair made by the front).

    frame = length of the payload, 4 bytes little-endian | payload

Neither direction ever blocks: what the kernel does not take at once waits in `_outbound` until `flush`, which the owner
calls when its selector says that the socket can be written. Why not zmq: a socketpair tells each side at once when
the other is gone, leaves nothing on disk after a kill -9, and needs no thread of its own. What a round trip costs:
`python tests/bench/bench_engine_wire.py`.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Protocol, Self

_HEADER = struct.Struct("<I")
_READ_BYTES = 1 << 18
_SEND_BUFFER_BYTES = 1 << 22
"""Asked of the kernel, which may grant less: the plan of a long prompt should lie at the runner before it is needed."""


class HasFileno(Protocol):
    """What a selector can wait for."""

    def fileno(self) -> int:
        """A descriptor."""
        ...


class PeerClosed(ConnectionError):
    """The process at the other end closed its socket, most likely by ending."""


class FrameSocket:
    """One end. Owned by one thread."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket = connected
        self._inbound = bytearray()
        self._outbound = bytearray()
        self._ended = False

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """This process's end, and a plain socket to be inherited by a child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        """For selectors and event loops."""
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Something waits for `flush`."""
        return bool(self._outbound)

    def send(self, payload: bytes) -> None:
        """Send a frame, or queue what the kernel does not take now. A peer that is gone is told by `receive` alone."""
        if self._outbound:
            self._outbound += _HEADER.pack(len(payload))
            self._outbound += payload
            return
        frame = _HEADER.pack(len(payload)) + payload
        sent = self._write(frame)
        self._outbound += memoryview(frame)[sent:]

    def flush(self) -> None:
        """Send what is queued, as far as the kernel takes it."""
        sent = self._write(self._outbound)
        del self._outbound[:sent]

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(data)

    def receive(self) -> list[bytes]:
        """All whole frames that have arrived. Raises PeerClosed when there are none and none will follow."""
        while not self._ended:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self._ended = not data
            self._inbound += data
            if len(data) < _READ_BYTES:
                break
        frames = self._take_frames() if self._inbound else []
        if self._ended and not frames:
            raise PeerClosed("the process at the other end is gone")
        return frames

    def _take_frames(self) -> list[bytes]:
        frames: list[bytes] = []
        position = 0
        with memoryview(self._inbound) as view:
            while position + _HEADER.size <= len(view):
                (length,) = _HEADER.unpack_from(view, position)
                end = position + _HEADER.size + length
                if end > len(view):
                    break
                frames.append(bytes(view[position + _HEADER.size : end]))
                position = end
        del self._inbound[:position]
        return frames

    def wait_readable(self, *others: HasFileno, timeout_s: float | None = None) -> None:
        """Block until `receive` or one of `others` has something to say, the time is over, or queued bytes were sent.

        By select and not poll, which counts in milliseconds: too coarse for the end of a step.
        """
        writers = [self._socket] if self._outbound else []
        _, writable, _ = select.select([self._socket, *others], writers, [], timeout_s)
        if writable:
            self.flush()

    def drain(self) -> None:
        """Block until all that is queued is sent or the peer is gone: the last act before closing."""
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        while self._outbound:
            poller.poll()
            self.flush()

    def close(self) -> None:
        """Close this end; the other sees PeerClosed. Idempotent."""
        self._socket.close()

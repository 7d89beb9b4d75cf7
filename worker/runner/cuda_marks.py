"""Marks in a CUDA stream: events, and the times at which the device came by them."""

from __future__ import annotations

import torch

from radixfleet.clock import Clock


class CudaMark:
    """Implements `worker.runner.step_queue.Mark`."""

    def __init__(self, stream: CudaStream, event: torch.cuda.Event, clock: Clock) -> None:
        self.event = event
        self.not_before_s = clock.now()
        """The device had not come by at that time."""
        self._stream = stream
        self._clock = clock

    def is_past(self) -> bool:
        """See `Mark.is_past`."""
        asked_s = self._clock.now()
        if self.event.query():  # type: ignore[no-untyped-call]
            return True
        self.not_before_s = asked_s
        return False

    def wait(self) -> None:
        """See `Mark.wait`. Frees the interpreter's lock meanwhile."""
        self.event.synchronize()

    def passed_s(self) -> float:
        """See `Mark.passed_s`."""
        return self._stream.passed_s(self)


class CudaStream:
    """The current stream of a device, with marks and their times.

    Two events tell the time between them to half a microsecond, on the device's clock. Each is placed behind the one
    asked for before it, and held between the last time that it was known to be still ahead and now: so what steps
    take, and what lies between them, is exact, and the two clocks cannot drift apart.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        self._clock = clock
        self._last = self.mark()
        self._last.wait()
        self._last_s = clock.now()

    def mark(self) -> CudaMark:
        """A mark behind all that is launched."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return CudaMark(self, event, self._clock)

    def passed_s(self, mark: CudaMark) -> float:
        """See `Mark.passed_s`."""
        passed_s: float = self._last_s + self._last.event.elapsed_time(mark.event) / 1e3
        passed_s = min(max(passed_s, mark.not_before_s), self._clock.now())
        self._last, self._last_s = mark, passed_s
        return passed_s

"""Marks of devices that are not there: one that is always at the end of its stream, and one that a test drives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from radixfleet.clock import Clock
from worker.runner.step_computer import StepComputer
from worker.runner.step_queue import DeviceQueue
from worker.runner.torch_runner import QueuedTorchRunner


@dataclass
class StreamMark:
    """Past when the stream has come by; to wait for it drives the stream."""

    stream: Stream
    place: int
    at_s: float = 0.0

    def is_past(self) -> bool:
        return self.stream.num_done > self.place

    def wait(self) -> None:
        self.stream.waits += not self.is_past()
        while not self.is_past():
            self.stream.advance()

    def passed_s(self) -> float:
        assert self.is_past()
        return self.at_s


@dataclass
class Stream:
    """A device's work in order: each piece is done when the test, or somebody who waits, advances it."""

    clock: Clock
    work: list[Callable[[], None]] = field(default_factory=list)
    num_done: int = 0
    waits: int = 0
    """How often somebody had to."""

    def launch(self, piece: Callable[[], None]) -> None:
        self.work.append(piece)

    def advance(self) -> None:
        """Do the next piece of work."""
        self.work[self.num_done]()
        self.num_done += 1

    def finish(self) -> None:
        """Do all that is launched, with nobody's help."""
        while self.num_done < len(self.work):
            self.advance()

    def mark(self) -> StreamMark:
        mark = StreamMark(self, len(self.work))

        def pass_by() -> None:
            mark.at_s = self.clock.now()

        self.launch(pass_by)
        return mark


class QueuedOnCpu(QueuedTorchRunner):
    """A CPU in the place of the CUDA device: all that is launched is done at once, in order."""

    def _make_queue(self, computer: StepComputer) -> DeviceQueue:
        return DeviceQueue(computer, Stream(self._clock).mark, self._clock)

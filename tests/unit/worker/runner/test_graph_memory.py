"""What CUDA graphs will take, on a device whose driver a test plays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from worker.core.graph_sizes import graph_sizes
from worker.model.footprint import GRAPH_LAYER_BYTES
from worker.runner.decode_graphs import Record, Replay
from worker.runner.graph_memory import bytes_of_graphs

MIB = 1 << 20
LAYERS = 36
LIKELY = LAYERS * GRAPH_LAYER_BYTES


class Driver:
    """Takes some bytes for each record, and more for the first: modules are loaded then, and stay."""

    def __init__(self, *each: int, modules: int = 500 * MIB) -> None:
        self.taken = 3 * 1024 * MIB
        self._each = each
        self._modules = modules
        self.recorded: list[int] = []

    def record(self, compute: Callable[[], None]) -> Replay:
        compute()
        self.taken += self._each[min(len(self.recorded), len(self._each)) - 1]
        if len(self.recorded) == 1:
            self.taken += self._modules
        return compute

    def record_decodes(self, sizes: Sequence[int], record: Record) -> None:
        """As `StepComputer.record_decodes`: the largest first."""
        for size in reversed(sizes):
            record(lambda size=size: self.recorded.append(size))  # type: ignore[misc]

    def bytes_of(self, sizes: Sequence[int]) -> int:
        return bytes_of_graphs(
            self.record_decodes, sizes=sizes, num_layers=LAYERS, record=self.record, taken_bytes=lambda: self.taken
        )


def test_a_few_of_the_largest_tell_what_all_will_take() -> None:
    driver, sizes = Driver(14 * MIB), graph_sizes(256)
    assert driver.bytes_of(sizes) == 14 * MIB * len(sizes)
    assert driver.recorded == [256, 240, 224, 208]


def test_memory_that_the_driver_takes_in_large_pieces_is_averaged() -> None:
    assert Driver(0, 0, 0, 48 * MIB).bytes_of(graph_sizes(256)) == 16 * MIB * len(graph_sizes(256))


@pytest.mark.parametrize("each", [0, -700 * MIB, 2000 * MIB])
def test_what_others_take_or_give_meanwhile_is_not_taken_for_a_graphs(each: int) -> None:
    """Behaviour 62: two workers that load on one GPU at the same time."""
    assert Driver(each).bytes_of([1, 2, 4, 8]) == 4 * LIKELY


def test_a_single_size_is_measured_with_what_comes_once() -> None:
    assert Driver(10 * MIB, modules=MIB).bytes_of([1]) == 11 * MIB


def test_steps_that_cannot_be_recorded_have_no_size() -> None:
    def failing(_sizes: Sequence[int], _record: Record) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="when stream is capturing"):
        bytes_of_graphs(failing, sizes=[1, 2], num_layers=LAYERS, record=Driver(MIB).record, taken_bytes=lambda: MIB)

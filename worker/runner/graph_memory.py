"""What recorded steps (CUDA graphs) will take of a device, measured before the KV pool takes the rest.

    activations    of the largest recorded step, in a pool of the graphs' own that they share
    driver         what it keeps of each graph: of the order of a quarter of a MiB a layer. The largest few are recorded
                   over a pool of one page and let go again; what the device had less of after each is what one takes

The driver tells what the whole device has free. Where other processes take or give memory meanwhile, as workers that
start together on one GPU do, a measured size is not that of a graph; it is then taken from `GRAPH_LAYER_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
import torch

from worker.model.footprint import GRAPH_LAYER_BYTES
from worker.runner.decode_graphs import Record, Replay

_log = structlog.get_logger()
_MOST_TRIED = 4
_CREDIBLE = 8
"""A graph takes no more than so many times what is likely, and no less than that part of it."""


def driver_bytes(device: torch.device) -> int:
    """What of a GPU is neither free nor held by torch's allocator in this process. 0 for a CPU."""
    if device.type != "cuda":
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)


class Watched:
    """Implements `Record`: notes what of the device is taken after each record."""

    def __init__(self, record: Record, taken_bytes: Callable[[], int]) -> None:
        self._record = record
        self._taken_bytes = taken_bytes
        self.after: list[int] = []

    def __call__(self, compute: Callable[[], None]) -> Replay:
        """Record, and look."""
        replay = self._record(compute)
        self.after.append(self._taken_bytes())
        return replay


def bytes_of_graphs(
    record_decodes: Callable[[Sequence[int], Record], None],
    *,
    sizes: Sequence[int],
    num_layers: int,
    record: Record,
    taken_bytes: Callable[[], int],
) -> int:
    """What the driver will keep of graphs of `sizes`, ascending, of `num_layers` layers each.

    `record_decodes` is `StepComputer.record_decodes` of a computer that is let go afterwards. Raises whatever recording
    runs into.
    """
    likely = num_layers * GRAPH_LAYER_BYTES
    watched = Watched(record, taken_bytes)
    before = taken_bytes()
    record_decodes(sizes[-_MOST_TRIED:], watched)
    looks = watched.after if len(watched.after) > 1 else [before, *watched.after]
    each = (looks[-1] - looks[0]) // max(len(looks) - 1, 1)  # the first of several loads modules that stay loaded
    if not likely // _CREDIBLE <= each <= likely * _CREDIBLE:
        _log.debug("the size of a CUDA graph is assumed", measured_bytes=each, assumed_bytes=likely)
        each = likely
    return each * len(sizes)

"""Recording with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from worker.runner.decode_graphs import Record, Replay


def recorder_for(device: torch.device) -> Record | None:
    """What records on the device; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


class CudaRecorder:
    """Implements `Record`. All graphs share one pool of memory, as no two are replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream_of(device)

    def __call__(self, compute: Callable[[], None]) -> Replay:
        """Computes twice: first to have kernels compiled and libraries set up, then for the record."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        finally:
            torch.cuda.set_stream(current)  # torch leaves ours the current one where a record cannot be ended
        return graph.replay


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The same for all recorders: cuBLAS keeps some ten MiB of workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

"""Draws tokens by the kernels: those of `worker.sampling.host_draw.winners_by_bounds`, in an eighth of the time."""

from __future__ import annotations

import ctypes

import numpy as np

from worker.runner.kernels.library import DrawOperands, Kernels
from worker.sampling.host_draw import Drawing, Floats, Tokens


class KernelDraw:
    """Implements `worker.sampling.host_draw.Winners`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, drawing: Drawing, least: Floats) -> Tokens:
        """On the caller's thread alone: some 30 us for a row of 50,000 logits."""
        tokens = np.empty(len(least), np.int64)
        arrays = [
            np.ascontiguousarray(array, dtype)
            for array, dtype in (
                (drawing.logits, np.float32),
                (drawing.rows, np.int64),
                (drawing.largest, np.float32),
                (drawing.batch.temperature, np.float32),
                (least, np.float32),
                (drawing.batch.streams, np.uint32),
            )
        ]
        logits, *others = (array.ctypes.data for array in arrays)
        operands = DrawOperands(logits, drawing.logits.shape[1], len(least), *others, tokens.ctypes.data)
        self._kernels.library.rf_draw(ctypes.byref(operands))
        return tokens

"""The sequences of a step as the kernels read them."""

from __future__ import annotations

import numpy as np

from worker.runner.attention.protocol import AttentionBatch
from worker.runner.kernels.library import Batch


class HostBatch:
    """Holds the arrays that `batch` points into. The table is read in place; its slots are the allocator's word."""

    def __init__(self, batch: AttentionBatch) -> None:
        num_rows, num_columns = batch.table.shape
        assert int(batch.rows.max()) < num_rows, "a row that the table lacks"
        assert int(batch.ends.max()) <= num_columns, "a sequence is longer than the table"
        rows = batch.rows.astype(np.int64) * batch.table.stride(0)
        self._arrays = (np.ascontiguousarray(batch.starts), np.ascontiguousarray(batch.lengths), batch.offsets, rows)
        self._table = batch.table
        self.batch = Batch(len(batch.rows), *(array.ctypes.data for array in self._arrays), batch.table.data_ptr())

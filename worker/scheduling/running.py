"""The requests that are planned step by step: PREFILL and DECODE, in the order of their admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, KeysView

import numpy as np

from worker.scheduling.request import Request
from worker.scheduling.rows import RowIndex


class Running:
    """The running requests, by uid and by row, in the order of admission. Changed by `Lifecycle` alone."""

    def __init__(self, max_rows: int) -> None:
        self._requests: dict[int, Request] = {}
        self._row_of: dict[int, int] = {}
        self._by_row = np.full(max_rows, None, dtype=object)
        self._rows: RowIndex | None = None
        self.stop_tokens: set[int] = set()
        """Stop tokens that any running request has."""
        self._num_stopping: Counter[int] = Counter()
        """Number of running requests that have each stop token."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def uids(self) -> KeysView[int]:
        """Uids of all running requests, in order."""
        return self._requests.keys()

    @property
    def rows(self) -> RowIndex:
        """Rows of all running requests, in order: the same array until a request is added or removed."""
        if self._rows is None:
            self._rows = np.fromiter(self._row_of.values(), np.int64, len(self._row_of))
        return self._rows

    def at(self, rows: RowIndex) -> list[Request]:
        """The requests that have `rows`, in the order of `rows`."""
        requests: list[Request] = self._by_row[rows].tolist()
        return requests

    def add(self, request: Request) -> None:
        """Add a request that was just admitted, as the last."""
        self._requests[request.uid] = request
        self._row_of[request.uid] = request.held.row
        self._num_stopping.update(request.submit.stop_token_ids)
        self.stop_tokens.update(request.submit.stop_token_ids)
        self._by_row[request.held.row] = request
        self._rows = None

    def remove(self, request: Request) -> None:
        """Remove a request that is planned no more."""
        del self._requests[request.uid], self._row_of[request.uid]
        for token_id in request.submit.stop_token_ids:
            self._num_stopping[token_id] -= 1
            if not self._num_stopping[token_id]:
                del self._num_stopping[token_id]
                self.stop_tokens.remove(token_id)
        self._by_row[request.held.row] = None
        self._rows = None

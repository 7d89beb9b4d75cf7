"""The requests that are planned step by step: PREFILL and DECODE, in the order of their admission."""

from __future__ import annotations

from collections.abc import Iterator, KeysView

import numpy as np

from worker.scheduling.request import Request
from worker.scheduling.rows import RowIndex


class Running:
    """By uid and by row. Changed by `Lifecycle` alone."""

    def __init__(self, max_rows: int) -> None:
        self._requests: dict[int, Request] = {}
        self._by_row = np.full(max_rows, None, dtype=object)
        self._rows: RowIndex | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.uid in self._requests

    @property
    def uids(self) -> KeysView[int]:
        """Of all, in order."""
        return self._requests.keys()

    @property
    def rows(self) -> RowIndex:
        """Of all, in order: the same array as long as nobody comes or leaves."""
        if self._rows is None:
            rows = [request.held.row for request in self._requests.values()]
            self._rows = np.array(rows, dtype=np.int64)
        return self._rows

    def at(self, rows: RowIndex) -> list[Request]:
        """Those that have `rows`."""
        requests: list[Request] = self._by_row[rows].tolist()
        return requests

    def add(self, request: Request) -> None:
        """It was admitted: the newest."""
        self._requests[request.uid] = request
        self._by_row[request.held.row] = request
        self._rows = None

    def remove(self, request: Request) -> None:
        """It is planned no more."""
        del self._requests[request.uid]
        self._by_row[request.held.row] = None
        self._rows = None

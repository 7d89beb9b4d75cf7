"""The requests that are planned step by step: PREFILL and DECODE, in the order of their admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, KeysView

import numpy as np

from worker.scheduling.request import Request
from worker.scheduling.rows import RowIndex


class Running:
    """By uid and by row. Changed by `Lifecycle` alone."""

    def __init__(self, max_rows: int) -> None:
        self._requests: dict[int, Request] = {}
        self._row_of: dict[int, int] = {}
        self._by_row = np.full(max_rows, None, dtype=object)
        self._rows: RowIndex | None = None
        self._stops: Counter[tuple[int, ...]] = Counter()
        """Requests that have just these stop tokens: as a rule all, the model's."""

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
            self._rows = np.fromiter(self._row_of.values(), np.int64, len(self._row_of))
        return self._rows

    @property
    def stop_tokens(self) -> set[int]:
        """Those of any of them."""
        return {token_id for stops in self._stops for token_id in stops}

    def at(self, rows: RowIndex) -> list[Request]:
        """Those that have `rows`."""
        requests: list[Request] = self._by_row[rows].tolist()
        return requests

    def add(self, request: Request) -> None:
        """It was admitted: the newest."""
        self._requests[request.uid] = request
        self._row_of[request.uid] = request.held.row
        self._stops[request.submit.stop_token_ids] += 1
        self._by_row[request.held.row] = request
        self._rows = None

    def remove(self, request: Request) -> None:
        """It is planned no more."""
        del self._requests[request.uid], self._row_of[request.uid]
        stops = request.submit.stop_token_ids
        self._stops[stops] -= 1
        if not self._stops[stops]:
            del self._stops[stops]
        self._by_row[request.held.row] = None
        self._rows = None

"""What a worker tells of all that it has done since its engine started."""

from __future__ import annotations

from collections.abc import Mapping

from radixfleet.rates import Totals, ttft_bucket
from worker.metrics import STEP_STAGES

_NO_TTFT = Totals().ttft_counts


class TotalsKeeper:
    """Joins the engine's totals with what only the front sees: when first tokens came. On the front's event loop."""

    def __init__(self) -> None:
        self._ttft_counts = list(_NO_TTFT)

    def first_token(self, ttft_s: float) -> None:
        """A request has its first token, `ttft_s` after it came."""
        self._ttft_counts[ttft_bucket(ttft_s)] += 1

    def restart(self) -> None:
        """The engine is a new one: its totals begin at 0, so ours do."""
        self._ttft_counts = list(_NO_TTFT)

    def totals(self, counters: Mapping[str, float]) -> Totals:
        """Now. `counters`: those of the engine's last report, by name; see `worker.engine.counters`."""

        def count(name: str) -> int:
            return int(counters.get(name, 0))

        return Totals(
            requests=count("admitted_requests"),
            finished_requests=count("finished_requests"),
            failed_requests=count("failed_requests"),
            prompt_tokens=count("prompt_tokens"),
            cached_tokens=count("cached_tokens"),
            generated_tokens=count("generated_tokens"),
            steps=count("steps"),
            step_s=counters.get("step_s", 0.0),
            bubble_s=counters.get("bubble_s", 0.0),
            retractions=count("retractions"),
            out_of_memory=sum(count(f"out_of_memory_{stage}") for stage in STEP_STAGES),
            ttft_counts=tuple(self._ttft_counts),
        )

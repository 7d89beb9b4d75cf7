"""Figures of runs that belong together, by seed: differences to the first of them, with their standard errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one run."""

    hit_rate: float
    ttft_s: float
    """Mean."""
    mispredicted: float
    """By how much predicted and found cached tokens differed, request by request, as a share of what was found."""
    failed: int = 0


def table(found: Mapping[str, Sequence[Rates]]) -> str:
    """A line for each kind of run, which has one `Rates` a seed; all are compared with the first kind."""
    first = next(iter(found.values()))
    return "\n".join(_line(name, rates, first) for name, rates in found.items())


def _line(name: str, rates: Sequence[Rates], first: Sequence[Rates]) -> str:
    hits = waits = ""
    if rates is not first:
        pairs = list(zip(rates, first, strict=True))
        hits = _share([now.hit_rate / max(1e-9, one.hit_rate) for now, one in pairs])
        waits = _share([now.ttft_s / max(1e-9, one.ttft_s) for now, one in pairs])
    return (
        f"{name:>18}  hit rate {mean(each.hit_rate for each in rates):.3f} {hits:>14}  "
        f"mean TTFT {mean(each.ttft_s for each in rates):.3f} s {waits:>14}  "
        f"predictions off by {100 * mean(each.mispredicted for each in rates):.1f} %  "
        f"failed {sum(each.failed for each in rates)}"
    )


def _share(ratios: Sequence[float]) -> str:
    """By how much they are off 1, with the standard error of the mean."""
    error = f" ± {100 * stdev(ratios) / len(ratios) ** 0.5:.1f}" if len(ratios) > 1 else ""
    return f"{100 * (mean(ratios) - 1):+.1f}{error} %"

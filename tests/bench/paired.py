"""Figures of runs that belong together, by seed: differences to the first of them, with their standard errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from deploy.lab.repetition import paired


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
        hits = _difference([each.hit_rate for each in rates], [each.hit_rate for each in first])
        waits = _difference([each.ttft_s for each in rates], [each.ttft_s for each in first])
    return (
        f"{name:>18}  hit rate {mean(each.hit_rate for each in rates):.3f} {hits:>14}  "
        f"mean TTFT {mean(each.ttft_s for each in rates):.3f} s {waits:>14}  "
        f"predictions off by {100 * mean(each.mispredicted for each in rates):.1f} %  "
        f"failed {sum(each.failed for each in rates)}"
    )


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """By how much the ratios, seed by seed, are off 1, with the standard error of the mean."""
    ratio, error = paired(ours, theirs)
    return f"{100 * (ratio - 1):+.1f}" + (f" ± {100 * error:.1f} %" if len(ours) > 1 else " %")

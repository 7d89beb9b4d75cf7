"""What `radixfleet lab` is asked for, and the fleet, the requests and the policies that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from deploy.lab.capacity import requests_per_s
from deploy.lab.comparison import Variant
from deploy.lab.presets import PRESETS, Preset
from deploy.lab.simulation import Setup, Truth
from loadtest.catalog import CATALOG, Size, number_told
from loadtest.trace import ID_TOKENS, Trace
from loadtest.workloads import Arrival
from router.policies import POLICY_NAMES, Policy, make_policy

VOCAB_SIZE = 32_000
DEFAULT_REQUESTS = 2000
DEFAULT_LOAD = 0.7
LONGEST_S = 1e9
"""30 years, in which a float keeps times to less than a microsecond."""
_AT_ONCE_S = 0.001
"""Requests that all come within such a time have no rate that would say anything."""

_TRACES = (
    "a trace is a file with a JSON object a line: timestamp (ms), input_length, output_length, hash_ids; Mooncake's "
    "are in FAST25-release/traces of https://github.com/kvcache-ai/Mooncake"
)


class ExperimentError(ValueError):
    """There is no such workload, policy or GPU, or it cannot be run. `str(error)` says what there is."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One comparison, as the command line gives it."""

    workload: str
    """Name in the catalog, or path of a trace."""
    policies: str = "all"
    """Names, separated by commas."""
    workers: int = 8
    gpus: str = "h100-8b"
    """Names of presets, separated by commas. Worker i has the one at place i modulo their number."""
    kv_tokens: int | None = None
    """Size of each KV pool. None: what the preset's memory gives."""
    requests: int | None = None
    """None: `DEFAULT_REQUESTS` of a generated workload, all of a trace."""
    rate: float | None = None
    """Mean requests a second; at most one of rate, load and speed is given."""
    load: float | None = None
    """Rate as a share of what the fleet could take with perfect caching. None: `DEFAULT_LOAD`; a trace as recorded."""
    speed: float | None = None
    """Replay a trace so many times as fast as it was recorded. Generated workloads have no speed."""
    id_tokens: int = ID_TOKENS
    """Prompt tokens that each of a trace's hash_ids stands for."""
    routers: tuple[int, ...] = (1,)
    """Numbers of routers; each policy is run with each of them, and ..."""
    truths: tuple[Truth, ...] = ("deltas",)
    """... with each way in which routers learn what caches hold (see `Setup.truth`)."""
    report_delay_s: float = 0.1
    seed: int = 0

    def chosen_policies(self) -> list[Policy]:
        """Raises ExperimentError."""
        return [make_policy(name) for name in policy_names(self.policies)]

    def presets(self) -> list[Preset]:
        """What each worker is. Raises ExperimentError."""
        kinds = []
        for name in self.gpus.split(","):
            if name not in PRESETS:
                raise ExperimentError(f"no GPU is called {name!r}; there are {', '.join(PRESETS)}")
            preset = PRESETS[name]
            kinds.append(preset if self.kv_tokens is None else preset.with_kv_tokens(self.kv_tokens))
        return [kinds[number % len(kinds)] for number in range(self.workers)]

    def arrivals(self) -> list[Arrival]:
        """The requests. Raises ExperimentError, TraceError, or OSError for a file that cannot be read."""
        arrivals = self._arrivals()
        if arrivals[-1].at_s > LONGEST_S:
            raise ExperimentError(
                f"the requests come over {arrivals[-1].at_s:.3g} s; the lab's clock keeps microseconds for "
                f"{LONGEST_S:.3g} s: let them come {arrivals[-1].at_s / LONGEST_S:.3g} times as fast, or more"
            )
        return arrivals

    def _arrivals(self) -> list[Arrival]:
        given = [f"--{name}" for name in ("rate", "load", "speed") if getattr(self, name) is not None]
        if self.workload in CATALOG:
            if self.speed is not None:
                raise ExperimentError(f"--speed is for traces; {self.workload} is generated: give --load or --rate")
            if given and not CATALOG[self.workload].has_rate:
                raise ExperimentError(f"{self.workload} comes all at once: give no {given[0]}")
            if len(given) > 1:
                raise ExperimentError(f"a workload comes by one of --rate and --load, not by {_listed(given)}")
            return self._generated()
        if len(given) > 1:
            raise ExperimentError(f"a trace is replayed by one of --rate, --load and --speed, not by {_listed(given)}")
        path = Path(self.workload)
        if not path.is_file():
            raise ExperimentError(
                f"no workload is called {self.workload!r}, nor is there such a file; there are {', '.join(CATALOG)}; "
                + _TRACES
            )
        recorded = self._replayed(path, self.rate)
        if self.load is None:
            return recorded
        return self._replayed(path, self.load * requests_per_s(self.presets(), recorded))

    def variants(self) -> list[Variant]:
        """What is to be compared. Raises ExperimentError."""
        presets, policies = self.presets(), self.chosen_policies()
        found = []
        for policy, routers, truth in product(policies, self.routers, self.truths):
            # What tells it from the others; the policy where nothing does.
            name = [policy.name] if len(policies) > 1 or len(self.routers) == len(self.truths) == 1 else []
            name += [f"{routers} router" + "s" * (routers > 1)] if len(self.routers) > 1 else []
            name += [truth] if len(self.truths) > 1 else []
            setup = Setup(
                presets=presets,
                seed=self.seed,
                truth=truth,
                report_delay_s=self.report_delay_s,
                num_routers=routers,
            )
            found.append(Variant(", ".join(name), policy, setup))
        return found

    def facts(self, arrivals: Sequence[Arrival]) -> dict[str, str]:
        """What was run, for people."""
        presets = self.presets()
        kinds = {preset.name: preset for preset in presets}
        prompts = [arrival.prompt_tokens for arrival in arrivals]
        answers = [arrival.max_new_tokens for arrival in arrivals]
        entry = CATALOG.get(self.workload)
        number = number_told(len(arrivals), self.requests or DEFAULT_REQUESTS) if entry else str(len(arrivals))
        return {
            "workload": f"{self.workload}: {entry.text}" if entry else self.workload,
            "requests": f"{number}, {_rate(arrivals)}; seed {self.seed}",
            "tokens": f"prompts {_spread(prompts)}; answers {_spread(answers)}",
            "fleet": f"{self.workers} workers: " + "; ".join(f"{name} ({it.source})" for name, it in kinds.items()),
            "KV pool": "; ".join(f"{it.kv_tokens:,} tokens" for it in kinds.values()) + " a worker",
            "offered load": _offered(presets, arrivals),
            "routers": f"{_either(self.routers)}, know caches by {_either(self.truths)}, "
            f"reports {self.report_delay_s:g} s late",
        }

    def _generated(self) -> list[Arrival]:
        entry, presets = CATALOG[self.workload], self.presets()
        size = Size(
            num_workers=self.workers,
            kv_tokens=sum(preset.kv_tokens for preset in presets),
            num_requests=self.requests or DEFAULT_REQUESTS,
            requests_per_s=self.rate or 1.0,
        )
        if self.rate is None and entry.has_rate:
            probe = entry.make(size).arrivals(vocab_size=VOCAB_SIZE, seed=self.seed)
            rate = (DEFAULT_LOAD if self.load is None else self.load) * requests_per_s(presets, probe)
            size = Size(size.num_workers, size.kv_tokens, size.num_requests, rate)
        return entry.make(size).arrivals(vocab_size=VOCAB_SIZE, seed=self.seed)

    def _replayed(self, path: Path, rate: float | None) -> list[Arrival]:
        trace = Trace(path, self.speed or 1.0, rate, max_requests=self.requests, id_tokens=self.id_tokens)
        return trace.arrivals(vocab_size=VOCAB_SIZE, seed=self.seed)


def policy_names(text: str) -> list[str]:
    """Names with commas, or "all". Raises ExperimentError for one that is none, or that comes twice."""
    names = list(POLICY_NAMES) if text == "all" else text.split(",")
    for place, name in enumerate(names):
        if name not in POLICY_NAMES:
            raise ExperimentError(f"no policy is called {name!r}; there are {', '.join(POLICY_NAMES)}, and all")
        if name in names[:place]:
            raise ExperimentError(f"policy {name} is named twice; once is enough")
    return names


def offered_load(presets: Sequence[Preset], arrivals: Sequence[Arrival]) -> float:
    """The mean rate of the arrivals over what the fleet could take; infinite when all come at once."""
    until_s = arrivals[-1].at_s
    return len(arrivals) / until_s / requests_per_s(presets, arrivals) if until_s else float("inf")


def _rate(arrivals: Sequence[Arrival]) -> str:
    until_s = arrivals[-1].at_s
    return f"{len(arrivals) / until_s:,.1f} a second" if until_s > _AT_ONCE_S else "all at once"


def _offered(presets: Sequence[Preset], arrivals: Sequence[Arrival]) -> str:
    if arrivals[-1].at_s <= _AT_ONCE_S:
        return "all that there is, at once"
    return f"{offered_load(presets, arrivals):,.2f} of what the fleet could do with perfect caching"


def _listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]))


def _either(values: Sequence[object]) -> str:
    return " or ".join(map(str, values))


def _spread(lengths: Sequence[int]) -> str:
    return f"{sum(lengths) / len(lengths):,.0f} on average, {max(lengths):,} at most"

"""What keeps first tokens waiting, in virtual time: `python -m tests.bench.bench_first_token`.

The real loop and scheduler before a simulated device with the costs of the CPU (`tests.support.virtual_engine`), so the
figures are the same on every machine. Each workload three times: the next step planned as soon as one is launched;
planned when it is due (`worker.engine.pacing`); and with prompts that wait computed in several steps as well
(`worker.scheduling.prefill.enough_tokens`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean, median

import numpy as np

from tests.support.virtual_engine import STEP_COST_TOKENS, Asked, Clients, VirtualEngine

WAYS = {"at once": (False, 0), "when due": (True, 0), "when due, in several steps": (True, STEP_COST_TOKENS)}


def arrivals(per_s: float, count: int) -> Sequence[float]:
    """Of a Poisson process."""
    return [float(at_s) for at_s in np.cumsum(np.random.default_rng(5).exponential(1 / per_s, count))]


WORKLOADS = {
    "8 at a time, 512 shared + 64 tokens in, 64 out": Clients(),
    "8 at a time, 576 tokens in, 64 out": Clients(prefix_tokens=0, unique_tokens=576),
    "16 at a time, 200 tokens in, 16 out": Clients(200, 16, 0, 200, 16),
    "32 at a time, 64 tokens in, 2 out": Clients(400, 32, 0, 64, 2),
    "16 at a time, 576 tokens in, 2 out": Clients(100, 16, 0, 576, 2),
    "one at a time, 576 tokens in, 64 out": Clients(8, 1, 0, 576, 64),
    "2.5 a second, 512 shared + 64 tokens in, 64 out": Clients(concurrency=64, arrivals_s=arrivals(2.5, 120)),
    "1.2 a second, 576 tokens in, 64 out": Clients(80, 64, 0, 576, 64, arrivals_s=arrivals(1.2, 80)),
}


def figures(asked: Sequence[Asked]) -> str:
    """Of one run."""
    duration_s = max(each.token_times_s[-1] for each in asked) - asked[0].sent_s
    gaps = np.concatenate([np.diff(each.token_times_s) for each in asked])
    ttfts = [each.ttft_s for each in asked]
    return (
        f"first token p50 {1e3 * median(ttfts):6.0f} mean {1e3 * mean(ttfts):6.0f} ms, "
        f"answer {1e3 * mean(each.token_times_s[-1] - each.sent_s for each in asked):6.0f} ms, "
        f"between tokens mean {1e3 * gaps.mean():5.1f} p99 {1e3 * np.quantile(gaps, 0.99):5.0f} ms, "
        f"{sum(len(each.tokens) for each in asked) / duration_s:6.1f} tokens/s"
    )


def main() -> None:
    """All workloads."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, clients in WORKLOADS.items():
        print(name)
        for way, (paced, step_cost_tokens) in WAYS.items():
            engine = VirtualEngine(clients, paced=paced, step_cost_tokens=step_cost_tokens)
            print(f"  {way:27}{figures(engine.run())}")


if __name__ == "__main__":
    main()

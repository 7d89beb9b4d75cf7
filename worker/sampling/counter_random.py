"""Random numbers without state: a hash of (seed, position). See `worker.sampling.noise` for what is made of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit changes every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def child_seeds(seed: int, n: int) -> list[int]:
    """Seeds of the n completions of a request: its own for the first, and others that follow from it, all different."""
    children = _mix(np.uint64(seed) + np.arange(1, n, dtype=np.uint64) * _GOLDEN)
    return [seed, *children.tolist()]


def stream_bits(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """64 random bits for each (seed, position); independent between seeds and between positions."""
    of_seeds = _mix(seeds.astype(np.uint64) + _GOLDEN)
    return _mix(of_seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)

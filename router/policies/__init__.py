"""Routing policies: pure functions from snapshots to a ranking."""

from __future__ import annotations

from router.policies.counting import LeastLoad, PowerOfTwo, RandomChoice, RoundRobin
from router.policies.linear import Linear
from router.policies.min_cost import MinCost
from router.policies.policy import Policy
from router.policies.prefix_hash import PrefixHash
from router.policies.sglang import SGLangCacheAware

__all__ = ["DEFAULT_POLICY", "POLICY_NAMES", "Policy", "make_policy"]

_POLICIES: dict[str, type[Policy]] = {
    "min_cost": MinCost,
    "sglang": SGLangCacheAware,
    "linear": Linear,
    "power_of_two": PowerOfTwo,
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "prefix_hash": PrefixHash,
}

POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)
"""The default first."""

DEFAULT_POLICY = POLICY_NAMES[0]


def make_policy(name: str) -> Policy:
    """The policy called `name`, one of POLICY_NAMES; ValueError for another."""
    if name not in _POLICIES:
        raise ValueError(f"no policy is called {name!r}; there are {', '.join(POLICY_NAMES)}")
    return _POLICIES[name]()

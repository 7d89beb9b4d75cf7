"""What the connections to all workers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from radixfleet.access import Access
from radixfleet.clock import Clock
from router.config import RouterSettings
from router.index import Sketch
from router.metrics import RouterMetrics
from router.workers.listener import LeaseListener
from router.workers.tokenizers import TokenizerStore


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Made once by the app."""

    settings: RouterSettings
    sketch: Sketch
    tokenizers: TokenizerStore
    metrics: RouterMetrics
    listener: LeaseListener
    access: Access
    clock: Clock
    random: Random
    engine_key: Callable[[], str | None] = lambda: None
    """What configured engines with OpenAI's API are shown, now."""

"""The router's record of which prefixes each worker holds in its KV cache."""

from router.index.hot_prefixes import HotPrefix, HotPrefixes
from router.index.lease import BlockLease
from router.index.sketch import Sketch

__all__ = ["BlockLease", "HotPrefix", "HotPrefixes", "Sketch"]

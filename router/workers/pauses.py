"""How long a worker that was lost is left alone before it is asked again. Pure."""

from __future__ import annotations

from random import Random

LASTING_S = 5.0
"""A connection that held for so long was one. What ended it has nothing to do with what ended others before."""
_FIRST_S = 0.1
_LONGEST_S = 2.0


class Pauses:
    """Of one worker: none after a lasting connection, for most losses are over at once; then longer each time."""

    def __init__(self, random: Random) -> None:
        """`random`: spreads a fleet's questions."""
        self._random = random
        self._losses = 0
        """Losses in a row."""

    def next_s(self, connected_s: float) -> float:
        """How long to wait after a loss. `connected_s`: how long the connection had held; 0 when there was none."""
        self._losses = 1 if connected_s >= LASTING_S else self._losses + 1
        if self._losses == 1:
            return 0.0
        pause_s = min(_FIRST_S * 2.0 ** min(self._losses - 2, 10), _LONGEST_S)
        return pause_s * self._random.uniform(0.5, 1.0)

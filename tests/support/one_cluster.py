"""How the test processes share out the suite."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling


class OneClusterAtATime(LoadFileScheduling):  # type: ignore[misc]  # has no types
    """A file stays on one process, and all tests of Ray on one: a cluster is as many processes as all the rest."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "tests/ray" if file.startswith("tests/ray/") else file

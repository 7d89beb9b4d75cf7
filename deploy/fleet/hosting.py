"""What the supervisor needs of whatever its members live in: Ray's actors, or entries of a test's dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deploy.fleet.spec import Resources
from radixfleet.membership import MemberReport


class Hosting(Protocol):
    """Where members live."""

    async def names(self) -> set[str]:
        """Of all members there are, whoever made them."""
        ...

    async def start(
        self, name: str, *, router: bool, settings: Mapping[str, Any], resources: Resources, avoid: Sequence[str]
    ) -> None:
        """Make a member; it may have to wait for a place. `avoid`: nodes on which it must not be.

        Raises InvalidRequest when there can be no such member.
        """
        ...

    async def nodes(self) -> set[str]:
        """Ids of those that are there now."""
        ...

    async def going(self) -> dict[str, float]:
        """Ids of nodes that whoever owns them takes away, each with the seconds that it has left (inf: not known)."""
        ...

    async def report(self, name: str, routers: Sequence[str] | None) -> MemberReport:
        """How it is. `routers`: where all routers are; None: not known now. Raises MemberGone and MemberLost."""
        ...

    async def drain(self, name: str) -> None:
        """Have it take no new requests. One that cannot be told is drained by its end."""
        ...

    async def end(self, name: str, *, again: bool, asks: bool = True) -> None:
        """End it, in order if it answers, else at once; `again`: it starts anew. Returns when it has been done.

        `asks`: False for one that has no place yet, and so nothing to end in order.
        """
        ...

"""What the supervisor must not forget, as JSON in a store that outlives it (and the head, where Ray's GCS does)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from deploy.fleet.reconcile import Group, Wanted
from deploy.fleet.spec import ROUTER_GROUP, FleetSpec, parse_spec


class Record(msgspec.Struct):
    """A member that was made."""

    group: str
    revision: str
    node_id: str = ""
    """Where it was last seen; empty: nowhere yet, so it waits for a place."""


class Books(msgspec.Struct):
    """Orders and members. Written before what they say is done, so that a new supervisor goes on from there."""

    spec_text: str = ""
    """fleet.yaml as it was applied; empty: nothing was yet, or the fleet is being taken down."""
    bounds: dict[str, tuple[int, int]] = {}
    """By model: how many workers at least and at most."""
    counts: dict[str, int] = {}
    """By model: how many now."""
    members: dict[str, Record] = {}
    leaving: set[str] = set()
    unheld: set[str] = set()
    """Of these, who go at once, though nobody else serves."""
    restarting: set[str] = set()
    cordoned: set[str] = set()
    """Nodes on which nothing is started."""

    def spec(self) -> FleetSpec | None:
        """The fleet as wanted; None when there shall be none."""
        return parse_spec(self.spec_text) if self.spec_text else None

    def forget(self, name: str) -> None:
        """A member is no more."""
        self.members.pop(name, None)
        self.leaving.discard(name)
        self.unheld.discard(name)
        self.restarting.discard(name)

    def wanted(self, spec: FleetSpec | None, hurried: Mapping[str, float] = MappingProxyType({})) -> Wanted:
        """For `reconcile`. Routers go when the last worker has, for the streams of workers lead through them.

        `hurried`: see `Wanted`.
        """
        groups: list[Group] = []
        if spec is not None:
            groups.append(Group(ROUTER_GROUP, spec.routers.count, spec.revision(ROUTER_GROUP), surge=0))
            groups += [Group(model, self.counts[model], spec.revision(model)) for model in spec.models]
        elif any(record.group != ROUTER_GROUP for record in self.members.values()):
            routers = [record for record in self.members.values() if record.group == ROUTER_GROUP]
            if routers:
                groups.append(Group(ROUTER_GROUP, len(routers), routers[0].revision, surge=0))
        return Wanted(
            tuple(groups),
            frozenset(self.leaving),
            frozenset(self.restarting),
            hurried,
            frozenset(self.unheld),
        )


class Store(Protocol):
    """Where the books are kept. Calls block."""

    def load(self) -> bytes | None:
        """None: nothing was saved."""
        ...

    def save(self, data: bytes) -> None:
        """Whoever loads afterwards gets this."""
        ...


def load_books(store: Store) -> Books:
    """The books, or new ones."""
    data = store.load()
    return msgspec.json.decode(data, type=Books) if data else Books()


def save_books(store: Store, books: Books) -> None:
    """Blocks."""
    store.save(msgspec.json.encode(books))
